"""The rotary ops as torch sees them: schema, fake, compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diffkern.ops import qk_norm_rope, rope, rope_3d
from tests.ops.rotation import angles, axis_tables, random


def _views(device: str) -> dict[str, Tensor]:
    """Inputs ``[2, 4, 3, 8]`` in several layouts."""
    packed = random(2, 4, 72, device=device)
    return {
        "contiguous": random(2, 4, 3, 8, device=device),
        "heads_first": random(2, 3, 4, 8, device=device).transpose(1, 2),
        "packed": packed[..., 24:48].unflatten(-1, (3, 8)),
        "every_second": random(2, 4, 3, 16, device=device)[..., ::2],
        "expanded": random(1, 4, 3, 8, device=device).expand(2, -1, -1, -1),
    }


@pytest.mark.parametrize("view", ["contiguous", "packed", "expanded"])
def test_opcheck_passes(view: str, provider: str, device: str) -> None:
    x = _views(device)[view].detach().requires_grad_()
    cos, sin = angles(4, 1, 8, device=device)
    opcheck = torch.library.opcheck
    opcheck(torch.ops.diffkern.rope, (x, cos, sin), {"provider": provider})
    opcheck(torch.ops.diffkern.rope, (x, cos[:2], sin[:2], True, 0, 0, 1, 1, 2, provider))
    axes = axis_tables((2, 2), (2, 2), device)
    opcheck(torch.ops.diffkern.rope_3d, (x, *axes, None, [2, 2], False, 0, False, 0, 0, 1, 0, -1, provider))
    k = _views(device)["contiguous"].requires_grad_()
    weight = torch.ones(8, device=device, requires_grad=True)
    one: tuple[Any, ...] = ([cos], [sin], [cos], [sin])
    rest = (None, [], False, 0, 1, 1e-6, 0, 0.0, None, False, False, 0, 0, 1, 0, -1, provider)
    opcheck(torch.ops.diffkern.qk_norm_rope, (x, k, weight, None, None, None, *one, *rest))


def test_the_fake_result_has_the_shape_dtype_and_strides_of_the_real_one(provider: str, device: str) -> None:
    for x in _views(device).values():
        for dtype in (torch.float32, torch.bfloat16):
            x = x.to(dtype)
            table = angles(4, 1, 8, device=device)
            real = rope(x, *table, provider=provider)
            real_k = qk_norm_rope(x, x.transpose(1, 2), None, None, provider=provider)[1]
            with FakeTensorMode() as mode:
                moved = mode.from_tensor(x)
                fake = rope(moved, *(mode.from_tensor(t) for t in table), provider=provider)
                fake_k = qk_norm_rope(moved, moved.transpose(1, 2), None, None, provider=provider)[1]
            for ours, stock in ((fake, real), (fake_k, real_k)):
                assert (ours.shape, ours.dtype, ours.device) == (stock.shape, stock.dtype, stock.device)
                assert ours.stride() == stock.stride()


def _attention_inputs(model: Callable[..., Any], x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    q, k, _ = x.chunk(3, -1)
    q, k = model(q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), None, None, *table)
    return q, k


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_keeps_the_ops_whole_and_gives_the_same(dynamic: bool, device: str) -> None:
    table = angles(6, 1, 8, device=device)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        q, k = _attention_inputs(qk_norm_rope, x, table)
        return rope(q, *table, pairing="half"), k

    x = random(2, 6, 48, device=device)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for given in (x, x[:1]):
        for ours, eager in zip(compiled(given), step(given), strict=True):
            assert torch.equal(ours, eager)
    x.requires_grad_()
    compiled(x)[0].sum().backward()
    grad, x.grad = x.grad, None
    step(x)[0].sum().backward()
    torch.testing.assert_close(grad, x.grad)


def test_tables_of_axes_are_traced_with_a_grid_of_the_input(device: str) -> None:
    axes = axis_tables((4, 4), (2, 2), device)

    def step(x: Tensor) -> Tensor:
        return rope_3d(x.flatten(1, 2), *axes, grid=(x.shape[1], x.shape[2]))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for height in (2, 3, 4):
        x = random(1, height, 4, 8, device=device)
        assert torch.equal(compiled(x), step(x))


def test_transforms_of_torch_func_see_through_the_ops(device: str) -> None:
    cos, sin = angles(4, 1, 8, device=device)
    x = random(4, 3, 8, device=device)
    _, pulled = torch.func.vjp(lambda x: qk_norm_rope(x, x, None, None, cos, sin)[0], x)
    (grad,) = pulled(torch.ones_like(x))
    leaf = x.clone().requires_grad_()
    qk_norm_rope(leaf, leaf, None, None, cos, sin)[0].sum().backward()
    torch.testing.assert_close(grad, leaf.grad)
    shifts = torch.stack((sin, -sin))
    mapped = torch.func.vmap(lambda s: rope(x, cos, s))(shifts)
    for ours, s in zip(mapped, shifts, strict=True):
        assert torch.equal(ours, rope(x, cos, s))
