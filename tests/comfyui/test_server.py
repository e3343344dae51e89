"""The node pack in a real server: loaded, listed, run, bypassed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.comfyui import checkpoints
from tests.comfyui.server import PACK, Server
from tests.pipelines import tiny

MODEL_NODES = ["DiffkernOptimizeModel", "DiffkernReport", "DiffkernVerify", "DiffkernBenchmark", "DiffkernDoctor"]
PIPELINE_NODES = ["DiffkernLoadPipeline", "DiffkernOptimizePipeline", "DiffkernGenerateVideo"]

LATENTS = {
    "ltx": ("EmptyLTXVLatentVideo", {"width": 128, "height": 96, "length": 9, "batch_size": 1}),
    "flux": ("EmptySD3LatentImage", {"width": 96, "height": 80, "batch_size": 1}),
    "wan": ("EmptyHunyuanLatentVideo", {"width": 64, "height": 48, "length": 5, "batch_size": 1}),
}


@pytest.fixture(scope="module")
def server(comfyui: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("comfyui"))
    for kind in LATENTS:
        checkpoints.write(kind, server.models / f"{kind}.safetensors")
    with server:
        yield server


def workflow(kind: str, name: str, optimize: dict[str, Any] | None, run: int = 0) -> dict[str, Any]:
    """Loader, sampler, results; with or without the node between them."""
    latent, size = LATENTS[kind]
    prompt: dict[str, Any] = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": f"{kind}.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "TinyConditioning", "inputs": {"seed": 1, "run": run}},
        "3": {"class_type": "TinyConditioning", "inputs": {"seed": 2, "run": run}},
        "4": {"class_type": latent, "inputs": size},
        "6": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0], "seed": 5,
                "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
            },
        },
        "7": {"class_type": "SaveLatent", "inputs": {"samples": ["6", 0], "filename_prefix": name}},
    }  # fmt: skip
    if optimize is not None:
        defaults = {
            "mode": "fast", "modulation": True, "qk_norm_rope": True, "comfy_kitchen": "auto", "backend": "auto",
            "blocks": "", "on_unsupported": "warn",
        }  # fmt: skip
        prompt["5"] = {"class_type": "DiffkernOptimizeModel", "inputs": {"model": ["1", 0], **defaults, **optimize}}
        prompt["6"]["inputs"]["model"] = ["5", 0]
        prompt["7"]["inputs"]["samples"] = ["11", 0]
        prompt["8"] = {"class_type": "PreviewAny", "inputs": {"source": ["5", 1]}}
        prompt["11"] = {"class_type": "DiffkernReport", "inputs": {"model": ["5", 0], "latent": ["6", 0]}}
        prompt["9"] = {
            "class_type": "DiffkernVerify",
            "inputs": {
                "model": ["5", 0], "positive": ["2", 0], "latent_image": ["4", 0], "steps": 2, "seed": 1,
                "tolerance": 1e-4, "on_failure": "error",
            },
        }  # fmt: skip
    return prompt


def result(server: Server, name: str) -> torch.Tensor:
    (path,) = (server.base / "output").glob(f"{name}_*.latent")
    return load_file(path)["latent_tensor"]


def test_the_nodes_are_listed_with_inputs_tooltips_and_outputs(server: Server) -> None:
    listed = server.get("/object_info")

    assert {*MODEL_NODES, *PIPELINE_NODES} <= set(listed)
    optimize = listed["DiffkernOptimizeModel"]
    assert optimize["output"] == ["MODEL", "STRING", "VAE"]
    assert optimize["python_module"] == "custom_nodes.diffkern"
    inputs = optimize["input"]["required"]
    assert list(inputs) == [
        "model", "mode", "modulation", "qk_norm_rope", "comfy_kitchen", "backend", "blocks", "on_unsupported",
    ]  # fmt: skip
    assert inputs["mode"][1]["options"] == ["fast", "exact", "fp8", "off"]
    assert all(options["tooltip"] for name, (_, options) in inputs.items() if name != "model")
    log = server.log.read_text().splitlines()
    assert not [line for line in log if "Cannot import" in line and "diffkern" in line]


@pytest.mark.parametrize("kind", LATENTS)
def test_a_workflow_runs_and_a_bypassed_node_leaves_nothing(server: Server, kind: str) -> None:
    server.run(workflow(kind, f"{kind}_native", None))
    shown = server.run(workflow(kind, f"{kind}_fast", {}))
    server.run(workflow(kind, f"{kind}_exact", {"mode": "exact"}))
    server.run(workflow(kind, f"{kind}_bypassed", None, run=1))
    server.run(workflow(kind, f"{kind}_optimized_again", {}, run=2))

    native, fast = result(server, f"{kind}_native"), result(server, f"{kind}_fast")
    assert torch.isfinite(fast).all() and not torch.equal(fast, native)
    assert (fast - native).norm() <= 1e-5 * native.norm()
    assert torch.equal(result(server, f"{kind}_exact"), native)
    assert torch.equal(result(server, f"{kind}_bypassed"), native)
    assert torch.equal(result(server, f"{kind}_optimized_again"), fast)
    assert "patched" in shown["8"]["text"][0] and "by compiled" in shown["8"]["text"][0]
    assert shown["9"]["text"][0].startswith("PASS")
    assert "not run yet" in shown["8"]["text"][0] and "Report (diffkern) behind the sampler" in shown["8"]["text"][0]
    assert " ran fused (" in shown["11"]["text"][0] and "calls so far: " in shown["11"]["text"][0]


def test_mode_fp8_runs_as_fast_without_such_a_gpu_and_says_so(server: Server) -> None:
    server.run(workflow("flux", "flux_as_fast", {}))
    shown = server.run(workflow("flux", "flux_fp8", {"mode": "fp8"}))
    assert torch.equal(result(server, "flux_fp8"), result(server, "flux_as_fast"))
    assert "no layer is in fp8 (fp8 needs an NVIDIA GPU" in " ".join(shown["8"]["text"][0].split())


def test_benchmark_and_doctor_say_what_they_found(server: Server) -> None:
    prompt = workflow("ltx", "benchmark", {})
    prompt["9"] = {
        "class_type": "DiffkernBenchmark",
        "inputs": {
            "model": ["5", 0], "positive": ["2", 0], "latent_image": ["4", 0], "steps": 3, "runs": 1, "seed": 1,
        },
    }  # fmt: skip
    prompt["10"] = {"class_type": "DiffkernDoctor", "inputs": {}}
    shown = server.run(prompt)

    assert "ms a step" in shown["9"]["text"][0] and "times as fast" in shown["9"]["text"][0]
    assert "Backends of comfy-kitchen" in shown["10"]["text"][0]
    prompt["9"]["inputs"]["model"] = ["1", 0]
    assert server.run(prompt)["9"]["text"][0].startswith("nothing to time: this model is not optimized")


def test_a_diffusers_pipeline_is_loaded_optimized_and_run(server: Server) -> None:
    tiny.build("ltx")[0].save_pretrained(server.base / "elsewhere")
    (server.base / "models" / "diffusers").mkdir()
    (server.base / "models" / "diffusers" / "tiny-ltx").symlink_to(server.base / "elsewhere")
    listed = server.get("/object_info")["DiffkernLoadPipeline"]["input"]["required"]
    assert listed["pipeline"][1]["options"] == ["tiny-ltx"]
    video = {
        "prompt": "a fox", "negative_prompt": "blurry", "width": 32, "height": 32, "num_frames": 9, "steps": 2,
        "guidance_scale": 3.0, "seed": 1,
    }  # fmt: skip
    loader = {"pipeline": "tiny-ltx", "dtype": "auto", "offload": "none"}
    prompt = {
        "1": {"class_type": "DiffkernLoadPipeline", "inputs": loader},
        "2": {
            "class_type": "DiffkernOptimizePipeline",
            "inputs": {"pipeline": ["1", 0], "mode": "fast", "backend": "auto", "on_unsupported": "warn"},
        },
        "3": {"class_type": "DiffkernGenerateVideo", "inputs": {"pipeline": ["2", 0], **video}},
        "4": {"class_type": "DiffkernGenerateVideo", "inputs": {"pipeline": ["1", 0], **video}},
        "5": {"class_type": "PreviewAny", "inputs": {"source": ["3", 1]}},
        "6": {"class_type": "PreviewAny", "inputs": {"source": ["4", 1]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "pipeline"}},
    }
    shown = server.run(prompt)

    assert "modules of LTXPipeline" in shown["5"]["text"][0] and shown["6"]["text"] == ["nothing is injected"]
    assert len(list((server.base / "output").glob("pipeline_*.png"))) == 9


def test_an_unsupported_choice_is_an_error_that_says_why(server: Server) -> None:
    with pytest.raises(RuntimeError, match="without changing a bit"):
        server.run(workflow("wan", "refused", {"mode": "exact", "on_unsupported": "error"}))
    with pytest.raises(RuntimeError, match="fits none of the 7 modules"):
        server.run(workflow("wan", "refused", {"blocks": "40-50"}))


@pytest.mark.parametrize("path", sorted((PACK / "example_workflows").glob("*.json")), ids=lambda path: path.stem)
def test_example_workflows_fit_the_nodes_of_this_comfyui(server: Server, path: Path) -> None:
    listed = server.get("/object_info")
    graph = json.loads(path.read_text())
    links = {link[0]: link for link in graph["links"]}
    types = [node["type"] for node in graph["nodes"]]

    assert {"DiffkernOptimizeModel", "DiffkernOptimizePipeline"} & set(types)
    for node in graph["nodes"]:
        if node["type"] in ("MarkdownNote", "Note"):
            continue
        info = listed[node["type"]]
        known = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
        assert {entry["name"] for entry in node["inputs"]} <= set(known)
        for slot, entry in enumerate(node["inputs"]):
            if entry.get("link") is not None:
                _, source, output, target, place, kind = links[entry["link"]]
                assert (target, place) == (node["id"], slot)
                (origin,) = (other for other in graph["nodes"] if other["id"] == source)
                assert listed[origin["type"]]["output"][output] == kind
        required = {name for name, spec in info["input"].get("required", {}).items() if not _is_widget(spec)}
        assert required <= {entry["name"] for entry in node["inputs"] if entry.get("link") is not None}


@pytest.mark.parametrize("kind", LATENTS)
@pytest.mark.parametrize("bypassed", [False, True], ids=["fused", "bypassed"])
def test_example_workflows_run_with_tiny_models_in_place_of_their_files(
    server: Server, kind: str, bypassed: bool
) -> None:
    (path,) = (PACK / "example_workflows").glob(f"{kind}*.json")
    graph = json.loads(path.read_text())
    prompt = posted(graph, kind, bypassed)
    shown = server.run(prompt)
    texts = [text for number, output in shown.items() if prompt[number]["class_type"] == "PreviewAny"
             for text in output["text"]]  # fmt: skip

    (report,) = (shown[number]["text"][0] for number, node in prompt.items() if node["class_type"] == "DiffkernReport")

    assert ("this model is not optimized" in report) is bypassed and (" ran fused (" in report) is not bypassed
    assert len(texts) == (1 if bypassed else 2)
    assert sum("patched" in text and "by compiled" in text for text in texts) == (0 if bypassed else 1)
    assert sum(text.startswith("PASS") for text in texts) == (not bypassed)
    assert texts[0].startswith("nothing to verify: this model is not optimized") is bypassed
    assert len(list((server.base / "output").glob(f"example_{kind}_{bypassed}_*.latent"))) == 1


def posted(graph: dict[str, Any], kind: str, bypassed: bool) -> dict[str, Any]:
    """What ComfyUI's page makes of a graph, with tiny models and sizes, and latents instead of pictures."""
    x, y, width, height = graph["groups"][0]["bounding"]
    links = {link[0]: (str(link[1]), link[2]) for link in graph["links"]}
    loaders = {"UNETLoader", "CheckpointLoaderSimple"}
    left_out = {"MarkdownNote", "CLIPLoader", "DualCLIPLoader", "VAELoader", "CreateVideo", "SaveVideo", "SaveImage"}
    small = {"width": 96, "height": 64, "length": 9, "steps": 2}
    prompt: dict[str, Any] = {}
    passes = {}
    for node in graph["nodes"]:
        values, number, type_ = iter(node["widgets_values"]), str(node["id"]), node["type"]
        inputs = {}
        for entry in node["inputs"]:
            if "widget" in entry:
                value = next(values)
                inputs[entry["name"]] = small.get(entry["name"], value)
                if "seed" in entry["name"]:
                    assert next(values) == "fixed"
            elif entry["link"] is not None:
                inputs[entry["name"]] = links[entry["link"]]
        in_group = x <= node["pos"][0] < x + width and y <= node["pos"][1] < y + height
        if type_ == "DiffkernOptimizeModel" and bypassed:
            passes[number, 0] = inputs["model"]
        if type_ in left_out or node["mode"] == 4 or (in_group and bypassed):
            continue
        if type_ in loaders:
            type_, inputs = "UNETLoader", {"unet_name": f"{kind}.safetensors", "weight_dtype": "default"}
        elif type_ == "CLIPTextEncode":
            type_, inputs = "TinyConditioning", {"seed": node["id"], "run": 0}
        elif type_ == "VAEDecode":
            type_ = "SaveLatent"
            inputs = {"samples": inputs["samples"], "filename_prefix": f"example_{kind}_{bypassed}"}
        prompt[number] = {"class_type": type_, "inputs": inputs}
    for node in prompt.values():
        node["inputs"] = {name: passes.get(value, value) for name, value in node["inputs"].items()}
    return prompt


def _is_widget(spec: list[Any]) -> bool:
    plain = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
    return isinstance(spec[0], list) or spec[0] in plain
