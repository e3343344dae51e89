"""``diffkern bench attention``: shapes, results, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffkern.bench import attention
from diffkern.bench.attention import Shape
from diffkern.cli import app


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1x4608x24x128", Shape(1, 4608, 4608, 24, 24, 128)),
        ("2x64/100x8x40", Shape(2, 64, 100, 8, 8, 40)),
        ("1X1/2048x32/8x128", Shape(1, 1, 2048, 32, 8, 128)),
    ],
)
def test_shapes_are_read_and_written(text: str, shape: Shape) -> None:
    assert Shape.parse(text) == shape and str(shape) == text.lower()


@pytest.mark.parametrize("text", ["", "1x2x3", "1x2x3x4x5", "0x2x3x4", "1x2x6/4x8", "ax1x1x1"])
def test_what_is_no_shape_is_answered_with_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="is no shape"):
        Shape.parse(text)


def test_a_call_has_the_sizes_of_its_shape() -> None:
    call = Shape.parse("2x5/7x4/2x8").call(torch.device("cpu"), torch.bfloat16, "additive", backward=True)
    assert call.query.shape == (2, 5, 4, 8) and call.key.shape == call.value.shape == (2, 7, 2, 8)
    assert call.query.dtype == torch.bfloat16 and call.query.requires_grad
    assert call.mask is not None and call.mask.shape == (2, 1, 1, 7) and torch.isinf(call.mask).any()
    with pytest.raises(ValueError, match="choose one of none, bool, additive"):
        Shape.parse("1x1x1x1").call(torch.device("cpu"), torch.float32, "causal")


def test_everything_without_a_download_is_measured_or_has_a_reason() -> None:
    shape = Shape.parse("1x32x4/2x16")
    results = attention.run(shape.call(torch.device("cpu"), torch.float32), str(shape))
    assert {r.backend for r in results} == {name for name, b in attention.BACKENDS.items() if not b.downloads}
    measured = [result for result in results if result.milliseconds is not None]
    assert {"native", "_native_math"} <= {result.backend for result in measured}
    assert all(result.error is not None and result.error < 1e-6 and not result.reason for result in measured)
    assert all(result.reason for result in results if result.milliseconds is None)
    times = [result.milliseconds for result in measured]
    assert times == sorted(times)  # type: ignore[type-var]


def test_a_backend_that_is_named_is_the_only_one(kernel: str) -> None:
    shape = Shape.parse("1x16x2x8")
    call = shape.call(torch.device("cpu"), torch.float32, "bool")
    results = attention.run(call, str(shape), ["native", f"{kernel}:flash_attn_func"])
    assert [result.backend for result in results] == ["native", f"{kernel}:flash_attn_func"]
    assert results[1].reason == "applies no mask"


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    options = ["--device", "cpu", "--dtype", "float32", "--causal", "--backward", "--json", str(file)]
    options += ["--plot", str(tmp_path / "bars.png")]
    shapes = ["--shape", "1x16x2x8", "--shape", "1x16x4/2x8"]
    done = CliRunner().invoke(app, ["bench", "attention", *shapes, *options])
    assert done.exit_code == 0, done.output
    assert "1x16x4/2x8, float32" in done.output and "_native_math" in done.output and "1.00x" in done.output
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["options"] == {"dtype": "float32", "mask": "none", "causal": True, "dropout": 0.0, "backward": True}
    assert {row["shape"] for row in written["results"]} == {"1x16x2x8", "1x16x4/2x8"}
    assert "versions" in written["environment"]
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1x2"], "is no shape"),
        (["--shape", "1x2x2x8", "--dtype", "int8"], "choose bfloat16, float16 or float32"),
        (["--shape", "1x2x2x8", "--backend", "flsh"], "did you mean 'flash'"),
        (["--shape", "1x2x2x8", "--mask", "some"], "choose one of none"),
    ],
)
def test_mistakes_are_answered(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "attention", "--device", "cpu", *arguments])
    assert done.exit_code == 2 and message in done.output
