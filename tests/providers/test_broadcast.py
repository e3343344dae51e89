"""The shapes of modulated tensors: those that torch broadcasts to, and its errors."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from diffkern.providers.eager.modulate import broadcast_shapes

SHAPES = st.lists(st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4).map(torch.Size), min_size=1, max_size=4)


@hypothesis.settings(max_examples=300)
@hypothesis.given(shapes=SHAPES)
def test_the_shape_or_the_error_is_that_of_torch_also_the_second_time(shapes: list[torch.Size]) -> None:
    try:
        expected = torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                broadcast_shapes(*shapes)
            assert str(raised.value) == str(error)
    else:
        for _ in range(2):
            result = broadcast_shapes(*shapes)
            assert result == expected and isinstance(result, torch.Size)


def test_symbols_of_a_traced_graph_are_broadcast_as_torch_does() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        x = torch.empty(shapes.create_unbacked_symint(), 4)
    assert str(broadcast_shapes(x.shape, torch.Size((1, 4)))) == str(x.shape) != "torch.Size([1, 4])"
