"""Steps of denoisers, arm against arm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffkern.bench import arms, breadth, steps
from diffkern.bench.models import AUTOENCODERS, DENOISERS, Denoiser
from diffkern.cli import app
from diffkern.graph import timing

TINY_LTX = Path(__file__).parents[2] / "examples" / "ltx_video" / "tiny"

_TINY = Denoiser(
    "SanaTransformer2DModel",
    "tiny Sana",
    lambda randn: {
        "hidden_states": randn(1, 4, 8, 8),
        "encoder_hidden_states": randn(1, 5, 32),
        "timestep": torch.full_like(randn(1), 500.0),
    },
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 32,
        "sample_size": 8,
    },
    {"num_layers": 1},
)


def test_all_arms_share_the_weights_and_are_compared_with_the_first() -> None:
    results = steps.run(_TINY, (arms.STOCK, arms.FAST, arms.FAST_GRAPH), torch.device("cpu"), repetitions=2)
    stock, fast, graph = results
    assert (stock.arm, stock.error) == ("stock", 0.0)
    assert 0 <= fast.error < 0.02
    assert fast.wall_ms > 0 and fast.kernel_ms
    assert graph.unavailable == "CUDA graphs need a GPU, and this runs on cpu"


@pytest.mark.gpu
def test_an_arm_of_ours_is_what_one_call_gives_a_graph_where_the_host_is_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DIFFKERN_MEASURE", raising=False)  # times are asked for, and then all speak for a graph
    monkeypatch.setattr(timing, "reason_not_to_capture", lambda now: None)
    monkeypatch.setattr(timing, "reason_not_to_keep", lambda now, replayed: None)
    results = steps.run(_TINY, (arms.STOCK, arms.FAST, arms.FAST_COMPILED), torch.device("cuda"), repetitions=2)
    assert [result.as_graph for result in results] == [False, True, False]
    assert "as_graph" not in results[0].to_dict() and results[0].to_dict()["error"] == 0.0


def test_a_copy_of_the_modules_has_the_memory_of_the_weights_until_it_lays_them_out_anew() -> None:
    model = _TINY.build(torch.device("cpu"))
    copied = steps.sharing_weights(model)
    assert copied is not model
    addresses = [weight.data_ptr() for weight in model.parameters()]
    assert addresses == [weight.data_ptr() for weight in copied.parameters()]
    for weight in copied.parameters():
        weight.data = weight.data.clone()
    assert addresses == [weight.data_ptr() for weight in model.parameters()]


def test_models_are_built_in_the_dtype_of_the_step_and_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    model = _TINY.build(torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(before, torch.get_rng_state())


def test_what_from_pretrained_keeps_in_float32_is_in_float32() -> None:
    model = dataclasses.replace(DENOISERS["wan"], layers={"num_layers": 1}).build(torch.device("meta"))
    kept = [path for path, tensor in model.named_parameters() if tensor.dtype == torch.float32]
    assert {part for path in kept for part in path.split(".")} & {"time_embedder", "scale_shift_table", "norm2"}
    assert len(kept) == 8 and model.rope.freqs_cos.dtype == torch.float32
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


def test_every_model_takes_its_step() -> None:
    for name, denoiser in {**DENOISERS, **AUTOENCODERS}.items():
        if name in ("lumina2", "sdxl", "sdxl_512"):  # one reads data of its inputs; UNets of SDXL take seconds
            continue
        cut = {key: 1 for key in ("num_layers", "num_single_layers", "n_layers") if key in denoiser.layers}
        whole = {**denoiser.config, "num_layers": 1} if "num_layers" in denoiser.config else denoiser.config
        small = dataclasses.replace(denoiser, config=whole, layers=cut)
        if not cut and whole is denoiser.config and "Transformer" in denoiser.class_name:
            small = dataclasses.replace(small, layers={"num_layers": 1})
        meta = torch.device("meta")
        with torch.no_grad():
            assert steps.first_tensor(small.build(meta)(**small.step(meta))).is_meta, name


@pytest.mark.parametrize("method", ["decode", "encode"])
def test_half_an_autoencoder_is_timed_with_the_kernels_inside_of_it(method: str) -> None:
    blocks = {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 4}
    shape = (1, 4 if method == "decode" else 3, 8, 8)
    tiny = Denoiser("AutoencoderKL", "tiny", lambda randn: {"x": randn(*shape)}, blocks, half=method)
    stock, fast = steps.run(tiny, (arms.STOCK, arms.FAST), torch.device("cpu"), repetitions=2)
    assert not fast.unavailable and 0 < fast.error < 0.02
    assert stock.wall_ms > 0


def test_the_command_writes_arms_and_versions_and_no_table_beside_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DENOISERS, "tiny", _TINY)
    chosen = ["--model", "tiny", "--arm", "stock", "--arm", "fast", "--repetitions", "2", "--device", "cpu"]
    plot = tmp_path / "bars.png"
    printed = CliRunner().invoke(app, ["bench", "step", *chosen, "--json", "-", "--plot", str(plot)])
    assert printed.exit_code == 0, printed.output
    said = json.loads(printed.stdout)
    assert [row["arm"] for row in said["models"]["tiny"]["arms"]] == ["stock", "fast"]
    assert said["models"]["tiny"]["what"] == "tiny Sana" and "versions" in said["environment"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "tiny on cpu, where a step at full width takes minutes: stock, fast" in printed.stderr
    assert CliRunner().invoke(app, ["bench", "step", *chosen, "--quiet"]).output == ""


def test_all_denoisers_are_run_and_those_that_cannot_are_rows_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = dataclasses.replace(_TINY, what="huge", config={**_TINY.config, "caption_channels": 10**12})
    gone = dataclasses.replace(_TINY, what="gone", class_name="GoneModel")
    wrong = dataclasses.replace(_TINY, what="wrong", inputs=lambda randn: {"hidden_states": randn(1, 4, 8, 8)})
    monkeypatch.setattr(breadth, "BREADTH", {"huge": huge, "gone": gone, "wrong": wrong, "tiny": _TINY})
    monkeypatch.setattr(breadth, "ARMS", (arms.STOCK, arms.FAST))
    file = tmp_path / "all.json"
    options = ["--all", "--repetitions", "2", "--device", "cpu", "--json", str(file), "--plot", str(tmp_path / "x.png")]
    said = CliRunner().invoke(app, ["bench", "step", *options])
    assert said.exit_code == 0, said.output
    rows = json.loads(file.read_text())["breadth"]
    assert rows["huge"]["failed"].startswith("MemoryError: its weights take 64") and rows["huge"]["arms"] == []
    assert rows["gone"]["failed"].startswith("AttributeError: module diffusers has no attribute GoneModel")
    assert [arm["arm"] for arm in rows["wrong"]["arms"]] == ["stock", "fast"]
    assert all(arm["unavailable"].startswith("TypeError: ") for arm in rows["wrong"]["arms"])
    assert rows["tiny"]["layers"] == {"num_layers": 1} and rows["tiny"]["what"] == "tiny Sana"
    assert [arm["arm"] for arm in rows["tiny"]["arms"] if arm["wall_ms"] > 0] == ["stock", "fast"]
    assert [path.name for path in tmp_path.glob("*.png")] == ["x_tiny.png"]


def test_an_arm_that_raises_ends_the_run_of_a_model_unless_it_is_told_to_go_on() -> None:
    broken = dataclasses.replace(_TINY, inputs=lambda randn: {"hidden_states": randn(1, 4, 8, 8)})
    with pytest.raises(TypeError, match="encoder_hidden_states"):
        steps.run(broken, (arms.STOCK,), torch.device("cpu"), repetitions=2)


def test_all_denoisers_together_with_a_model_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "step", "--all", "--model", "flux"])
    assert result.exit_code == 2
    assert "bench step: --all runs every denoiser: leave --model out, or name models without --all" in result.output


@pytest.mark.gpu
def test_the_command_for_ops_times_one_and_refuses_what_is_none(tmp_path: Path) -> None:
    options = ["--repetitions", "5", "--json", str(tmp_path / "ops.json"), "--plot", str(tmp_path / "ops.png")]
    result = CliRunner().invoke(app, ["bench", "ops", "--op", "rms_norm", *options])
    assert result.exit_code == 0 and "rms_norm" in result.stdout
    assert {row["op"] for row in json.loads((tmp_path / "ops.json").read_text())["ops"]} == {"rms_norm"}
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["bench", "ops", "--op", "rmsnorm"])
    assert wrong.exit_code == 2 and "bench ops: " in wrong.output and "rms_norm" in wrong.output


def test_an_unknown_model_ends_the_command_with_the_names_that_are_known() -> None:
    result = CliRunner().invoke(app, ["bench", "step", "--model", "sd4"])
    assert result.exit_code == 2
    assert "model 'sd4' is not known: choose from flux" in result.output


@pytest.mark.parametrize("own", [[], pytest.param(["exact"], marks=pytest.mark.exhaustive)])
def test_a_pipeline_is_timed_arm_by_arm(tmp_path: Path, own: list[str]) -> None:
    size = ["--height", "64", "--width", "64", "--frames", "9", "--steps", "2", "--repetitions", "1"]
    files = ["--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "bars.png")]
    chosen = [word for arm in ("stock", *own, "fast + graph") for word in ("--arm", arm)]
    result = CliRunner().invoke(app, ["bench", "pipeline", str(TINY_LTX), *size, *chosen, *files, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "Left out: fast + graph, CUDA graphs need a GPU" in result.stdout
    stock, *others = json.loads((tmp_path / "result.json").read_text())["arms"]
    assert [stock["name"], *(arm["name"] for arm in others)] == ["stock", *own]
    assert [arm["difference_from_stock"]["frames"] for arm in others] == [0.0] * len(own)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
