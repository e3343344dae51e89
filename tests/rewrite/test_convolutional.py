"""Every tiny autoencoder, UNet and ControlNet of diffusers with every forward rewritten."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import diffusers
import pytest
import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from diffkern.rewrite import RULES, Rewriter
from scripts.check_models.controlnets import CONTROLNETS, missing_for
from scripts.check_models.convolutional import (
    AUTOENCODERS,
    FLOAT32_ONLY,
    NO_FLOAT16,
    NOT_BUILT,
    NOT_FUSED,
    ONE_SAMPLE,
    RUN_IN_PART,
    UNETS,
)
from scripts.check_models.rewritten import (
    WHERE_IT_PAYS,
    RewrittenModel,
    RoundDraw,
    batch_of_two,
    drawing,
    run,
    run_in_float64,
)

MODELS = AUTOENCODERS | UNETS | CONTROLNETS
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: The models of each run of the tests, in bfloat16: together they have every norm. All others and float32 take minutes.
USUAL = ("kl", "wan", "qwenimage", "hunyuan_video", "dc", "cogvideox", "mochi", "unet2d_scale_shift", "controlnet")
CASES = [
    pytest.param(
        (name, dtype),
        id=f"{name}-{dtype}",
        marks=[pytest.mark.exhaustive] * (dtype != "bfloat16" or name not in USUAL),
    )
    for name in MODELS
    for dtype in DTYPES
    if dtype == "float32" or name not in FLOAT32_ONLY
    if dtype != "float16" or name not in NO_FLOAT16
]
#: Sites in attention processors stand there for calls of every kind, of which a model makes some.
_IN_PROCESSORS = {rule.name for rule in RULES if rule.op == "qk_norm_rope"}
#: Many models have the same blocks, which are proven once.
EXACT = Rewriter("exact")
#: Where diffusers has them.
_PACKAGES = ("autoencoders", "unets", "controlnets", "vq_model", "adapter", "latent_upscaler")
#: Draws over which errors are taken together where those of one draw are further apart than the contract allows.
_DRAWS = 8


class Case:
    """One model in one dtype with what stock gives, shared by the tests below."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        if missing := missing_for(name):
            pytest.skip(missing)
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

    def errors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The relative errors of stock and of the fused model against float64, for one draw after the other."""
        stock, fused, arguments = self.stock, self.fused, self.arguments
        for seed in range(2, 2 + _DRAWS):
            reference = run_in_float64(self.tiny, self.model, arguments)
            yield (stock - reference).norm() / reference.norm(), (fused - reference).norm() / reference.norm()
            dtype = next(self.model.parameters()).dtype
            draw = RoundDraw(torch.Generator().manual_seed(seed), torch.device("cpu"), dtype)
            arguments = self.tiny.inputs(draw, 8)
            stock, rewritten = run(self.model, arguments), RewrittenModel.of(self.model)
            fused = run(self.model, arguments)
            rewritten.undo()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, dtype = request.param
    yield Case(name, DTYPES[dtype])


def test_forced_to_its_original_expressions_a_convolutional_model_gives_the_bits_of_stock(case: Case) -> None:
    assert torch.equal(case.forced, case.stock)


def test_each_site_of_a_convolutional_model_runs_fused(case: Case) -> None:
    fused, left = case.rewritten.fused_calls(), NOT_FUSED.get(case.name, {})
    for rule, calls in case.forced_calls.items():
        if rule in WHERE_IT_PAYS:
            continue
        assert (fused[rule] < calls) if rule in left else (fused[rule] == calls), case.rewritten.reasons()
    outside = {rule: sites for rule, sites in case.rewritten.sites.items() if rule not in _IN_PROCESSORS}
    assert case.name in RUN_IN_PART or all(case.forced_calls[rule] >= sites for rule, sites in outside.items())


def test_a_fused_convolutional_model_is_as_close_to_float64_as_stock(case: Case) -> None:
    if torch.equal(case.fused, case.stock):  # as where nothing is fused
        return
    stock, fused = torch.zeros(()).double(), torch.zeros(()).double()
    for draw, (one, other) in enumerate(case.errors(), 1):
        stock, fused = stock + one.square(), fused + other.square()
        if fused.sqrt() <= 1.2 * stock.sqrt() + 1e-6 * draw**0.5:
            return
    raise AssertionError(f"{(fused / stock).sqrt()} times stock's")


@pytest.mark.exhaustive
def test_every_autoencoder_unet_and_controlnet_that_diffusers_exports_is_among_them() -> None:
    packages = tuple(f"diffusers.models.{part}" for part in _PACKAGES)
    classes = [getattr(diffusers, name, None) for name in dir(diffusers)]
    models = [cls for cls in classes if inspect.isclass(cls) and issubclass(cls, ModelMixin)]
    exported = {cls.__name__ for cls in models if cls.__module__.startswith(packages)}
    tiny = {model.cls for model in (AUTOENCODERS | UNETS | CONTROLNETS).values()}
    assert exported - tiny == set(NOT_BUILT)


@pytest.mark.exhaustive
def test_exact_numerics_give_the_bits_of_stock_for_a_convolutional_model(case: Case) -> None:
    rewritten = RewrittenModel.of(case.model, rewriter=EXACT)
    exact = case.run()
    rewritten.undo()
    assert torch.equal(exact, case.stock), rewritten.reasons()
