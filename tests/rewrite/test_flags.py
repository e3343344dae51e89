"""Flags of a forward, ``use_other=True``, that decide whether something is added: one straight line for each choice."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

from diffkern.rewrite import Rewriter, Rewritten
from tests.rewrite.modules import block, leaves, rewritten, rules, written

NAMES = "x, scale, shift, gate, y, w"
FLAGS = "one=True, other=True"
#: Two residuals that flags decide about, each before the norm of the next.
BODY = """
x = x + gate * y
if one or other:
    n = self.norm(x)
    if one:
        x = x + self.proj(n * (1 + scale) + shift)
    if other:
        x = x + gate * w
return self.norm(x) * (1 + scale) + shift + x
"""
PAIR = "residual, norm, modulation"


def sites_run(found: Rewritten) -> list[str]:
    return sorted(site.plan.rule.name for site in found.sites for _ in range(site.fused_calls))


@pytest.mark.parametrize("flags", list(product((True, False), repeat=2)))
def test_residuals_around_a_branch_of_flags_are_fused_with_the_norms_behind_them(flags: tuple[bool, bool]) -> None:
    module, given = block(f"{NAMES}, {FLAGS}", BODY), leaves(NAMES)
    found = rewritten(module)
    choice = dict(zip(("one", "other"), flags, strict=True))
    stock = module(**given, **choice)
    torch.testing.assert_close(found.function(module, **given, **choice), stock, atol=2e-5, rtol=2e-5)
    pairs = sites_run(found).count(PAIR)
    assert pairs == (2 if all(flags) else 1 if not any(flags) else 0)
    found.guard.force_original()
    assert torch.equal(found.function(module, **given, **choice), stock)


def test_any_value_counts_as_python_takes_it() -> None:
    module, given = block(f"{NAMES}, {FLAGS}", BODY), leaves(NAMES)
    found = rewritten(module)
    found.guard.force_original()
    for one, other in ((1, "yes"), ([], None), (torch.tensor(0), 2)):
        assert torch.equal(found.function(module, **given, one=one, other=other), module(**given, one=one, other=other))


def test_a_flag_that_is_bound_again_and_one_that_only_returns_make_no_branches() -> None:
    bodies = {
        "bound": "one = x.sum() > 0\nif one:\n    x = x + y\nreturn self.norm(x) * (1 + scale) + shift",
        "returns": "x = self.norm(x) * (1 + scale) + shift\nif one:\n    return x + y\nreturn (x,)",
    }
    for body in bodies.values():
        found = rewritten(block(f"{NAMES}, one=True", body))
        assert "if one:" in found.source() and found.source().count("else:") == 0


def test_a_place_of_the_source_is_one_site_in_all_branches() -> None:
    found = rewritten(block(f"{NAMES}, {FLAGS}", f"x = self.norm(x) * (1 + scale) + shift\n{BODY}"))
    first = [site for site in found.sites if site.plan.rule.name == "norm, modulation"]
    assert len({site.plan.line for site in first}) == len(first)
    assert found.source().count(f"_sites[{first[-1].plan.index}](self, x, scale, shift)") == 3


MODULATED_TWICE = """
x = x + gate * y
n = self.norm(x)
scale = scale + w.mean()
{first}
second = n * (1 + 3 * scale) + shift
return x + self.proj(first) * second
"""


@pytest.mark.parametrize(
    ("first", "names"),
    [
        ("first = n * (1 + scale) + shift", [PAIR, "norm, modulation", "gated residual"]),
        ("first = n.mean(-1, keepdim=True) * gate", ["residual, norm", "modulation", "gated residual"]),
    ],
)
def test_a_residual_sinks_to_the_first_modulation_of_its_norm_and_no_further(first: str, names: list[str]) -> None:
    module, given = block(NAMES, MODULATED_TWICE.format(first=first)), leaves(NAMES)
    found = rewritten(module)
    assert rules(found) == names
    stock = module(**given)
    torch.testing.assert_close(found.function(module, **given), stock, atol=2e-5, rtol=2e-5)
    found.guard.force_original()
    assert torch.equal(found.function(module, **given), stock)


def test_a_sum_is_not_moved_behind_a_modulation_that_reads_its_norm() -> None:
    """Of two modulations of a norm the later one has operands that are not there before, and the earlier one none."""
    first = "first = n * shift\nshift = shift + first.mean()"
    module, given = block(NAMES, MODULATED_TWICE.format(first=first)), leaves(NAMES)
    found = rewritten(module)
    found.guard.force_original()
    assert torch.equal(found.function(module, **given), module(**given))


STATIC = """
class Written(Block):
    @staticmethod
    def halves(x):
        return (x * 0.5).chunk(2, dim=1)

    @staticmethod
    def doubles(x):
        return x.mul_(2)

    def forward(self, x, scale, shift, gate, y, w):
        x = x + gate * y
        {call}
        n = self.norm(x)
        return x + n
"""


@pytest.mark.parametrize(("call", "rule"), [("w, _ = self.halves(y)", True), ("w = self.doubles(y)", False)])
def test_a_static_method_that_only_reads_may_stand_between_a_residual_and_its_norm(call: str, rule: bool) -> None:
    module = written(STATIC.format(call=call))["Written"]().eval().requires_grad_(False)
    found, given = Rewriter().rewrite(module), leaves(NAMES)
    assert isinstance(found, Rewritten) and ("residual, norm" in rules(found)) == rule
    stock = module(**copy.deepcopy(given))
    torch.testing.assert_close(found.function(module, **copy.deepcopy(given)), stock, atol=2e-5, rtol=2e-5)


def test_a_replaced_static_method_runs_the_source() -> None:
    module = written(STATIC.format(call="w, _ = self.halves(y)"))["Written"]().eval().requires_grad_(False)
    found, given = rewritten(module), leaves(NAMES)
    module.halves = lambda y: (y.mul_(3), y)
    stock = module(**copy.deepcopy(given))
    assert torch.equal(found.function(module, **copy.deepcopy(given)), stock)
    assert not sites_run(found)
