"""The training of the tiny LTX-Video: what it draws, says, measures and saves."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.fixture
def scenes() -> ModuleType:
    return importlib.import_module("tiny_ltx.scenes")


def every_scene(scenes: ModuleType) -> tuple[list[tuple[str, str, str, str]], object]:
    """All combinations of the tables, as words and as scenes."""
    tables = (scenes.COLOURS, scenes.SHAPES, scenes.DIRECTIONS, scenes.BACKGROUNDS)
    words = list(itertools.product(*tables))
    numbers = torch.tensor(list(itertools.product(*(range(len(table)) for table in tables))))
    random = scenes.random_scenes(len(words), torch.Generator().manual_seed(0))
    named = dict(zip(("colour", "shape", "direction", "background"), numbers.unbind(dim=1), strict=True))
    return words, replace(random, **named)


def test_every_drawn_video_shows_what_its_scene_says(scenes: ModuleType) -> None:
    judge = importlib.import_module("tiny_ltx.judge")
    words, drawn = every_scene(scenes)
    videos = scenes.draw(drawn, 5, 64, 96)
    assert videos.shape == (144, 3, 5, 64, 96)
    assert videos.abs().max() <= 1
    assert [astuple(judge.look((video.transpose(0, 1) + 1) / 2)) for video in videos] == words


def test_a_video_without_a_shape_shows_none(scenes: ModuleType) -> None:
    judge = importlib.import_module("tiny_ltx.judge")
    assert judge.look(torch.full((5, 3, 32, 32), 0.9)) == judge.Sight(None, None, None, "white")


def test_captions_say_what_is_told_in_words_of_the_tokenizer(scenes: ModuleType) -> None:
    models = importlib.import_module("tiny_ltx.models")
    assert scenes.caption("red", "square", "right") == "a red square moving right"
    assert scenes.caption("orange", None, None, "white") == "an orange shape on a white background"
    assert scenes.caption() == ""
    tokenizer = models.build_tokenizer()
    words, _ = every_scene(scenes)
    for caption in (scenes.caption(*combination) for combination in words):
        assert tokenizer.decode(tokenizer(caption).input_ids, skip_special_tokens=True) == caption
    assert tokenizer("a lighthouse").input_ids[1:] == [tokenizer.unk_token_id, tokenizer.eos_token_id]


def test_captions_of_scenes_leave_words_out_and_never_tell_a_wrong_one(scenes: ModuleType) -> None:
    train = importlib.import_module("tiny_ltx.train_denoiser")
    models = importlib.import_module("tiny_ltx.models")
    tokenizer = models.build_tokenizer()
    words, drawn = every_scene(scenes)
    captions = train.Captions(tokenizer, torch.device("cpu"))
    ids, masks = captions.of(drawn, torch.Generator().manual_seed(0))
    texts = [tokenizer.decode(row[mask.bool()], skip_special_tokens=True) for row, mask in zip(ids, masks, strict=True)]
    told = 0
    for text, combination in zip(texts, words, strict=True):
        said = set(text.split()) - {"a", "an", "shape", "moving", "on", "background"}
        assert said <= set(combination)
        told += len(said)
    assert 0.5 < told / (4 * len(words)) < 0.9
    assert int(masks.sum(dim=1).max()) <= train.USED_TOKENS
    assert any(text == "" for text in texts)


def test_the_optimizer_steps_along_orthogonal_matrices_with_the_directions_of_the_gradient() -> None:
    orthogonalized = importlib.import_module("tiny_ltx.optimizer").orthogonalized
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 24, 10, generator=generator)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    for result in (orthogonalized(matrices), orthogonalized(matrices.mT).mT):
        in_their_bases = u.mT @ result @ vh.mT
        values = in_their_bases.diagonal(dim1=1, dim2=2)
        assert values.min() > 0.6
        assert values.max() < 1.3
        assert (in_their_bases - torch.diag_embed(values)).abs().max() < 1e-4


@pytest.mark.exhaustive
def test_a_short_training_saves_an_ordinary_pipeline_and_says_how_it_went(tmp_path: Path) -> None:
    from diffusers import LTXPipeline

    small = ["--num-frames", "9", "--height", "32", "--width", "32", "--vae-batch-size", "2", "--batch-size", "4"]
    short = ["--vae-steps", "3", "--steps", "3", "--pool-size", "8", "--check-steps", "2", "--check-prompts", "2"]
    folders = ["--output", str(tmp_path / "tiny"), "--report", str(tmp_path / "report")]
    command = [sys.executable, str(SCRIPTS / "train_tiny_ltx.py"), *folders, *small, *short]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "asked for 'a red square moving right on a black background'" in run.stdout
    report = json.loads((tmp_path / "report" / "training.json").read_text())
    assert report["agreement"].keys() == {"colour", "shape", "direction", "background", "all"}
    assert report["transformer"][0]["flow"] > 1
    assert (tmp_path / "report" / "check.png").exists()

    size = sum(file.stat().st_size for file in (tmp_path / "tiny").rglob("*") if file.is_file())
    assert size <= 8 * 2**20
    pipe = LTXPipeline.from_pretrained(tmp_path / "tiny", local_files_only=True)
    assert pipe.vae.latents_std.min() > 0
    assert not torch.equal(pipe.vae.latents_mean.float(), torch.zeros(16))
