"""Modulated norms whose memory has rows around those of each sample, for a stream that is concatenated with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffkern.ops import gate_residual_norm_modulate, norm_modulate
from diffkern.providers import use_provider

#: Of x: a batch, one sample, frames of several, a row that no packet of 16 bytes divides, and no rows at all.
SHAPES = (2, 6, 64), (1, 6, 64), (2, 3, 5, 64), (3, 5, 33), (2, 0, 64), (6, 64)


def operands(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    rows = (*shape[:1], *(1,) * (len(shape) - 2), shape[-1])
    made = {name: torch.randn(rows, device=device).to(dtype) for name in ("scale", "shift")}
    return {"x": torch.randn(shape, device=device).to(dtype), **made}


def assert_between(y: Tensor, room: tuple[int, int], expected: Tensor) -> None:
    assert torch.equal(y, expected) and y._diffkern_room == room  # type: ignore[attr-defined]
    before, rows, size = room[0], *y.shape[-2:]
    assert y.storage_offset() == before * size and y.stride()[-2:] == (size, 1)
    samples = y.numel() // max(1, rows * size)
    assert y.untyped_storage().nbytes() >= samples * (rows + sum(room)) * size * y.element_size()
    if y.ndim > 2:
        assert y.stride(-3) == (rows + sum(room)) * size


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("room", [(3, 0), (0, 2), (1, 4)], ids=str)
def test_rows_between_the_room_have_the_bits_of_those_without_it(
    room: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    given = operands(shape, device, dtype)
    for norm in ("layer", "rms", None):
        expected = norm_modulate(**given, norm=norm, provider="compiled")  # type: ignore[arg-type]
        assert_between(norm_modulate(**given, norm=norm, room=room, provider="compiled"), room, expected)  # type: ignore[arg-type]
    residual, gate = torch.randn_like(given["x"]), given["shift"].float().sigmoid().to(dtype)
    for norm in ("layer", "rms"):
        plain, options = (residual, given["x"], gate), {"norm": norm, "scale": given["scale"], "shift": given["shift"]}
        expected = gate_residual_norm_modulate(*plain, **options, provider="compiled")  # type: ignore[arg-type]
        found = gate_residual_norm_modulate(*plain, **options, room=room, provider="compiled")  # type: ignore[arg-type]
        assert found[0].is_contiguous() and torch.equal(found[0], expected[0])
        assert_between(found[1], room, expected[1])


@torch.no_grad()
def test_what_the_room_holds_is_not_written(device: str) -> None:
    """Memory that was just freed is given again with what it held."""
    given = operands((2, 6, 64), device, torch.float32)
    for _ in range(20):
        memory = torch.full((2, 12, 64), 7.0, device=device)
        address = memory.data_ptr()
        del memory
        y = norm_modulate(**given, norm="layer", room=(2, 4), provider="compiled")
        if y.untyped_storage().data_ptr() == address:
            whole = y.as_strided((2, 12, 64), y.stride(), 0)
            free = whole[0, 8:], whole[1, :2], whole[1, 8:11]  # the allocator's own list is in the first and last row
            assert all((rows == 7).all() for rows in free)
            return
    pytest.skip("the allocator gives other memory")


def test_there_is_no_room_where_another_provider_or_a_backward_computes(device: str) -> None:
    given = operands((2, 6, 64), device, torch.float32)
    expected = norm_modulate(**given)
    with torch.no_grad(), use_provider("eager"):
        y = norm_modulate(**given, room=(3, 0))
    torch.testing.assert_close(y, expected)
    assert y.is_contiguous() and not hasattr(y, "_diffkern_room")
    given["x"].requires_grad_()
    y = norm_modulate(**given, room=(3, 0))
    assert y.is_contiguous() and y.requires_grad
    new, y = gate_residual_norm_modulate(given["x"], given["x"], room=(3, 0))
    assert new.requires_grad and y.is_contiguous()


@torch.no_grad()
def test_a_graph_has_no_room(device: str) -> None:
    given = operands((2, 6, 64), device, torch.float32)
    compiled = torch.compile(lambda **given: norm_modulate(**given, room=(3, 0)), backend="eager", fullgraph=True)
    y = compiled(**given)
    assert y.is_contiguous()
    torch.testing.assert_close(y, norm_modulate(**given))


@torch.no_grad()
@pytest.mark.parametrize(("shape", "room"), [((64,), (1, 0)), ((2, 6, 64), (-1, 0)), ((2, 6, 64), (1, -1))])
def test_room_that_cannot_be_is_an_error(shape: tuple[int, ...], room: tuple[int, int], device: str) -> None:
    with pytest.raises(RuntimeError, match="room"):
        norm_modulate(torch.randn(shape, device=device), room=room, provider="compiled")
