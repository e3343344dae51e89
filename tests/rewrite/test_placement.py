"""A site is computed where the source would have seen the same values, or not at all.

With every site forced to its original expression, the rewritten forward gives the bits of the source.
"""

from __future__ import annotations

import copy

import pytest
import torch

from diffkern.rewrite import Rewriter, Rewritten
from tests.rewrite.modules import block, leaves, rewritten, rules

NAMES = "x, scale, shift, gate, y"
PAIR = "residual, norm, modulation"

#: Bodies in which a careless rewriter computes something else, and the rules that remain.
HAZARDS = {
    "a leaf is bound to something else in between": "n = self.norm(x)\nx = x * 3\nreturn n * (1 + scale) + shift + x",
    "an operand is written to in between": "n = self.norm(x)\nx.mul_(2)\nreturn n * (1 + scale) + shift",
    "out= writes to an operand": "n = self.norm(x)\ntorch.mul(x, 2, out=x)\nreturn n * (1 + scale) + shift",
    "a subscript store writes to an operand": "n = self.norm(x)\nx[:, 0] = 7\nreturn n * (1 + scale) + shift",
    "an augmented assignment writes to an operand": "n = self.norm(x)\nx *= 2\nreturn n * (1 + scale) + shift",
    "a view of an operand is written to": "n = self.norm(x)\nv = x[:, 1:]\nv.add_(1)\nreturn n * (1 + scale) + shift",
    "a call may write to an operand": "n = self.norm(x)\nself.clobber(x)\nreturn n * (1 + scale) + shift",
    "a call gets a view of an operand": "n = self.norm(x)\nself.clobber(x.view(x.shape))\nreturn n * (1 + scale) + shift",  # noqa: E501
    "a call in the expression writes to an operand": "return self.norm(x) * (1 + scale) + self.clobber(x)",
    "the residual is read before the norm can be": (
        "x = x + gate * y\nscale = scale + x.mean()\nreturn self.norm(x) * (1 + scale) + shift + x"
    ),
    "the intermediate is used again": "n = self.norm(x)\nm = n * (1 + scale) + shift\nreturn m + n.mean()",
    "a nested function reads the intermediate": (
        "n = self.norm(x)\ndef later():\n    for part in n:\n        return part.sum()\n"
        "m = n * (1 + scale) + shift\nreturn m + later()"
    ),
    "a lambda reads the intermediate": "n = self.norm(x)\nf = lambda: n\nm = n * (1 + scale) + shift\nreturn m + f()",
    "the intermediate is deleted": "n = self.norm(x)\nm = n * (1 + scale) + shift\ndel n\nreturn m",
    "a branch decides the norm": (
        "if scale.mean() > 0:\n    n = self.norm(x)\nelse:\n    n = self.rms_norm(x)\nreturn n * (1 + scale) + shift"
    ),
    "a loop carries the operand": (
        "n = self.norm(x)\nfor _ in range(2):\n    m = n * (1 + scale) + shift\n    x = x + m\nreturn x"
    ),
    "locals() sees the intermediate": "n = self.norm(x)\nm = n * (1 + scale) + shift\nreturn m + locals()['n']",
    "a context stands between": (
        "n = self.norm(x)\nwith torch.enable_grad():\n    m = n * (1 + scale) + shift\nreturn m"
    ),
}  # fmt: skip


@pytest.mark.parametrize("body", HAZARDS.values(), ids=HAZARDS)
def test_a_forced_forward_gives_the_bits_of_the_source(body: str) -> None:
    module = block(NAMES, body)
    found = Rewriter().rewrite(module)
    if isinstance(found, str):
        return  # nothing was rewritten, which is always right
    found.guard.force_original()
    stock = module(**leaves(NAMES))
    assert torch.equal(found.function(module, **leaves(NAMES)), stock)


@pytest.mark.parametrize("body", HAZARDS.values(), ids=HAZARDS)
def test_a_fused_forward_computes_what_the_source_says(body: str) -> None:
    module = block(NAMES, body)
    found = Rewriter().rewrite(module)
    if isinstance(found, Rewritten):
        stock = module(**leaves(NAMES))
        torch.testing.assert_close(found.function(module, **leaves(NAMES)), stock, atol=2e-5, rtol=2e-5)


def test_a_residual_is_hoisted_over_statements_that_do_not_matter() -> None:
    body = "x = x + gate * y\nz = self.proj(z)\nn = self.norm(x) * (1 + scale) + shift\nreturn x + n + z"
    module = block(f"{NAMES}, z", body)
    found = rewritten(module)
    assert rules(found) == [PAIR]
    lines = found.source().splitlines()
    assert lines.index("    z = self.proj(z)") > next(i for i, line in enumerate(lines) if "_sites[0]" in line)


def test_a_residual_sinks_to_a_norm_whose_operands_come_later() -> None:
    body = "x = x + gate * y\nscale, shift = torch.cat([scale, shift]).chunk(2)\n"
    module = block(NAMES, f"{body}n = self.norm(x) * (1 + scale) + shift\nreturn x + n")
    found = rewritten(module)
    assert rules(found) == [PAIR]
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))


def test_a_residual_in_another_branch_than_its_norm_is_computed_alone() -> None:
    module = block(
        NAMES, "x = x + gate * y\nif scale.mean() < 9:\n    x = x + self.norm(x) * (1 + scale) + shift\nreturn x"
    )
    assert rules(rewritten(module)) == ["gated residual", "norm, modulation"]


def test_rewriting_leaves_the_function_alone() -> None:
    module = block(NAMES, "return self.norm(x) * (1 + scale) + shift")
    before = copy.copy(vars(type(module).forward)), type(module).forward.__code__
    rewritten(module)
    assert (vars(type(module).forward), type(module).forward.__code__) == before
