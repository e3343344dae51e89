"""What the files of models hold around glue: functions beside the class, functions in the forward, options, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern.rewrite import Rewriter
from diffkern.rewrite.site import FusedSite
from tests.rewrite.modules import SIZE, block, leaves, rewritten, rules, written

HELPERS = """
def rows(part, x):
    repeats = x.size(1) // part.size(1)
    if repeats == 1:
        return part
    return torch.repeat_interleave(part, repeats, dim=1)

def doubled(part, x):
    x.mul_(2)
    return part

def turned(x, matrices):
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    y = matrices[..., 0] * pairs[..., 0] + matrices[..., 1] * pairs[..., 1]
    return y.reshape(*x.shape).type_as(x)

"""
NAMES = "x, y, scale, shift"


def _block(names: str, body: str, functions: str = HELPERS) -> nn.Module:
    lines = "\n".join(f"        {line}" for line in body.strip("\n").splitlines())
    source = f"{functions}class Written(Block):\n    def forward(self, {names}):\n{lines}\n"
    return written(source)["Written"]().eval().requires_grad_(False)


def _fused_calls(found: Any) -> list[int]:
    return [site.fused_calls for site in sorted(found.sites, key=lambda site: site.plan.line)]


def test_a_function_of_the_file_that_only_reads_does_not_part_what_it_stands_between() -> None:
    module = _block(NAMES, "return torch.addcmul(rows(shift, x), self.norm(x), 1 + rows(scale, x))")
    found, arguments = rewritten(module), leaves(NAMES)
    torch.testing.assert_close(found.function(module, **arguments), module(**arguments))
    assert rules(found) == ["norm, modulation"] and found.sites[0].plan.modules and _fused_calls(found) == [1]


def test_a_function_that_writes_into_its_argument_does() -> None:
    module = _block(NAMES, "return torch.addcmul(shift, self.norm(x), 1 + doubled(scale, x))")
    found = Rewriter().rewrite(module)
    assert isinstance(found, str) or not found.sites[0].plan.modules
    ours, theirs = leaves(NAMES), leaves(NAMES)
    result = module(**ours) if isinstance(found, str) else found.function(module, **ours)
    torch.testing.assert_close(result, module(**theirs))
    assert torch.equal(ours["x"], theirs["x"])


def test_a_function_that_is_replaced_by_one_that_writes_runs_the_forward_as_it_is() -> None:
    module = _block(NAMES, "return torch.addcmul(rows(shift, x), self.norm(x), 1 + rows(scale, x))")
    found = rewritten(module)
    found.function(module, **leaves(NAMES))
    namespace = found.function.__globals__
    namespace["rows"] = namespace["doubled"]
    ours, theirs = leaves(NAMES), leaves(NAMES)
    assert torch.equal(found.function(module, **ours), module(**theirs))
    assert torch.equal(ours["x"], theirs["x"]) and _fused_calls(found) == [1]


def test_an_operand_that_reads_the_shape_of_the_new_residual_reads_that_of_the_old() -> None:
    """As ComfyUI's Wan repeats the modulation of a frame for all its tokens."""
    body = "x = x + self.proj(y)\nn = torch.addcmul(rows(shift, x), self.norm(x), 1 + rows(scale, x))\nreturn x, n"
    module = _block(NAMES, body)
    found, arguments = rewritten(module), leaves(NAMES)
    frames = {name: torch.randn(2, 4, SIZE) for name in ("scale", "shift")}
    for given in (arguments, {**arguments, **frames}):
        for ours, theirs in zip(found.function(module, **given), module(**given), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert rules(found) == ["residual, norm, modulation"] and _fused_calls(found) == [2]


def test_an_operand_that_reads_the_data_of_the_new_residual_stays_behind_it() -> None:
    body = "x = x + self.proj(y)\nn = self.norm(x) * (1 + first(scale, x)) + shift\nreturn x, n"
    functions = "def first(part, x):\n    return part + x[:, :1]\n\n"
    module = _block(NAMES, body, functions)
    found, arguments = rewritten(module), leaves(NAMES)
    for ours, theirs in zip(found.function(module, **arguments), module(**arguments), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "residual, norm, modulation" not in rules(found)


PATCHED = """
patches = options.get("patches", {})
x = x + self.proj(y)
if "after" in patches:
    for patch in patches["after"]:
        x = patch(x)
return self.norm(x) * (1 + scale) + shift
"""


def test_what_a_patch_would_part_is_one_op_without_it_and_stock_with_it() -> None:
    module = block(f"{NAMES}, options", PATCHED)
    found, seen = rewritten(module), []
    found.guard.observer = lambda _, reason: seen.append(reason)
    arguments = leaves(NAMES)
    torch.testing.assert_close(
        found.function(module, **arguments, options={}), module(**arguments, options={}), rtol=1e-5, atol=1e-5
    )
    assert rules(found) == ["residual, norm, modulation"] and _fused_calls(found) == [1]

    def patch(x: Tensor) -> Tensor:
        return x * 3

    options = {"patches": {"after": [patch]}}
    assert torch.equal(
        found.function(module, **arguments, options=options), module(**arguments, options=options)
    ) and _fused_calls(found) == [1]
    assert seen[-1] == "another node patches what it computes"


def test_an_option_that_is_read_after_its_argument_was_rebound_is_left() -> None:
    body = PATCHED.replace("patches = ", "options = dict(options)\npatches = ")
    found = rewritten(block(f"{NAMES}, options", body))
    assert rules(found) != ["residual, norm, modulation"]


ATTENTION = """
b, s, n, d = *x.shape[:2], 2, 16
def query(x):
    q = self.rms_norm(self.proj(x)).view(b, s, n, d)
    return turned(q, matrices)
def key(x):
    k = self.rms_norm(self.proj2(x)).view(b, s, n, d)
    return turned(k, matrices)
q = query(x)
k = key(x)
return q + 0, k + 0
"""


def _attention() -> nn.Module:
    module = _block("x, matrices", ATTENTION)
    module.proj2 = nn.Linear(SIZE, SIZE).requires_grad_(False)
    return module


def test_functions_in_a_forward_are_seen_through_and_rotate_by_any_matrices() -> None:
    """As ComfyUI's Wan computes queries and keys: one norm over all heads, then a product with a 2x2 matrix a pair."""
    module = _attention()
    found = rewritten(module)
    for batch, tokens in ((2, 40), (3, 24), (1, 60)):
        x, matrices = torch.randn(batch, tokens, SIZE), torch.randn(1, tokens, 1, 8, 2, 2)
        for ours, theirs in zip(found.function(module, x, matrices), module(x, matrices), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert rules(found) == ["query and key norm, rotation"] and _fused_calls(found) == [3]


def test_a_proof_holds_for_all_sizes_that_a_forward_names() -> None:
    module = _attention()
    found = rewritten(module)
    for tokens in (24, 40, 41):
        found.function(module, torch.randn(3, tokens, SIZE), torch.randn(1, tokens, 1, 8, 2, 2))
    assert len(found.sites[0].ways) == 1


def test_a_size_that_a_forward_names_shrinks_with_the_tensors_of_a_proof() -> None:
    from diffkern.rewrite.draws import random_like

    x, size = random_like((torch.empty(1, 1, 1, device="meta").expand(1, 1 << 20, 1 << 8), 1 << 20))
    assert size == x.shape[1] < 1 << 20 and x.shape[2] == 1 << 8


MODULATE = """
def modulate(norm, x, shift, scale):
    return torch.addcmul(shift, norm(x), scale + 1.0)

"""


def test_a_helper_that_calls_a_norm_it_is_given_is_seen_through() -> None:
    """As Kandinsky's ``apply_scale_shift_norm`` does in ComfyUI."""
    module = _block(NAMES, "return modulate(self.norm, x, shift, scale)", MODULATE)
    found, arguments = rewritten(module), leaves(NAMES)
    torch.testing.assert_close(found.function(module, **arguments), module(**arguments))
    assert rules(found) == ["norm, modulation"] and _fused_calls(found) == [1]


def test_a_helper_of_another_file_is_seen_through_and_reports_lines_of_this_one() -> None:
    modulate = written(MODULATE)["modulate"]
    module = block(NAMES, "return modulate(self.norm, x, shift, scale)", modulate=modulate)
    found, arguments = rewritten(module), leaves(NAMES)
    torch.testing.assert_close(found.function(module, **arguments), module(**arguments))
    assert _fused_calls(found) == [1]
    assert found.sites[0].plan.line == type(module).forward.__code__.co_firstlineno + 1


def test_a_helper_that_reads_another_global_of_its_file_is_called() -> None:
    modulate = written(f"FACTOR = 1.0\n{MODULATE.replace('1.0', 'FACTOR')}")["modulate"]
    module = block(NAMES, "return modulate(self.norm, x, shift, scale) + x * (1 + scale) + shift", modulate=modulate)
    found, arguments = rewritten(module), leaves(NAMES)
    torch.testing.assert_close(found.function(module, **arguments), module(**arguments))
    assert "norm, modulation" not in rules(found)


def test_attention_to_two_texts_by_one_query_is_no_rotation() -> None:
    body = "q = self.rms_norm(self.proj(x))\na = attend(q, scale)\nb = attend(q, y)\n"
    body += "return self.norm(a + b) * (1 + scale)"
    module = _block(NAMES, body, "def attend(q, k):\n    for _ in range(2):\n        q = q * k\n    return q\n\n")
    assert "query and key norm, rotation" not in rules(rewritten(module))


class Scaled(nn.Module):
    """A norm whose weight is cast at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (SIZE,), 1e-6
        self.weight = nn.Parameter(torch.rand(SIZE).double() + 0.5, requires_grad=False)
        self.readable = True

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, self.normalized_shape, self.weight.to(x), self.eps)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from diffkern.matching import NormSemantics
    from diffkern.rewrite import facts

    def read(norm: Any, x: Tensor) -> Any:
        return (norm.weight.to(x), None) if norm.readable else None

    semantics = NormSemantics("rms_norm", dim="normalized_shape", reader=read)
    monkeypatch.setattr(facts, "NORM_SOURCES", [lambda module: semantics if type(module) is Scaled else None])
    module = block(NAMES, "return self.rms_norm(x) * (1 + scale) + shift")
    module.rms_norm = Scaled()
    return module


def test_the_norm_of_a_library_is_fused_with_the_weight_as_that_library_reads_it(scaled: nn.Module) -> None:
    found, arguments = rewritten(scaled), leaves(NAMES)
    torch.testing.assert_close(found.function(scaled, **arguments), scaled(**arguments))
    assert rules(found) == ["norm, modulation"] and _fused_calls(found) == [1]


def test_a_weight_that_kernels_cannot_read_is_left_to_its_norm(scaled: nn.Module) -> None:
    found, arguments, calls = rewritten(scaled), leaves(NAMES), []
    found.function(scaled, **arguments)
    scaled.rms_norm.readable = False
    site: FusedSite = found.sites[0]
    run_norm = site.run_norm
    site.run_norm = lambda *given: calls.append(1) or run_norm(*given)  # type: ignore[method-assign]
    torch.testing.assert_close(found.function(scaled, **arguments), scaled(**arguments))
    assert calls == [1] and _fused_calls(found) == [2]
