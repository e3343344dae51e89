"""A site runs its op only while what it computes in the place of is as it was when the source was read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from diffkern.blocks.pieces import untouched
from diffkern.rewrite import Rewriter
from tests.rewrite.modules import SIZE, Block, block, leaves, rewritten, written

NAMES = "x, scale, shift, gate, y"
BODY = "n = self.norm(x) * (1 + scale) + shift\nreturn n + gate * y"


def _counts(found: Any) -> list[tuple[int, int]]:
    sites = sorted(found.sites, key=lambda site: site.plan.line)
    return [(site.fused_calls, site.original_calls) for site in sites]


def test_a_hook_on_a_norm_sees_its_call_and_the_other_site_stays_fused() -> None:
    module = block(NAMES, BODY)
    found, calls = rewritten(module), []
    module.norm.register_forward_hook(lambda *args: calls.append(1))
    stock = module(**leaves(NAMES))
    result = found.function(module, **leaves(NAMES))
    torch.testing.assert_close(result, stock)
    assert calls == [1, 1] and _counts(found) == [(0, 1), (1, 0)]


def test_a_norm_whose_forward_was_replaced_is_called() -> None:
    module = block(NAMES, BODY)
    found = rewritten(module)
    found.function(module, **leaves(NAMES))  # proves
    module.norm.forward = lambda x: x * 2
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert _counts(found)[0] == (1, 1)


@pytest.mark.parametrize("proven", [False, True])
def test_a_forward_that_is_bound_to_another_norm_computes_with_that_one(proven: bool) -> None:
    module, other = block(NAMES, BODY), nn.LayerNorm(SIZE, bias=False)
    nn.init.constant_(other.weight, 3.0)
    found = rewritten(module)
    if proven:
        found.function(module, **leaves(NAMES))
    module.norm.forward = other.forward
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert _counts(found)[0] == (int(proven), 1) and not untouched(module.norm, nn.LayerNorm)
    module.norm.forward = nn.LayerNorm.forward.__get__(module.norm)
    found.function(module, **leaves(NAMES))
    assert _counts(found)[0] == (int(proven) + 1, 1), "its own is as if there were none"


def test_a_replaced_class_forward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = block(NAMES, BODY)
    found = rewritten(module)
    found.function(module, **leaves(NAMES))  # proves
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * 2)
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert _counts(found)[0] == (1, 1)


def test_a_norm_of_another_class_is_called() -> None:
    module = block(NAMES, BODY)
    found = rewritten(module)
    found.function(module, **leaves(NAMES))  # proves
    module.norm = nn.Tanh()
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert _counts(found)[0] == (1, 1)


def test_a_global_hook_sees_all_calls() -> None:
    module = block(NAMES, BODY)
    found, calls = rewritten(module), []
    handle = nn.modules.module.register_module_forward_hook(lambda *args: calls.append(1))
    try:
        found.function(module, **leaves(NAMES))
    finally:
        handle.remove()
    assert calls == [1] and _counts(found) == [(0, 0), (0, 0)]


def test_an_attribute_that_decided_a_branch_is_looked_at_again() -> None:
    body = "if self.mode == 'plain':\n    return self.norm(x) * (1 + scale) + shift\nreturn x * gate + y"
    module = block(NAMES, body)
    found = rewritten(module)
    assert "self.mode" not in found.source()
    module.mode = "other"
    assert torch.equal(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))


def test_an_attribute_that_decided_a_branch_may_become_a_tensor() -> None:
    names = "x, scale, shift"
    body = "y = self.norm(x) * (1 + scale) + shift\nif self.mode is not None:\n    y = y * self.mode\nreturn y"
    module, given = block(names, body), leaves(names)
    module.mode = 2.0
    found = rewritten(module)
    torch.testing.assert_close(found.function(module, **given), module(**given))
    module.mode = torch.full((SIZE,), 3.0)
    torch.testing.assert_close(found.function(module, **given), module(**given))


def test_modules_of_other_configurations_have_other_plans() -> None:
    body = "if self.mode == 'plain':\n    return self.norm(x) * (1 + scale) + shift\nreturn x + gate * y"
    module = block(NAMES, body)
    other = type(module)().eval().requires_grad_(False)
    other.mode = "other"
    rewriter = Rewriter()
    one, two = rewriter.rewrite(module), rewriter.rewrite(other)
    assert [site.plan.rule.name for found in (one, two) for site in found.sites] == [
        "norm, modulation",
        "gated residual",
    ]
    twin = type(module)().eval().requires_grad_(False)
    assert rewriter.rewrite(twin) is one


HELPERS = """
def modulate(x, scale, shift=None):
    if scale.ndim == 2:
        scale = scale[:, None]
    return x * (1 + scale) + shift

class Written(Block):
    def gated(self, x, y, gate):
        return x + gate * y

    def forward(self, x, scale, shift, gate, y):
        return self.gated(modulate(self.norm(x), scale, shift=shift), y, gate)

class Overriding(Written):
    def gated(self, x, y, gate):
        return x - gate * y
"""


def _helped() -> tuple[dict[str, Any], nn.Module]:
    scope = written(HELPERS, Block=Block)
    return scope, scope["Written"]().eval().requires_grad_(False)


def test_helpers_are_read_where_they_are_called() -> None:
    _, module = _helped()
    found = rewritten(module)
    assert sorted(site.plan.rule.name for site in found.sites) == ["gated residual", "norm, modulation"]
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert _counts(found) == [(1, 0), (1, 0)]


def test_a_replaced_helper_is_called() -> None:
    scope, module = _helped()
    found = rewritten(module)
    scope["modulate"] = lambda x, scale, shift: x - scale
    assert torch.equal(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))


def test_an_overridden_helper_is_called() -> None:
    scope, module = _helped()
    found, other = rewritten(module), scope["Overriding"]().eval().requires_grad_(False)
    assert torch.equal(found.function(other, **leaves(NAMES)), other(**leaves(NAMES)))
    torch.testing.assert_close(rewritten(other).function(other, **leaves(NAMES)), other(**leaves(NAMES)))


def test_a_helper_of_the_instance_is_called() -> None:
    _, module = _helped()
    found = rewritten(module)
    module.gated = lambda x, y, gate: x * 5
    assert torch.equal(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))


def test_autocast_follows_the_source() -> None:
    module = block(NAMES, BODY)
    found = rewritten(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert _counts(found) == [(0, 0), (0, 0)]


def test_a_tensor_of_another_class_runs_the_expression_of_the_source() -> None:
    class Tagged(torch.Tensor):
        pass

    module = block(NAMES, BODY)
    found, arguments = rewritten(module), leaves(NAMES)
    arguments["x"] = arguments["x"].as_subclass(Tagged)
    result = found.function(module, **arguments)
    assert type(result) is Tagged and torch.equal(result, module(**arguments))


def test_new_dtypes_are_proven_anew() -> None:
    module = block(NAMES, BODY)
    found = rewritten(module)
    found.function(module, **leaves(NAMES))
    found.function(module, **leaves(NAMES, torch.bfloat16))
    assert [len(site.ways) for site in found.sites] == [2, 2]


def test_gradients_are_those_of_the_source() -> None:
    module = block(NAMES, BODY)
    found = rewritten(module)
    grads = []
    for forward in (type(module).forward, found.function):
        arguments = {name: value.requires_grad_() for name, value in leaves(NAMES).items()}
        forward(module, **arguments).square().sum().backward()
        grads.append([value.grad for value in arguments.values()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("body", ["n = self.norm2(x)", "n = self.norm2(x) * (1 + scale) + shift"])
def test_a_residual_whose_norm_is_called_as_a_module_needs_no_dtype(body: str) -> None:
    """As Liger's norms are where a model is trained: the way was proven with the op's own norm."""
    module, names = block("x, y, scale, shift", f"x = x + y\n{body}\nreturn x, n"), "x, y, scale, shift"
    (site,) = rewritten(module).sites
    arguments = leaves(names)
    given = tuple(arguments[name] for name in names.split(", ") if name in ("x", "y") or name in body)
    way = site.way(module, given, site.signature(module, given))
    assert way is not None and way.calls_norm is None and "residual_dtype" not in way.options
    result = site.call_op(module, site.operands(module, given), replace(way, calls_norm="same"), None)
    torch.testing.assert_close(result, module(**arguments))


def test_blocks_of_one_kind_make_one_graph_of_the_compiler() -> None:
    modules = [block(NAMES, BODY)]
    modules += [type(modules[0])().eval().requires_grad_(False) for _ in range(11)]
    rewriter = Rewriter()
    found = [rewriter.rewrite(module) for module in modules]
    assert len({one for one in found}) == 1
    found[0].function(modules[0], **leaves(NAMES))  # proves
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(found[0].function, backend=counter, fullgraph=True)
    for module in modules:
        torch.testing.assert_close(compiled(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert counter.frame_count == 1
