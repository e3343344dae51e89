"""The example scripts run as their first lines say, and their claims hold."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from diffkern.build import find_builds

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs a script in this process and returns what it printed."""

    def start(script: str, *options: str) -> str:
        monkeypatch.setattr("sys.argv", [script, *options])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        return capsys.readouterr().out

    return start


@pytest.mark.exhaustive
def test_a_pipeline_is_compared_and_restored(run) -> None:  # type: ignore[no-untyped-def]
    out = run("example_diffusers.py", "--steps", "2", "--runs", "1", "--size", "64")
    assert "ran fused" in out and "restored, bit for bit: True" in out
    [difference] = re.findall(r"difference of the results: (\S+)", out)
    assert float(difference) < 1e-4


def test_a_language_model_is_timed_in_tokens(run) -> None:  # type: ignore[no-untyped-def]
    out = run("example_transformers.py", "--new-tokens", "4", "--runs", "1", "--prompt-tokens", "8")
    assert len(re.findall(r"(?m)^(?:stock|fast): [\d.]+ tokens/s, from", out)) == 2
    assert "the same tokens in 1 of 1 texts" in out and "ran fused" in out


@pytest.mark.parametrize("options", [[], pytest.param(["--checkpointing"], marks=pytest.mark.exhaustive)])
def test_a_lora_trains_with_the_gradients_of_stock(run, options: list[str]) -> None:  # type: ignore[no-untyped-def]
    out = run("example_train_lora.py", "--steps", "2", *options)
    [count, difference] = re.findall(r"gradients of (\d+) adapter weights, largest relative difference: (\S+)", out)[0]
    assert int(count) == 64 and float(difference) < 1e-4
    assert "ran fused" in out


def test_a_kernel_serves_from_a_path(run) -> None:  # type: ignore[no-untyped-def]
    if not find_builds("cpu"):
        pytest.skip("the kernels are not built for the CPU")
    pytest.importorskip("kernels")
    folder = find_builds("cpu")[0].directory
    out = run("example_hub_kernel.py", "--kernel", str(folder))
    assert f"5 modules run on {folder}" in out


def test_a_kernel_that_is_not_there_ends_the_script_with_a_reason(run) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("kernels")
    with pytest.raises(SystemExit, match=r"\./nothing serves no RMSNorm here"):
        run("example_hub_kernel.py", "--kernel", "./nothing")
