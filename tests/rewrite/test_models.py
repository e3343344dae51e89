"""Whole models of diffusers with every forward rewritten."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch

from diffkern.rewrite import Rewriter, Rewritten
from tests.pipelines import tiny

#: Whole pipelines take a minute; each denoiser has tests of its own.
pytestmark = pytest.mark.exhaustive

_JOINED, _ROTATED, _NORMED = (
    "query and key norm, two streams", "query and key norm, rotation", "query and key norm"
)  # fmt: skip
_STREAMS = ("linear of a stream", "concatenation of streams")
_HALVES, _DIVIDED, _PATCHES = "concatenation of halves", "division by one", "patch embedding"
#: Fused calls of one pipeline at two steps, by rule: a model that runs stock does not pass. The only single-stream
#: block of the tiny Flux is its first, whose streams lie apart.
FUSED = {
    "flux": {"gated residual", "linear, GELU", "norm, modulation", "residual, norm, modulation", _JOINED, _ROTATED, *_STREAMS},  # noqa: E501
    "wan": {"gated residual", "linear, GELU", "norm, modulation", "residual, norm", "residual, norm, modulation", _NORMED, _ROTATED},  # noqa: E501
    "sd3": {"gated residual", "linear, GELU", "norm, modulation", "residual, norm, modulation", _JOINED, _NORMED, *_STREAMS, _PATCHES},  # noqa: E501
    "qwenimage": {"gated residual", "linear, GELU", "norm, modulation", "residual, norm, modulation", _JOINED, *_STREAMS},  # noqa: E501
    "hunyuan_video": {"gated residual", "linear, GELU", "norm, modulation", "residual, norm", "residual, norm, modulation", _JOINED, _HALVES, _DIVIDED, *_STREAMS},  # noqa: E501
    "sana": {"convolution, SiLU", "convolution, gated linear unit", "gated residual", "linear attention", "linear, GELU", "norm, modulation", "residual, norm, modulation", _DIVIDED, _PATCHES},  # noqa: E501
    "pixart": {"gated residual", "linear, GELU", "norm, modulation", "residual, norm, modulation", _DIVIDED, _PATCHES},
}  # fmt: skip


def _rewrite(pipe: Any, numerics: str) -> set[Rewritten]:
    rewriter, found = Rewriter(numerics), set()
    for name, model in tiny.models(pipe).items():
        for module in model.modules() if name in ("transformer", "unet") else ():
            rewritten = rewriter.rewrite(module)
            if isinstance(rewritten, Rewritten):
                module.forward = MethodType(rewritten.function, module)
                found.add(rewritten)
    return found


@pytest.mark.parametrize("name", FUSED)
def test_forced_to_its_original_expressions_a_model_gives_the_bits_of_stock(name: str) -> None:
    pipe, call = tiny.build(name, torch.bfloat16)
    stock = tiny.run(pipe, call)
    for rewritten in _rewrite(pipe, "fast"):
        rewritten.guard.force_original()
    assert torch.equal(tiny.run(pipe, call), stock)


@pytest.mark.parametrize("name", FUSED)
def test_a_rewritten_model_is_fused_and_as_close_to_float64_as_stock(name: str) -> None:
    pipe, call = tiny.build(name, torch.float32)
    stock, reference = tiny.run(pipe, call).double(), tiny.run(tiny.in_float64(pipe), call).double()
    found = _rewrite(pipe, "fast")
    fused = tiny.run(pipe, call).double()
    sites = [site for rewritten in found for site in rewritten.sites]
    assert {site.plan.rule.name for site in sites if site.fused_calls} == FUSED[name]
    assert (fused - reference).norm() <= 1.2 * (stock - reference).norm() + 1e-6 * reference.norm()
