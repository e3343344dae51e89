"""The shapes of modulated tensors: those that torch broadcasts to, and its errors, also the second time."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from diffkern.providers.eager.modulate import NO_NORM, RMS, gated_shape, modulated_shape

TENSORS = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4).map(lambda shape: torch.empty(shape, device="meta"))
OPTIONAL = st.one_of(st.none(), TENSORS)


def _agrees(ours: Callable[[], torch.Size], torchs: Callable[[], torch.Size]) -> torch.Size | None:
    """Asserts that the shape or the error is the same, and returns the shape."""
    try:
        expected = torchs()
    except RuntimeError as error:
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                ours()
            assert str(raised.value) == str(error)
        return None
    for _ in range(2):
        result = ours()
        assert result == expected
        assert type(result) is torch.Size
    return expected


def _broadcast(*tensors: Tensor | None) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*[tensor.shape for tensor in tensors if tensor is not None])
    return shape


@hypothesis.settings(max_examples=200)
@hypothesis.given(x=TENSORS, scale=OPTIONAL, shift=OPTIONAL)
def test_a_modulated_tensor_has_the_shape_or_the_error_of_torch(
    x: Tensor, scale: Tensor | None, shift: Tensor | None
) -> None:
    shape = _agrees(lambda: modulated_shape(x.shape, scale, shift, NO_NORM), lambda: _broadcast(x, scale, shift))
    if shape and x.ndim and shape[-1] != x.shape[-1]:
        with pytest.raises(RuntimeError, match=f"the norm is over a last dimension of size {x.shape[-1]}, and"):
            modulated_shape(x.shape, scale, shift, RMS)


@hypothesis.settings(max_examples=200)
@hypothesis.given(residual=TENSORS, x=TENSORS, gate=OPTIONAL, scale=OPTIONAL)
def test_a_new_residual_has_the_shape_or_the_error_of_torch(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None
) -> None:
    shape = _agrees(lambda: gated_shape(residual, x, gate), lambda: _broadcast(residual, x, gate))
    if shape is None or scale is None:
        return
    try:
        fits = torch.broadcast_shapes(shape, scale.shape) == shape
    except RuntimeError:
        fits = False
    if fits:
        assert gated_shape(residual, x, gate, None, scale) == shape
    else:
        with pytest.raises(RuntimeError):
            gated_shape(residual, x, gate, None, scale)


def test_symbols_of_a_traced_graph_are_broadcast_as_torch_does() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        x, scale = torch.empty(shapes.create_unbacked_symint(), 4), torch.empty(1, 4)
        assert str(modulated_shape(x.shape, scale, None, RMS)) == str(x.shape) != "torch.Size([1, 4])"
        assert str(gated_shape(x, x, scale)) == str(x.shape)
