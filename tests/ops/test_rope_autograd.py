"""Gradients of rope, rope_3d and qk_norm_rope, and what autograd keeps alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern.ops import qk_norm_rope, rope, rope_3d
from tests.ops.reference import EXACT_HALF
from tests.ops.rotation import angles, axis_tables, chain, random

F64 = torch.float64


def leaf(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = F64) -> Tensor:
    return random(*shape, seed=seed, device=device, dtype=dtype).requires_grad_()


def leaves(tables: list[Tensor]) -> list[Tensor]:
    return [table.requires_grad_() for table in tables]


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_gradients_of_rope_are_right_in_float64(pairing: str, device: str) -> None:
    x = leaf(2, 3, 2, 8, device=device)
    for shape in ((3, 1, 8), (3, 2, 4), (1, 6), (2, 3, 1, 3)):
        tables = leaves(list(angles(*shape, device=device, dtype=F64)))
        options: dict[str, Any] = {"pairing": pairing, "rotary_dim": {8: 8, 4: 8, 6: 6, 3: 6}[shape[-1]]}
        assert torch.autograd.gradcheck(lambda x, c, s, o=options: rope(x, c, s, **o), (x, *tables))
        assert torch.autograd.gradgradcheck(lambda x, c, s, o=options: rope(x, c, s, **o), (x, *tables), fast_mode=True)
    tables = leaves(list(angles(2, 1, 8, device=device, dtype=F64)))
    assert torch.autograd.gradcheck(lambda x, c, s: rope(x, c, s, tokens=(1, 2), pairing=pairing), (x, *tables))


def test_no_gradient_is_cut_and_each_equals_that_of_the_chain(provider: str, device: str) -> None:
    for dtype in (torch.float32, *EXACT_HALF):
        for pairing in ("interleaved", "half"):
            results = []
            for function in (chain, lambda *args: rope(*args[:3], pairing=args[3], provider=provider)):
                x = leaf(2, 5, 3, 16, device=device, dtype=dtype)
                tables = leaves(list(angles(5, 1, 16, device=device)))
                y = function(x, *tables, pairing)
                assert y.requires_grad
                y.float().pow(2).sum().backward()
                results.append((x.grad, *(table.grad for table in tables)))
            for stock, ours in zip(*results, strict=True):
                assert stock is not None
                assert ours is not None
                unit = torch.finfo(dtype).eps
                torch.testing.assert_close(ours, stock, rtol=4 * unit, atol=8 * unit)


def _rope_of_two_axes(**options: Any) -> Callable[..., Tensor]:
    return lambda x, *tables: rope_3d(x, tables[:2], tables[2:], **options)


@pytest.mark.parametrize("order", ["blocked", "alternating"])
def test_gradients_of_rope_3d_reach_the_tables(order: str, device: str) -> None:
    x = leaf(2, 6, 2, 8, device=device)
    positions = torch.stack([torch.tensor([0, 1, 1, 0, 1, 0]), torch.tensor([2, 0, 1, 1, 2, 2])], -1).to(device)
    for heads, pad in ((1, 2), (2, 4)):
        cos, sin = (leaves(tables) for tables in axis_tables((3, 3), (heads, heads), device, F64))
        options: dict[str, Any] = {"order": order, "front_pad": pad}
        for place in ({"grid": (2, 3)}, {"coords": positions}, {"coords": positions.expand(2, -1, -1)}):
            for pairing in ("interleaved", "half"):
                call = _rope_of_two_axes(**options, **place, pairing=pairing)
                assert torch.autograd.gradcheck(call, (x, *cos, *sin), fast_mode=True)
    swapped = x.transpose(1, 2).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *t: rope_3d(x, t[:2], t[2:], grid=(2, 3), seq_dim=2, order=order, front_pad=4),
        (swapped, *cos, *sin),
        fast_mode=True,
    )


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("norm", ["rms", "layer", None])
def test_gradients_of_qk_norm_rope_are_right_in_float64(norm: str | None, across: bool, device: str) -> None:
    shape = (2, 3, 8) if across else (2, 3, 2, 4)
    q, k = leaf(*shape, device=device), leaf(*shape, seed=1, device=device)
    weights = [leaf(shape[-1], seed=2 + i, device=device) for i in range(4)] if norm else []
    tables = leaves(list(angles(3, 1, 4, device=device, dtype=F64)))

    def call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        q_weight, k_weight, q_bias, k_bias = weights or (None,) * 4
        return qk_norm_rope(
            q, k, q_weight, k_weight, cos, sin, norm=norm, q_bias=q_bias, k_bias=k_bias,
            across_heads=2 if across else None, **options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, (q, k, *tables, *weights))
    assert torch.autograd.gradcheck(
        lambda *args: call(*args, pairing="half"), (q, k, *tables, *weights), fast_mode=True
    )
    assert torch.autograd.gradgradcheck(call, (q, k, *tables, *weights), fast_mode=True)
    partial = [table[:2].detach().requires_grad_() for table in tables]
    assert torch.autograd.gradcheck(
        lambda *args: call(*args, tokens=(1, 2)), (q, k, *partial, *weights), fast_mode=True
    )
    axes = [leaves(tables) for tables in axis_tables((3,), (2,), device, F64)]
    assert torch.autograd.gradcheck(
        lambda q, k, c, s: call(q, k, [c], [s], grid=(3,)),
        (q, k, *axes[0], *axes[1]),  # type: ignore[arg-type]
        fast_mode=True,
    )


def test_qk_norm_rope_has_the_gradients_of_the_chain_of_ops(provider: str, device: str) -> None:
    for dtype in (torch.float32, *EXACT_HALF):
        results = []
        for fused in (False, True):
            q, k = (leaf(2, 5, 3, 16, seed=seed, device=device, dtype=dtype) for seed in (0, 1))
            weight = (1 + 0.3 * random(16, seed=2, device=device)).to(dtype).requires_grad_()
            cos, sin = angles(5, 1, 16, device=device)
            if fused:
                y, z = qk_norm_rope(q, k, weight, weight, cos, sin, provider=provider)
            else:
                wide = [torch.nn.functional.rms_norm(t.float(), (16,), weight.float(), 1e-6) for t in (q, k)]
                y, z = (chain(t, cos, sin) for t in wide)
            ((y.float() * z.float()).sum()).backward()
            results.append((q.grad, k.grad, weight.grad))
        for stock, ours in zip(*results, strict=True):
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(ours, stock, rtol=8 * unit, atol=20 * unit)


@pytest.mark.parametrize("op", ["rope", "rope_3d"])
def test_the_input_is_not_kept_unless_a_table_wants_a_gradient(op: str, device: str) -> None:
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "rope": lambda x: rope(x, *angles(4, 8, device=device)),
        "rope_3d": lambda x: rope_3d(x, *axis_tables((4,), (4,), device), grid=(4,)),
    }
    x = leaf(2, 4, 8, device=device, dtype=torch.float32) * 1
    y = calls[op](x)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None
    y.sum().backward()


def test_in_inference_nothing_is_recorded(provider: str, device: str) -> None:
    x = leaf(2, 4, 8, device=device, dtype=torch.float32)
    with torch.no_grad():
        assert not rope(x, *angles(4, 8, device=device), provider=provider).requires_grad
    with torch.inference_mode():
        q, k = qk_norm_rope(x, x, None, None, *angles(4, 8, device=device), provider=provider)
        assert q.is_inference()
        assert k.is_inference()


def test_gradients_of_half_tables_are_rounded_after_the_sum_over_tokens(device: str) -> None:
    x = torch.randn(2, 256, 2, 4, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    leaves = [torch.rand(16, 1, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    truths = [leaf.detach().double().requires_grad_() for leaf in leaves]
    grad = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    rope_3d(x, leaves[:2], leaves[2:], grid=(16, 16)).backward(grad)
    rope_3d(x.double(), truths[:2], truths[2:], grid=(16, 16)).backward(grad.double())
    for leaf, truth in zip(leaves, truths, strict=True):
        assert leaf.grad is not None and truth.grad is not None
        torch.testing.assert_close(leaf.grad.double(), truth.grad, rtol=2**-8, atol=1e-3)
