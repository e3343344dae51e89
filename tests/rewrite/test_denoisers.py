"""Every tiny denoiser of diffusers with every forward rewritten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.rewritten import RewrittenModel, batch_of_two, run, run_in_float64

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Case:
    """One model in one dtype with what stock gives, shared by the tests below."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.denoiser = name, DENOISERS[name]
        self.model: nn.Module = self.denoiser.in_dtype(torch.device("cpu"), dtype)
        self.arguments = batch_of_two(self.denoiser, dtype)
        self.stock = self.run()
        self.rewritten = RewrittenModel.of(self.model)
        self.rewritten.force_original()
        self.forced, self.forced_calls = self.run(), self.rewritten.original_calls()
        self.rewritten.fuse()
        self.fused = self.run()
        self.rewritten.undo()

    def run(self) -> Tensor:
        return run(self.model, self.arguments)


#: The models of each run of the tests, in bfloat16: together they have every rule. All others and float32 take minutes.
USUAL = (
    "flux",
    "flux2",
    "wan",
    "wan_i2v",
    "sd3",
    "qwenimage",
    "hunyuan_video",
    "sana",
    "zimage",
    "lumina2",
    "ltx",
    "mochi",
)
CASES = [
    pytest.param(
        (name, dtype),
        id=f"{name}-{dtype}",
        marks=[pytest.mark.exhaustive] * (dtype == "float32" or name not in USUAL),
    )
    for name in DENOISERS
    for dtype in DTYPES
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, dtype = request.param
    yield Case(name, DTYPES[dtype])


def test_forced_to_its_original_expressions_a_denoiser_gives_the_bits_of_stock(case: Case) -> None:
    assert torch.equal(case.forced, case.stock)
    assert case.forced_calls == case.rewritten.expected_calls(case.name).total()


def test_each_site_of_a_denoiser_is_fused_and_the_result_as_close_to_float64_as_stock(case: Case) -> None:
    assert case.rewritten.fused_calls() == case.rewritten.expected_fused(case.name), case.rewritten.reasons()
    reference = run_in_float64(case.denoiser, case.model, case.arguments)
    allowed = 1.2 * (case.stock - reference).norm() + 1e-6 * reference.norm()
    assert (case.fused - reference).norm() <= allowed


@pytest.mark.exhaustive
def test_exact_numerics_give_the_bits_of_stock_for_a_denoiser(case: Case) -> None:
    rewritten = RewrittenModel.of(case.model, "exact")
    exact = case.run()
    rewritten.undo()
    assert torch.equal(exact, case.stock), rewritten.reasons()
