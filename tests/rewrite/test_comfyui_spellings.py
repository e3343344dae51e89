"""What ComfyUI's models are spelled with: ``del``, helpers with branches, writes in place, torch's norm functions."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern.rewrite import Rewriter
from tests.rewrite.modules import block, leaves, rewritten, rules, written

NAMES = "x, y, scale, shift, gate"


def fused(body: str, names: str = NAMES, **namespace: Any) -> tuple[nn.Module, Any]:
    """A block of this body and its rewritten forward, whose results are those of stock, with as many fused calls."""
    module = block(names, body, **namespace)
    found = rewritten(module)
    ours, stock = leaves(names), leaves(names)
    torch.testing.assert_close(found.function(module, **ours), module(**stock), rtol=1e-5, atol=1e-5)
    for name in ours:  # and so is what is written into arguments
        torch.testing.assert_close(ours[name], stock[name], rtol=1e-5, atol=1e-5)
    return module, found


def calls(found: Any) -> list[int]:
    return [site.fused_calls for site in found.sites]


def test_a_value_that_is_deleted_behind_its_use_goes_with_its_definition() -> None:
    _, found = fused("n = self.norm(x)\nz = n * (1 + scale) + shift\ndel n\nreturn self.proj(z)")
    assert rules(found) == ["norm, modulation"] and calls(found) == [1] and "del n" not in found.source()


def test_a_value_that_is_deleted_in_a_branch_stays() -> None:
    body = "n = self.norm(x)\nz = n * (1 + scale) + shift\nif z.ndim == 3:\n    del n\nreturn z"
    _, found = fused(body)
    assert rules(found) == ["modulation"]


def test_what_had_the_name_before_is_deleted_where_the_value_was() -> None:
    body = "n = x + y\nn = self.norm(n)\nz = n * (1 + scale) + shift\ndel n\nreturn self.proj(z)"
    _, found = fused(body)
    assert rules(found) == ["residual, norm, modulation"] or "del n" in found.source()


APPLY = """
def apply(x, factor, add=None, parts=None):
    if parts is None:
        if add is not None:
            return torch.addcmul(add, x, factor)
        else:
            return x * factor
    else:
        for start, end in parts:
            x[:, start:end] *= factor
        return x

"""


def _applied(body: str, names: str) -> tuple[nn.Module, Any]:
    source = f"{APPLY}class Written(Block):\n    def forward(self, {names}):\n        "
    module = written(source + body.replace("\n", "\n        "))["Written"]().eval().requires_grad_(False)
    return module, rewritten(module)


def test_a_helper_with_branches_is_seen_through_without_the_argument_that_parts_tokens() -> None:
    """As ``apply_mod`` of Flux in ComfyUI."""
    body = "x = apply(self.norm(x), (1 + scale), shift, parts)\nx += apply(self.proj(x), gate, None, parts)\nreturn x"
    module, found = _applied(body, f"{NAMES}, parts=None")
    seen: list[str | None] = []
    found.guard.observer = lambda _, reason: seen.append(reason)
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)), rtol=1e-5, atol=1e-5)
    assert sum(calls(found)) == 2 and seen == []

    arguments = leaves(NAMES)
    assert torch.equal(found.function(module, **arguments, parts=[(0, 9)]), module(**leaves(NAMES), parts=[(0, 9)]))
    assert sum(calls(found)) == 2 and seen == ["it is given parts"]


def test_a_branch_of_a_helper_that_only_the_call_decides_stays_a_branch() -> None:
    module, found = _applied("return apply(self.norm(x), scale, add)", "x, scale, add")
    for add in (leaves("shift")["shift"], None):
        arguments = leaves("x, scale")
        ours, stock = found.function(module, **arguments, add=add), module(**arguments, add=add)
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    assert sorted(calls(found)) == [1, 1]


class Norms(nn.Module):
    """As ``QKNorm`` of Flux: two norms and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q = self.first(q)
        k = self.second(k)
        return q.to(k), k


FAR = """
def apply_rope(q, k, matrices):
    return tuple([(matrices @ t.unflatten(-1, (-1, 2)).unsqueeze(-1)).flatten(-3) for t in (q, k)])

def attend(q, k, matrices=None):
    if matrices is not None:
        q, k = apply_rope(q, k, matrices)
    return q + k

"""


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, ModuleType]:
    """A block whose attention stands in a file of its own, and that file."""
    far = ModuleType("tests.rewrite.far")
    monkeypatch.setitem(sys.modules, far.__name__, far)
    scope = written(FAR, __name__=far.__name__)
    far.__dict__.update(scope)
    for name in ("apply_rope", "attend"):  # whose globals are those of that module
        code = scope[name]
        setattr(far, name, type(code)(code.__code__, far.__dict__, name, code.__defaults__))
    body = "q, k = self.norms(x.unflatten(-1, (2, 16)), y.unflatten(-1, (2, 16)))\nreturn attend(q, k, matrices)"
    module = block("x, y, matrices=None", body, attend=far.attend)
    module.norms = Norms().requires_grad_(False)
    return module, far


def _rotated() -> dict[str, Tensor]:
    return {**leaves("x, y"), "matrices": torch.randn(1, 40, 1, 8, 2, 2, generator=torch.Generator().manual_seed(1))}


def test_norms_of_a_submodule_and_a_rotation_of_another_file_are_one_op(attention: Any) -> None:
    module, _ = attention
    found = rewritten(module)
    for arguments in (_rotated(), leaves("x, y")):
        ours, stock = found.function(module, **arguments), module(**arguments)
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert rules(found) == ["query and key norm, rotation", "query and key norm"] or len(found.sites) == 2
    assert calls(found) == [1, 1] and "norms" not in [name for site in found.sites for name in site.plan.modules]


def test_a_function_that_is_replaced_in_the_other_file_is_called(attention: Any) -> None:
    module, far = attention
    found = rewritten(module)
    found.guard.force_original()
    far.apply_rope = lambda q, k, matrices: (q * 2, k)
    assert torch.equal(found.function(module, **_rotated()), module(**_rotated()))


def test_a_hook_on_the_submodule_of_norms_runs_and_sees_the_forward_as_it_is(attention: Any) -> None:
    module, _ = attention
    found, seen = rewritten(module), []
    module.norms.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(found.function(module, **_rotated()), module(**_rotated()))
    assert seen == [1, 1] and calls(found) == [0, 0]


def test_a_gated_sum_is_written_into_the_residual_and_rounds_once() -> None:
    module, found = fused("x += self.proj(y) * gate\nreturn x")
    arguments = leaves(NAMES)
    result = found.function(module, **arguments)
    assert result is arguments["x"] and rules(found) == ["gated residual, in place"] and calls(found) == [2]


def test_a_proof_of_a_sum_in_place_leaves_the_operands_as_they_are() -> None:
    module = block(NAMES, "x += self.proj(y) * gate\nreturn x")
    found, (site,) = rewritten(module), rewritten(module).sites
    arguments = leaves(NAMES)
    for _ in range(2):
        found.function(module, **{**arguments, "x": arguments["x"].clone()})
    (proof,) = found.sites[0].proofs.values()
    assert proof.passed and proof.fused <= 1.05 * proof.stock + 1e-6 and site.plan.rule.op == "gate_residual"


def test_what_reads_a_residual_before_it_is_written_is_not_moved_behind_that() -> None:
    _, found = fused("s = F.silu(x)\nx += y * gate\nreturn s * y")
    assert "gated linear unit" not in rules(found)


RMS = """
def rms(x, weight=None, eps=1e-6):
    if weight is None:
        return F.rms_norm(x, (x.shape[-1],), eps=eps)
    else:
        return F.rms_norm(x, weight.shape, weight=weight, eps=eps)

"""


def test_a_norm_function_and_its_modulation_in_place_are_one_op() -> None:
    """As the feed-forward of LTX-Video in ComfyUI, whose norm has no module."""
    body = "n = rms(x)\nn = torch.addcmul(n, n, scale).add_(shift)\nreturn self.proj(n)"
    source = f"{RMS}class Written(Block):\n    def forward(self, x, scale, shift):\n        "
    module = written(source + body.replace("\n", "\n        "))["Written"]().requires_grad_(False)
    found, arguments = rewritten(module), leaves("x, scale, shift")
    torch.testing.assert_close(found.function(module, **arguments), module(**arguments), rtol=1e-5, atol=1e-5)
    assert rules(found) == ["norm, modulation"] and calls(found) == [1]


def test_a_norm_over_more_than_the_last_dimension_is_no_norm_of_rows() -> None:
    _, found = fused("return F.layer_norm(x, (40, 32), eps=1e-6) * (1 + scale) + shift")
    assert rules(found) == ["modulation"]


def test_variables_of_a_helper_do_not_outlive_it() -> None:
    kept: list[Any] = []

    def made(x: Tensor) -> Tensor:
        y = x + 1
        kept.append(weakref.ref(y))
        return y

    def check(x: Tensor) -> Tensor:
        assert kept[-1]() is None
        return x

    modulate = written("def modulate(x, scale, shift):\n    return x * (1 + scale) + shift\n\n")["modulate"]
    body = "z = modulate(made(x), scale, shift)\nreturn check(self.proj(z))"
    _, found = fused(body, made=made, check=check, modulate=modulate)
    assert rules(found) == ["modulation"] and calls(found) == [1] and len(kept) >= 2


def test_a_branch_for_training_is_not_taken_and_training_runs_the_forward_as_it_is() -> None:
    management, comfy = ModuleType("comfy.model_management"), ModuleType("comfy")
    management.in_training, comfy.model_management = False, management  # type: ignore[attr-defined]
    body = "n = self.norm(x)\nif comfy.model_management.in_training:\n    n = n + 1\nreturn n * (1 + scale) + shift"
    module, found = fused(body, comfy=comfy)
    assert rules(found) == ["norm, modulation"] and calls(found) == [1]
    management.in_training = True  # type: ignore[attr-defined]
    assert torch.equal(found.function(module, **leaves(NAMES)), module(**leaves(NAMES))) and calls(found) == [1]


BRANCHES = """
q, k = x.unflatten(-1, (2, 16)), y.unflatten(-1, (2, 16))
q = self.norms.first(q)
k = self.norms.second(k)
if q.shape == k.shape:
    q, k = apply_rope(q, k, matrices)
else:
    q, k = apply_rope(q, k, matrices * 1)
return q + k
"""


def _branches(body: str) -> nn.Module:
    module = block("x, y, matrices", body, apply_rope=written(FAR)["apply_rope"])
    module.norms = Norms().requires_grad_(False)
    return module


def test_a_norm_before_two_branches_that_rotate_is_fused_in_each() -> None:
    """As LTX-Video in ComfyUI rotates queries and keys of one shape by one call."""
    module = _branches(BRANCHES)
    found = rewritten(module)
    ours, stock = found.function(module, **_rotated()), module(**_rotated())
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert rules(found) == ["query and key norm, rotation"] * 2 and sorted(calls(found)) == [0, 1]


def test_a_norm_of_whose_name_a_test_asks_the_shape_stays_where_that_has_no_value_without_it() -> None:
    module = _branches(BRANCHES.replace("q = self.norms.first(q)", "p = q\ndel q\nq = self.norms.first(p)"))
    found = Rewriter().rewrite(module)
    run = module.forward if isinstance(found, str) else found.function.__get__(module)
    assert torch.equal(run(**_rotated()), module(**_rotated()))


def test_a_nested_function_of_its_arguments_alone_is_seen_through() -> None:
    """As the blocks of Cosmos-Predict2 modulate; another nested function calls it, too, and keeps it."""
    body = """
    def modulated(x, norm, scale, shift):
        return norm(x) * (1 + scale) + shift

    z = modulated(x, self.norm, scale, shift)

    def again(x):
        return modulated(x, self.norm, scale, shift)

    return self.proj(z) + again(y)
    """
    _, found = fused(body)
    assert rules(found) == ["norm, modulation"] and calls(found) == [1]


def test_a_nested_function_whose_name_means_another_one_later_is_called() -> None:
    body = """
    def modulated(x):
        return self.norm(x) * (1 + scale) + shift

    z = modulated(x)

    def modulated(x):
        return x * (2 + scale)

    return z + modulated(y)
    """
    module = block(NAMES, body)
    found = Rewriter().rewrite(module)
    run = module.forward if isinstance(found, str) else found.function.__get__(module)
    torch.testing.assert_close(run(**leaves(NAMES)), module(**leaves(NAMES)), rtol=1e-5, atol=1e-5)


MODULATE = "def modulate(x, scale, shift):\n    return x * (1 + scale) + shift\n\n"


@pytest.mark.parametrize("gate", ["gate.unsqueeze(0)[0]", "gate[:, 0, None]"])
def test_a_helper_behind_views_of_the_gate_is_seen_through(gate: str) -> None:
    """As SD3 and AuraFlow in ComfyUI write ``gate.unsqueeze(1) * self.mlp(modulate(...))``."""
    gate = gate.replace("[0]", ".squeeze(0)")
    modulate = written(MODULATE)["modulate"]
    _, found = fused(f"return x + {gate} * self.proj(modulate(self.norm(x), scale, shift))", modulate=modulate)
    assert rules(found) == ["norm, modulation", "gated residual"] and calls(found) == [1, 1]


@pytest.mark.parametrize("gate", ["gates[0]", "self.clobber(y)", "gate.tanh()"])
def test_a_helper_behind_what_is_no_view_stays_behind_it(gate: str) -> None:
    """An item of a list, or what a call returns, may be another one behind the helper."""
    modulate = written(MODULATE)["modulate"]
    body = f"gates = [gate]\nreturn x + {gate} * self.proj(modulate(self.norm(x), scale, shift))"
    module = block(NAMES, body, modulate=modulate)
    found = Rewriter().rewrite(module)
    assert isinstance(found, str) or "norm, modulation" not in rules(found)


ADALN = "def apply_adaln_(x, shift, scale):\n    return x.addcmul_(x, scale).add_(shift)\n\n"


def test_a_modulation_that_is_written_into_the_new_norm_is_one_op() -> None:
    """As PixelDiT in ComfyUI."""
    apply = written(ADALN)["apply_adaln_"]
    _, found = fused("return self.proj(apply_adaln_(self.norm(x), shift, scale))", apply_adaln_=apply)
    assert rules(found) == ["norm, modulation"] and calls(found) == [1]


def test_a_modulation_that_is_written_into_what_others_read_stays() -> None:
    body = "n = self.norm(x)\nm = n.addcmul_(n, scale).add_(shift)\nreturn n * m"
    module = block(NAMES, body)
    found = Rewriter().rewrite(module)
    assert isinstance(found, str) or "norm, modulation" not in rules(found)
    assert torch.equal(
        getattr(found, "function", type(module).forward)(module, **leaves(NAMES)), module(**leaves(NAMES))
    )
