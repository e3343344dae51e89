"""A submodule that multiplies what its norm returns by an argument is part of what calls it: Mochi's norms are such."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_mochi import MochiModulatedRMSNorm, MochiTransformerBlock
from torch import Tensor, nn

from diffkern.rewrite import Rewriter, Rewritten
from diffkern.rewrite.straight import fold_rebound
from tests.rewrite.modules import SIZE, block, leaves, rewritten, rules

NAMES = "x, y, gate"
SITES = Counter({"norm, modulation": 2, "post-norm, residual": 4})


def _mochi(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return MochiTransformerBlock(64, 2, 32, 48, **options).to(dtype).requires_grad_(False)


def _arguments(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"hidden_states": (2, 8, 64), "encoder_hidden_states": (2, 6, 48), "temb": (2, 64)}
    arguments = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    return {**arguments, "encoder_attention_mask": torch.tensor([[True] * 6, [True] * 4 + [False] * 2])}


def _calls(found: Rewritten) -> Counter[tuple[str, str]]:
    """How often the op of a site ran, and its expression, by the norm."""
    counts = {}
    for site in found.sites:
        norm = ".".join(site.plan.modules["norm"])
        counts |= {(norm, "fused"): site.fused_calls, (norm, "original"): site.original_calls}
    return +Counter(counts)


def _compare(found: Rewritten, module: nn.Module) -> None:
    ours, stock = found.function(module, **_arguments()), type(module).forward(module, **_arguments())
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other)


def test_a_block_of_mochi_has_a_site_for_each_norm_of_a_stream_and_casts_nothing_outside() -> None:
    module = _mochi()
    found = rewritten(module)
    assert Counter(rules(found)) == SITES and "float32" not in found.plan.text
    _compare(found, module)
    norms = ("norm2", "norm3", "norm4", "norm2_context", "norm3_context", "norm4_context")
    assert _calls(found) == Counter({(f"{name}.norm", "fused"): 1 for name in norms})


def test_the_last_block_of_mochi_has_sites_for_the_video_and_its_norm_of_the_text_has_one() -> None:
    module = _mochi(context_pre_only=True)
    found = rewritten(module)
    assert Counter(rules(found)) == Counter({"norm, modulation": 1, "post-norm, residual": 2})
    assert rules(rewritten(module.norm1_context)) == ["norm, modulation"]


@pytest.mark.parametrize("numerics", ["exact", "forced to the original"])
def test_a_block_of_mochi_gives_the_bits_of_stock_where_it_must(numerics: str) -> None:
    module, arguments = _mochi(torch.bfloat16), _arguments(torch.bfloat16)
    found = rewritten(module, "exact" if numerics == "exact" else "fast")
    if numerics != "exact":
        found.guard.force_original()
    for one, other in zip(found.function(module, **arguments), module(**arguments), strict=True):
        assert torch.equal(one, other)
    assert numerics == "exact" or sum(site.original_calls for site in found.sites) == SITES.total()


def test_a_replaced_forward_of_the_class_of_norms_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _mochi()
    found = rewritten(module)
    found.function(module, **_arguments())  # proves
    before = _calls(found)
    monkeypatch.setattr(MochiModulatedRMSNorm, "forward", lambda self, x, scale=None: 2 * x)
    _compare(found, module)
    assert _calls(found) == before


def test_a_hook_on_a_norm_that_scales_sees_its_call() -> None:
    module, seen = _mochi(), []
    found = rewritten(module)
    module.norm2.register_forward_hook(lambda layer, given, result: seen.append(len(given)) or 2 * result)
    _compare(found, module)
    assert seen == [2, 2] and not _calls(found)


def test_a_hook_on_the_norm_inside_sees_its_call_and_the_other_sites_stay_fused() -> None:
    module, seen = _mochi(), []
    found = rewritten(module)
    module.norm2.norm.register_forward_hook(lambda layer, given, result: seen.append(layer) or 2 * result)
    _compare(found, module)
    assert seen == [module.norm2.norm] * 2
    calls = _calls(found)
    assert calls["norm2.norm", "original"] == 1 and calls["norm2.norm", "fused"] == 0
    assert calls.total() == SITES.total() and calls["norm4.norm", "fused"] == 1


def test_without_a_scale_such_a_norm_is_a_norm() -> None:
    module = block(NAMES, "return x + self.scaled(y, None) + gate")
    module.scaled = MochiModulatedRMSNorm(1e-6)
    found = rewritten(module)
    assert rules(found) == ["post-norm, residual"] and "scale" not in found.plan.text
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert _calls(found) == Counter({("scaled.norm", "fused"): 1})


def test_a_scale_that_may_be_none_leaves_the_call() -> None:
    module = block("x, y, gate=None", "return (1 + x) * y + self.scaled(y, gate)")
    module.scaled = MochiModulatedRMSNorm(1e-6)
    found = rewritten(module)
    assert rules(found) == ["modulation"] and "self.scaled(y, gate)" in found.plan.text
    for given in ({}, {"gate": leaves("gate")["gate"]}):
        arguments = {**leaves("x, y"), **given}
        torch.testing.assert_close(found.function(module, **arguments), module(**arguments))


class Doubled(nn.Module):
    """A norm, and a product that is with no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(SIZE, eps=1e-6).requires_grad_(False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = self.norm(x)
        return x * 2


class Shifted(Doubled):
    """A norm, and a sum."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = self.norm(x)
        return x + scale


@pytest.mark.parametrize("other", [Doubled, Shifted])
def test_a_norm_with_other_arithmetic_is_called(other: type[nn.Module]) -> None:
    module = block(NAMES, "return x + self.scaled(y, 1 + gate)")
    module.scaled = other()
    assert Rewriter().rewrite(module) == "no rule finds anything in it"


@pytest.mark.parametrize(
    ("body", "folded"),
    [
        ("x = x.float()\nx = f(x)\nx = x * y\nreturn x.to(y)", "return (f(x.float()) * y).to(y)"),
        ("x = f(x)\nx = g() + x\nreturn x", None),
        ("x = f(x)\nx = x * x\nreturn x", None),
        ("x = f(x)\nz = g(x)\nreturn x + z", "x = f(x)\nreturn x + g(x)"),
        ("x = f(x)\nz = x.to(y)\nreturn g(z, x)", "x = f(x)\nreturn g(x.to(y), x)"),
        ("x = f(x)\nz = x.to(y)\nreturn g() + x * z", None),
        ("x = f(x)\nx = x if y else z\nreturn x", None),
        ("x = f(x)\nx = y or x\nreturn x", None),
    ],
)
def test_values_are_folded_where_all_is_computed_in_the_same_order(body: str, folded: str | None) -> None:
    def parsed(text: str) -> ast.FunctionDef:
        (function,) = ast.parse(f"def forward(x, y, z):\n{textwrap.indent(text, ' ')}").body
        assert isinstance(function, ast.FunctionDef)
        return function

    tree = parsed(body)
    fold_rebound(tree)
    assert ast.unparse(tree) == ast.unparse(parsed(folded or body))
