"""Every spelling of glue is found, computed by one op, and no less exact than what the source says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from diffkern.rewrite import Rewriter
from diffkern.rewrite.reference import CastsLifted
from diffkern.verify.measures import relative_error
from tests.rewrite.modules import block, leaves, rewritten, rules

MODULATION, MODULATED = "norm, modulation", "residual, norm, modulation"

SPELLINGS = [
    ("x, scale, shift", "return self.norm(x) * (1 + scale) + shift", MODULATION),
    ("x, scale, shift", "y = self.norm(x)\ny = y * (1 + scale) + shift\nreturn y", MODULATION),
    ("x, scale, shift", "y = self.norm2(x)\nz = y * (scale + 1)\nreturn shift + z", MODULATION),
    ("x, scale, shift", "return (1 + scale) * self.rms_norm(x) + shift", MODULATION),
    ("x, scale2, shift2", "return self.norm(x) * (1 + scale2)[:, None, :] + shift2[:, None, :]", MODULATION),
    ("x, scale2, shift2", "return self.norm(x) * (1 + scale2[:, None]) + shift2.unsqueeze(1)", MODULATION),
    ("x, scale, shift", "return (self.norm(x.float()) * (1 + scale) + shift).type_as(x)", MODULATION),
    ("x, scale, shift", "return (self.norm(x.float()) * (scale.float() + 1.0) + shift.float()).to(x.dtype)", MODULATION),  # noqa: E501
    ("x, scale", "return self.rms_norm(x) * (1 + scale)", MODULATION),
    ("x, scale", "return self.norm2(x) * scale", "norm, scale"),
    ("x, scale, shift", "return x * (1 + scale) + shift", "modulation"),
    ("r, y, gate", "return r + gate * y", "gated residual"),
    ("r, y, gate2", "return r + y * gate2.unsqueeze(1)", "gated residual"),
    ("r, y, gate2", "y = gate2.unsqueeze(1) * y\nreturn r + y", "gated residual"),
    ("r, y, gate", "return r + gate.tanh() * y", "gated residual"),
    ("r, y, gate2", "return r + y * gate2.unsqueeze(1).sigmoid()", "gated residual"),
    ("r, y, gate", "return gate * y + r", "gated residual"),
    ("r, y, gate", "return (r.float() + y * gate).type_as(r)", "gated residual"),
    ("r, y, gate", "return (r.float() + gate.float() * y.float()).to(r.dtype)", "gated residual"),
    ("r, y, gate", "return r + (gate.float() * y.float()).to(r.dtype)", "gated residual"),
    ("r, y, gate", "return r + gate.tanh() * self.rms_norm(y)", "post-norm, residual"),
    ("r, y", "return r + self.norm2(y)", "post-norm, residual"),
    ("r, y, gate", "r = r + gate * y\nreturn r, self.norm2(r)", "residual, norm"),
    ("r, y", "r = r + y\nreturn r, self.norm2(r.float()).type_as(r)", "residual, norm"),
    ("r, y, gate, scale, shift", "r = r + gate * y\nn = self.norm(r)\nreturn r, n * (1 + scale) + shift", MODULATED),
    ("r, y, scale, shift", "r = r + y\nn = (self.norm(r.float()) * (1 + scale) + shift).type_as(r)\nreturn r, n", MODULATED),  # noqa: E501
    ("x, scale, shift", "return torch.addcmul(shift, self.norm(x), 1 + scale)", MODULATION),
    ("r, y, gate", "return torch.addcmul(r, y, gate)", "gated residual"),
    ("r, y, gate", "r = torch.addcmul(r, gate, y)\nreturn r, self.norm2(r)", "residual, norm"),
    ("r, y, gate", "return torch.addcmul(r, gate.tanh(), self.rms_norm(y))", "post-norm, residual"),
    ("a, b", "return F.silu(a) * b", "gated linear unit"),
    ("a, b", "return torch.nn.functional.silu(a) * b", "gated linear unit"),
    ("a, b", "return b * F.gelu(a, approximate='tanh')", "gated linear unit"),
    ("a, b", "return self.act(a) * self.proj(b)", "gated linear unit"),
    ("x", "return F.gelu(self.proj(x), approximate='tanh')", "linear, GELU"),
]  # fmt: skip


def _block(names: str, body: str, dtype: torch.dtype) -> nn.Module:
    module = block(names, body, dtype)
    if "self.norm2(r.float())" in body:  # which torch's own norm takes in its own dtype alone
        module.norm2.float()
    return module


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(
    ("names", "body", "rule"), SPELLINGS, ids=[body.replace("\n", " ; ") for _, body, _ in SPELLINGS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_spelling_is_one_site_that_keeps_the_contract(names: str, body: str, rule: str, dtype: torch.dtype) -> None:
    module = _block(names, body, dtype)
    arguments = leaves(names, dtype)
    stock = _tuple(module(**arguments))
    with CastsLifted():
        twin = copy.deepcopy(module).double()
        reference = _tuple(twin(**{name: value.double() for name, value in arguments.items()}))

    found = rewritten(module)
    fused = _tuple(found.function(module, **arguments))

    assert rules(found) == [rule]
    assert [site.fused_calls for site in found.sites] == [1], found.sites[0].reasons
    for one, other, exact in zip(fused, stock, reference, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert relative_error(one, exact) <= 1.05 * relative_error(other, exact) + 1e-6


@pytest.mark.parametrize(
    ("names", "body", "rule"), SPELLINGS, ids=[body.replace("\n", " ; ") for _, body, _ in SPELLINGS]
)
def test_exact_numerics_give_the_bits_of_the_source(names: str, body: str, rule: str) -> None:
    module = _block(names, body, torch.bfloat16)
    arguments = leaves(names, torch.bfloat16)
    found = rewritten(module, "exact")
    for one, other in zip(_tuple(found.function(module, **arguments)), _tuple(module(**arguments)), strict=True):
        assert torch.equal(one, other)
    for site in found.sites:
        for way in filter(None, site.ways.values()):
            assert way.options.get("norm") is None, "random numbers need not show that a kernel sums in another order"
            assert "norm" not in site.plan.modules or way.calls_norm is not None, "nor here"


def test_two_modulations_of_one_norm_compute_the_norm_in_both_ops() -> None:
    names = "x, scale, shift, gate"
    module = block(names, "n = self.norm(x)\na = n * (1 + scale) + shift\nb = n * (1 + gate) + shift\nreturn a, b")
    found, arguments = rewritten(module), leaves(names)
    assert rules(found) == [MODULATION, MODULATION]
    for one, other in zip(found.function(module, **arguments), module(**arguments), strict=True):
        torch.testing.assert_close(one, other)
    assert "self.norm" not in found.source()


def test_a_rotation_is_no_gated_residual() -> None:
    assert isinstance(Rewriter().rewrite(block("x, y, gate, scale", "return x * gate + y * scale")), str)


def test_a_product_of_numbers_runs_as_it_is_written() -> None:
    module = block("x, factor", "return x + factor * x")
    found, x = rewritten(module), leaves("x")["x"]
    assert torch.equal(found.function(module, x, 0.5), module(x, 0.5))
    assert found.sites[0].fused_calls == 0 and found.sites[0].original_calls == 1
    assert "not a tensor" in next(iter(found.sites[0].reasons.values()))


@pytest.mark.parametrize(
    "body",
    [
        "return [z[:, (i + 1) * n:] for i in (0, 1)], z[:, :(n + 1) * n]",
        "stop = (n + 1) * n\nreturn z[:, 1:-stop:(n + 1) * n], z",
        "times = (n + 1) * n\nreturn [z for i in range(times)] + [z for i in range(n * (1 + n))]",
    ],
)
def test_sizes_and_offsets_are_no_modulations(body: str) -> None:
    names = "x, scale, shift"
    module = block(f"{names}, n", f"z = self.norm(x) * (1 + scale) + shift\n{body}")
    found = rewritten(module)
    assert rules(found) == [MODULATION]
    for one, other in zip(found.function(module, **leaves(names), n=2), module(**leaves(names), n=2), strict=True):
        torch.testing.assert_close(one, other)
