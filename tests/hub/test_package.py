"""Our kernels as a kernel repository: complete, loaded by ``kernels`` from a path and over HTTP, run in a model."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from diffkern import inject_optimized_kernels
from diffkern.build import Build, Variant, build_kernels
from diffkern.build.installed import find_builds
from diffkern.hub.package import TRITON_VARIANTS, Package, package
from diffkern.hub.policy import InputError
from diffkern.providers import triton as triton_provider
from tests.hub.conftest import ROOT, Run, result
from tests.hub.server import Files, LoopbackHub
from tests.package.test_cli import invoke

CPU_VARIANT = Variant("cpu", None, platform.machine()).name


@pytest.fixture(scope="session")
def cpu_build() -> Build:
    """A build of the CPU's kernels; without one the test is skipped, or fails if it is required."""
    builds = find_builds("cpu")
    if not builds:
        if "compiled" in os.environ.get("DIFFKERN_REQUIRE_PROVIDERS", ""):
            pytest.fail("DIFFKERN_REQUIRE_PROVIDERS names compiled, and there is no CPU build")
        pytest.skip("the kernels are not built for the CPU")
    return builds[0]


@pytest.fixture(scope="session")
def repository(cpu_build: Build, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return package(tmp_path_factory.mktemp("kernel") / "diffkern", "me/diffkern", builds=[cpu_build])


def files(directory: Path) -> Files:
    paths = [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def published(hub: LoopbackHub, repository: Package) -> LoopbackHub:
    hub.repository("me/diffkern").commit(files(repository.directory), "v1")
    return hub


# --- what is in it -------------------------------------------------------------------------------------------


@pytest.mark.exhaustive  # compiles where the build on this machine is not of these sources
def test_the_command_names_the_builds_and_how_to_publish_them(tmp_path: Path, cpu_build: Build) -> None:
    done = invoke("hub", "package", str(tmp_path / "out"), "--repo-id", "me/diffkern", "--json")
    assert done.exit_code == 0, done.output
    assert {CPU_VARIANT, *TRITON_VARIANTS} <= {row["build"] for row in json.loads(done.output)}


def test_the_command_refuses_a_folder_that_holds_something_and_what_names_no_repository(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    occupied = invoke("hub", "package", str(tmp_path), "--repo-id", "me/diffkern")
    assert occupied.exit_code == 2 and "is not empty: name a new directory" in " ".join(occupied.output.split())
    nameless = invoke("hub", "package", str(tmp_path / "new"), "--repo-id", "diffkern")
    assert nameless.exit_code == 2 and "'diffkern' is no repository: write 'org/repo'" in nameless.output


def test_the_repository_is_complete(repository: Package) -> None:
    assert set(repository.variants) == {CPU_VARIANT, *TRITON_VARIANTS}
    root = repository.directory
    for name in (
        "build.toml",
        "flake.nix",
        "CARD.md",
        "README.md",
        "torch-ext/extension.cpp",
        "torch-ext/diffkern/layers.py",
    ):
        assert (root / name).is_file(), name
    sources = {p.relative_to(ROOT / "csrc") for p in (ROOT / "csrc").rglob("*.*") if p.suffix in (".cu", ".cpp", ".h")}
    assert all((root / path).is_file() for path in sources)
    for variant in repository.variants:
        directory = root / "build" / variant
        names = {path.name for path in directory.iterdir()}
        assert {"__init__.py", "_ops.py", "layers.py", "metadata.json"} <= names
        assert "from . import layers" in (directory / "__init__.py").read_text()


def test_kernel_builder_accepts_the_configuration(repository: Package) -> None:
    from kernels import _rust

    config = _rust.Build.open(repository.directory)
    assert {str(backend).lower() for backend in config.general.backends} == {"cpu", "cuda", "rocm"}
    text = (repository.directory / "build.toml").read_text()
    assert 'repo-id = "me/diffkern"' in text and re.search(r"(?m)^version = 1$", text)
    listed = re.findall(r'"([\w/.-]+\.(?:cu|cpp|h))"', text)
    assert listed and all((repository.directory / path).is_file() for path in listed)


def test_metadata_and_digests_are_those_that_kernels_checks(repository: Package) -> None:
    from kernels import _rust

    for variant in repository.variants:
        directory = repository.directory / "build" / variant
        metadata = _rust.Metadata.read_from_file(directory / "metadata.json")
        assert metadata.digest is not None and metadata.version == 1 and str(metadata.name) == "diffkern"
        metadata.digest.validate(_rust.Digest.hash_variant(_rust.DigestAlgorithm.SHA256, directory))
        backend = json.loads((directory / "metadata.json").read_text())["backend"]["type"]
        assert backend == TRITON_VARIANTS.get(variant, "cpu")


def test_python_of_the_builds_imports_nothing_of_diffkern_by_name(repository: Package) -> None:
    for path in repository.directory.glob("build/**/*.py"):
        foreign = re.findall(r"(?m)^\s*(?:from|import) (?!\.)([\w]+)", path.read_text())
        assert set(foreign) <= {"__future__", *sys.stdlib_module_names, "torch", "triton"}, path


def test_the_card_names_every_function_and_layer(repository: Package) -> None:
    card = (repository.directory / "README.md").read_text()
    assert "{{" not in card and "me/diffkern" in card and card.startswith("---\nlibrary_name: kernels\n")
    assert "{{ repo_id }}" in (repository.directory / "CARD.md").read_text()  # for kernel-builder to fill in
    face = (ROOT / "csrc/torch-ext/diffkern/__init__.py").read_text()
    layers = (ROOT / "csrc/torch-ext/diffkern/layers.py").read_text()
    names = re.findall(r'(?m)^    "(\w+)",$', face) + re.findall(r"(?m)^class (\w+)\(", layers)
    assert [name for name in names if name != "layers" and f"`{name}`" not in card] == []


def test_what_cannot_be_packaged_says_why(tmp_path: Path, cpu_build: Build) -> None:
    with pytest.raises(InputError, match="'diffkern' is no repository"):
        package(tmp_path / "a", "diffkern", builds=[cpu_build])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    with pytest.raises(InputError, match="is not empty"):
        package(tmp_path / "b", "me/diffkern", builds=[cpu_build])


# --- from a path ---------------------------------------------------------------------------------------------


def test_get_local_kernel_loads_and_runs_it(repository: Package) -> None:
    import kernels

    kernel = kernels.get_local_kernel(repository.directory, backend="cpu")
    x, weight = torch.randn(5, 64), torch.rand(64)
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    torch.testing.assert_close(kernel.rms_norm(x, weight, eps=1e-6), expected)
    torch.testing.assert_close(kernel.activation(x, "gelu"), torch.nn.functional.gelu(x))


@pytest.mark.exhaustive
def test_the_triton_build_runs_in_the_interpreter(repository: Package, triton: Any, process: Run) -> None:
    code = f"""
import kernels, torch, pathlib
from diffkern.hub import contract
kernel = kernels.get_local_kernel(pathlib.Path({str(repository.directory / "build" / "torch-cuda")!r}))
ops = getattr(torch.ops, kernel.__name__)
assert all(hasattr(ops, op) for op in {sorted(triton_provider.MODULES)!r})
for op in ("rms_norm", "glu", "rope", "norm_modulate"):
    reasons = contract.examine(op, getattr(ops, op).default, lambda args: None, torch.device("cpu"), torch.float32)
    assert reasons and not any(reasons.values()), (op, reasons)
x = torch.randn(3, 8)
compiled = torch.compile(lambda x: kernel.rms_norm(x) + kernel.layers.SiLU()(x), fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(x), kernel.rms_norm(x) + torch.nn.functional.silu(x))
print("fine")
"""
    assert result(process(code, TRITON_INTERPRET="1"), seconds=900) == "fine"


def test_diffkern_serves_every_op_from_it_under_another_name(repository: Package) -> None:
    from diffkern.hub import contract
    from diffkern.providers import compiled, select

    name = str(repository.directory)
    for op in compiled.PROVIDER.support:
        if op in contract.EXAMINED:
            assert select(op, torch.device("cpu"), (torch.float32,), name).provider == name


# --- over HTTP -----------------------------------------------------------------------------------------------

KERNELIZE = """
import kernels, torch
from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

kernel = kernels.get_kernel("me/diffkern", version=1, backend="cpu")
x, weight = torch.randn(5, 64), torch.rand(64)
expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
torch.testing.assert_close(kernel.rms_norm(x, weight, eps=1e-6), expected)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model = LlamaModel(config).eval()
tokens = torch.randint(0, 64, (2, 9))
with torch.no_grad():
    stock = model(tokens).last_hidden_state
replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
mapping = {{
    name: {{"cpu": LayerRepository("me/diffkern", layer_name=name, version=1)}} for name in ("RMSNorm", "SwiGLUMLP")
}}
with use_kernel_mapping(mapping, inherit_mapping=False):
    model = kernelize(model, mode={mode}, device="cpu", use_fallback=False)
replaced = [m for m in model.modules() if m.forward.__module__.startswith("_diffkern_cpu_")]
with torch.no_grad():
    torch.testing.assert_close(model(tokens).last_hidden_state, stock, rtol=1e-5, atol=1e-5)
    if {compiled}:
        whole = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(tokens).last_hidden_state, stock, rtol=1e-5, atol=1e-5)
print(len(replaced), kernels.get_loaded_kernels()[0].repo_info.repo_id)
"""


def test_get_kernel_layer_repository_and_kernelize_on_a_stock_model(published: LoopbackHub, process: Run) -> None:
    pytest.importorskip("transformers")
    if torch.version.cuda or torch.version.hip:
        pytest.skip(
            "with a torch for GPUs, kernels takes the layers of a GPU build also where device='cpu' is asked for"
        )
    code = KERNELIZE.format(mode="Mode.INFERENCE | Mode.TORCH_COMPILE", compiled=True)
    assert result(process(code)) == "7 me/diffkern"  # five norms, two feed-forwards
    assert published.count("/overview") > 0 and published.count(r"GET .*/resolve/.*\.abi3\.so") == 1


def test_diffkern_itself_takes_it_from_the_hub(published: LoopbackHub) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaModel(config).eval()
    tokens = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        stock = model(tokens).last_hidden_state
        report = inject_optimized_kernels(
            model, config={"RMSNorm": "me/diffkern@v1", "LlamaMLP": "me/diffkern:SwiGLUMLP"}
        )
        served = [site.provider for site in report.patched]
        assert served.count("me/diffkern@v1") == 5
        assert served.count("me/diffkern:SwiGLUMLP") == 2
        torch.testing.assert_close(model(tokens).last_hidden_state, stock, rtol=1e-5, atol=1e-5)
        report.restore()
        torch.testing.assert_close(model(tokens).last_hidden_state, stock, rtol=0, atol=0)


def test_the_build_of_this_machine_and_its_copy_from_the_hub_share_a_process(published: LoopbackHub) -> None:
    from diffkern.ops import rms_norm

    x, weight = torch.randn(5, 64), torch.rand(64)
    first = rms_norm(x, weight, provider="compiled")
    torch.testing.assert_close(rms_norm(x, weight, provider="me/diffkern"), first, rtol=0, atol=0)
    torch.testing.assert_close(rms_norm(x, weight, provider="compiled"), first, rtol=0, atol=0)


def test_a_library_that_does_not_load_is_a_reason(hub: LoopbackHub, repository: Package) -> None:
    from diffkern.hub.loader import load
    from diffkern.hub.policy import HubError, Policy
    from diffkern.hub.reference import KernelReference

    broken = files(repository.directory)
    for path in [path for path in broken if path.endswith((".so", "_ops.py")) and CPU_VARIANT in path]:
        name = f"_diffkern_cpu_{os.getpid():08x}"
        data = broken.pop(path)
        path = re.sub(r"_diffkern_cpu_\w+", name, path)
        broken[path] = b"not a library" if path.endswith(".so") else re.sub(rb"_diffkern_cpu_\w+", name.encode(), data)
    metadata = f"build/{CPU_VARIANT}/metadata.json"
    data = json.loads(broken[metadata])
    broken[metadata] = json.dumps({**data, "id": name}).encode()
    hub.repository("me/diffkern").commit(broken, "v1")
    with pytest.raises(HubError, match=r"loading .* failed \(OSError"):
        load(KernelReference.parse("me/diffkern"), Policy(), torch.device("cpu"))


# --- to the Hub ----------------------------------------------------------------------------------------------


def test_the_command_that_is_printed_publishes_what_others_load(hub: LoopbackHub, repository: Package) -> None:
    """It replaces the files of its builds, keeps other builds on the branch, and makes the branch if there is none."""
    from diffkern.ops import rms_norm

    hub.organisations["me"] = True
    there = hub.repository("me/diffkern")
    there.commit({}, branch="main")
    old = f"build/{CPU_VARIANT}/old.py"
    there.commit({old: b"", "build/torch-metal/__init__.py": b"", "build/torch-metal/metadata.json": b"{}"}, "v1")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token", "HF_HUB_DISABLE_XET": "1", "PATH": path}
    run = partial(subprocess.run, shell=True, check=True, capture_output=True, env=os.environ | settings)
    run(repository.upload_command)
    kept = {"build/torch-metal/__init__.py", "build/torch-metal/metadata.json"}
    assert there.commits[there.branches["v1"]].keys() - kept == files(repository.directory).keys()
    assert hub.objects  # the library went by its digest
    x = torch.randn(3, 8)
    torch.testing.assert_close(rms_norm(x, provider="me/diffkern@v1"), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    run(replace(repository, repository="me/other").upload_command)
    other = hub.repositories["me/other"]
    assert other.commits[other.branches["v1"]] == files(repository.directory)


def test_a_build_of_the_sources_at_hand_is_made_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu_build: Build
) -> None:
    from diffkern.hub import package as module

    asked = []

    def build(backend: str) -> Any:
        asked.append(backend)
        return (type("Result", (), {"directory": cpu_build.directory}),)

    assert build_kernels is module.build_kernels
    monkeypatch.setattr(module, "build_kernels", build)
    assert CPU_VARIANT in package(tmp_path / "out", "me/diffkern").variants
    assert asked == ["cpu"]
    shutil.rmtree(tmp_path / "out")
