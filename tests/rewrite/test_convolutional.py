"""Every tiny autoencoder, UNet and ControlNet of diffusers with every forward rewritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from scripts.check_models.convolutional import AUTOENCODERS, FLOAT32_ONLY, NOT_FUSED, ONE_SAMPLE, UNETS
from scripts.check_models.rewritten import RewrittenModel, batch_of_two, drawing, run, run_in_float64

MODELS = AUTOENCODERS | UNETS
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: The models of each run of the tests, in bfloat16: together they have every norm. All others and float32 take minutes.
USUAL = ("kl", "wan", "qwenimage", "hunyuan_video", "dc", "cogvideox", "mochi", "unet2d_scale_shift", "controlnet")
CASES = [
    pytest.param(
        (name, dtype),
        id=f"{name}-{dtype}",
        marks=[pytest.mark.exhaustive] * (dtype == "float32" or name not in USUAL),
    )
    for name in MODELS
    for dtype in DTYPES
    if dtype == "float32" or name not in FLOAT32_ONLY
]


class Case:
    """One model in one dtype with what stock gives, shared by the tests below."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.tiny = name, MODELS[name]
        self.model: nn.Module = self.tiny.in_dtype(torch.device("cpu"), dtype)
        alone = name in ONE_SAMPLE
        self.arguments = self.tiny.inputs(drawing(dtype), 8) if alone else batch_of_two(self.tiny, dtype)
        self.stock = self.run()
        self.rewritten = RewrittenModel.of(self.model)
        self.rewritten.force_original()
        self.forced, self.forced_calls = self.run(), self.rewritten.calls_by_rule("original_calls")
        self.rewritten.fuse()
        self.fused = self.run()
        self.rewritten.undo()

    def run(self) -> Tensor:
        return run(self.model, self.arguments)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, dtype = request.param
    yield Case(name, DTYPES[dtype])


def test_forced_to_its_original_expressions_a_convolutional_model_gives_the_bits_of_stock(case: Case) -> None:
    assert torch.equal(case.forced, case.stock)


def test_each_site_of_a_convolutional_model_runs_fused(case: Case) -> None:
    expected = case.forced_calls - Counter({rule: case.forced_calls[rule] for rule in NOT_FUSED.get(case.name, {})})
    assert case.rewritten.fused_calls() == expected, case.rewritten.reasons()
    assert all(case.forced_calls[rule] >= sites for rule, sites in case.rewritten.sites.items())


def test_a_fused_convolutional_model_is_as_close_to_float64_as_stock(case: Case) -> None:
    reference = run_in_float64(case.tiny, case.model, case.arguments)
    allowed = 1.2 * (case.stock - reference).norm() + 1e-6 * reference.norm()
    assert (case.fused - reference).norm() <= allowed


@pytest.mark.exhaustive
def test_exact_numerics_give_the_bits_of_stock_for_a_convolutional_model(case: Case) -> None:
    rewritten = RewrittenModel.of(case.model, "exact")
    exact = case.run()
    rewritten.undo()
    assert torch.equal(exact, case.stock), rewritten.reasons()
