"""Diffusers pipelines as nodes hand them on: optimized while they run as the workflow wants it, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffkern.comfyui.pipelines import Loaded, Pipeline, find, generate, load
from tests.pipelines import tiny

VIDEO = {"prompt": "a fox", "negative_prompt": "blurry", "width": 32, "height": 32, "num_frames": 9, "seed": 7}
VIDEO |= {"num_inference_steps": 2, "guidance_scale": 3.0}


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded(tiny.build("ltx")[0])


def run(pipeline: Pipeline) -> torch.Tensor:
    return generate(pipeline, lambda done, total: None, **VIDEO)[0]


def test_a_bypassed_node_leaves_the_pipeline_as_it_was(loaded: Loaded) -> None:
    stock = Pipeline(loaded)
    optimized = stock.optimized(numerics="fast")
    before = run(stock)
    frames, report = generate(optimized, lambda done, total: None, **VIDEO)

    assert frames.shape == (9, 32, 32, 3) and frames.min() >= 0 and frames.max() <= 1
    assert report is not None and report.patched and sum(c["fused"] for c in report.calls().values()) > 0
    torch.testing.assert_close(frames, before, rtol=0, atol=1e-4)
    assert torch.equal(run(stock), before)
    assert loaded.report is None
    assert torch.equal(run(optimized), frames)


def test_a_plan_changes_nothing(loaded: Loaded) -> None:
    plan = Pipeline(loaded).optimized(numerics="exact").plan()

    assert plan.dry_run and plan.patched and loaded.report is None
    assert plan.next_step() == "", "there is no line of Python to write"


def test_options_that_stay_the_same_inject_once(loaded: Loaded) -> None:
    first = loaded.bring({"numerics": "fast"})
    assert loaded.bring({"numerics": "fast"}) is first
    assert loaded.bring({"numerics": "exact"}) is not first
    loaded.restore()


def test_progress_is_told_and_may_stop_the_run(loaded: Loaded) -> None:
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(Pipeline(loaded), stop, **VIDEO)
    assert told == [(1, 2)]


def test_frames_that_are_not_finite_are_an_error(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loaded.pipe.vae.decode
    monkeypatch.setattr(loaded.pipe.vae, "decode", lambda *a, **k: tuple(x * float("nan") for x in real(*a, **k)))

    with pytest.raises(ValueError, match="NaN or infinity"):
        run(Pipeline(loaded))


def test_pipelines_are_found_in_folders_and_loaded_from_there(loaded: Loaded, tmp_path: Path) -> None:
    loaded.pipe.save_pretrained(tmp_path / "video" / "tiny")
    found = find([str(tmp_path), str(tmp_path / "missing")])

    assert found == {"video/tiny": str(tmp_path / "video" / "tiny")}
    again = load(found["video/tiny"], "auto", "none", torch.device("cpu"))
    assert torch.equal(run(again), run(Pipeline(loaded)))
