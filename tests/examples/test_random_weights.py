"""The random pipelines of the example: real classes, every weight visible, the same for the same seed."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import LTXPipeline, LTXVideoTransformer3DModel

FOLDER = Path(__file__).parents[2] / "examples" / "ltx_video"
CPU = torch.device("cpu")


@pytest.fixture
def random_weights(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("random_weights")


def weights(pipe: LTXPipeline) -> dict[str, torch.Tensor]:
    """All parameters of the pipeline by name."""
    models = {"transformer": pipe.transformer, "vae": pipe.vae, "text_encoder": pipe.text_encoder}
    return {f"{name}.{key}": p for name, model in models.items() for key, p in model.named_parameters()}


def test_no_weight_is_a_constant_that_a_wrong_kernel_could_hide_behind(random_weights: ModuleType) -> None:
    pipe = random_weights.build_pipeline("tiny", CPU, torch.float32)
    constant = [name for name, p in weights(pipe).items() if p.numel() > 1 and p.min() == p.max()]
    assert constant == []


def test_the_seed_decides_the_weights(random_weights: ModuleType) -> None:
    first, again, other = (
        weights(random_weights.build_pipeline("tiny", CPU, torch.bfloat16, seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(p, again[name]) for name, p in first.items())
    assert not any(torch.equal(p, other[name]) for name, p in first.items())
    assert {p.dtype for p in first.values()} == {torch.bfloat16}


def test_the_text_encoder_of_the_full_size_is_as_wide_as_the_real_transformer_expects(
    random_weights: ModuleType,
) -> None:
    config = random_weights._text_encoder_config("full", vocabulary_size=100)
    defaults = inspect.signature(LTXVideoTransformer3DModel.__init__).parameters
    assert config.d_model == defaults["caption_channels"].default


def test_the_tokenizer_spells_a_prompt_and_ends_it(random_weights: ModuleType) -> None:
    tokenizer = random_weights.build_tokenizer()
    ids = tokenizer("a cat").input_ids
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a cat"
