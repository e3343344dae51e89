"""The geometry of a launch: every row exactly once, at the right place, in tiles that fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from diffkern.providers.triton.rows import merge_loops
from diffkern.providers.triton.tiles import Tile, choose_tile
from tests.ops.layouts import LAYOUTS, make


def _offsets(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Offsets of all index combinations, one per stride tuple."""
    return {
        tuple(sum(i * s for i, s in zip(index, each, strict=True)) for each in strides)
        for index in itertools.product(*(range(size) for size in sizes))
    }


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"four_loops"}))
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.preserve_format])
def test_merged_loops_visit_every_row_of_both_tensors(layout: str, memory_format: torch.memory_format) -> None:
    for batch, rows in ((1, 1), (2, 5), (3, 1)):
        x = make(layout, batch, rows, 4, torch.float32, "cpu")
        y = torch.empty_like(x, memory_format=memory_format)
        merged = merge_loops(x.shape[:-1], [y.stride()[:-1], x.stride()[:-1]])
        assert merged is not None
        found = _offsets(merged.sizes, *merged.strides)
        assert found == _offsets(x.shape[:-1], y.stride()[:-1], x.stride()[:-1])
        assert torch.tensor(merged.sizes).prod() == x[..., 0].numel()


def test_a_contiguous_tensor_is_one_loop_and_channels_in_front_keep_neighbours() -> None:
    x = torch.empty(2, 3, 5, 8)
    merged = merge_loops(x.shape[:-1], [x.stride()[:-1]])
    assert merged is not None
    assert (merged.sizes, merged.strides, merged.nested) == ((30, 1, 1), ((8, 0, 0),), False)
    channel_first = torch.empty(2, 8, 3, 5).movedim(1, -1)
    merged = merge_loops(channel_first.shape[:-1], [channel_first.stride()[:-1]])
    assert merged is not None
    assert (merged.sizes, merged.strides, merged.nested) == ((15, 2, 1), ((1, 120, 0),), True)


def test_more_than_three_loops_are_declined() -> None:
    x = make("four_loops", 2, 3, 8, torch.float32, "cpu")
    assert merge_loops(x.shape[:-1], [torch.empty(x.shape).stride()[:-1], x.stride()[:-1]]) is None


@hypothesis.settings(max_examples=300)
@hypothesis.given(length=st.integers(1, 200_000), across=st.booleans())
def test_tiles_are_powers_of_two_that_fit_registers(length: int, across: bool) -> None:
    tile = choose_tile(length, rows_are_neighbours=across)
    for value in (tile.rows, tile.cols, tile.num_warps):
        assert value.bit_count() == 1
    assert tile.num_warps <= 16  # 1024 threads where a warp has 64 lanes
    assert tile.rows * tile.cols <= 64 * 32 * tile.num_warps


def test_the_ladders_at_the_sizes_of_known_models() -> None:
    assert choose_tile(128, rows_are_neighbours=False) == Tile(rows=32, cols=128, num_warps=4)
    assert choose_tile(2048, rows_are_neighbours=False) == Tile(rows=1, cols=2048, num_warps=2)
    assert choose_tile(64, rows_are_neighbours=False) == Tile(rows=64, cols=64, num_warps=4)
    assert choose_tile(131072, rows_are_neighbours=False) == Tile(rows=1, cols=8192, num_warps=8)
    assert choose_tile(96, rows_are_neighbours=True) == Tile(rows=64, cols=128, num_warps=8)


def test_offsets_beyond_32_bits_survive_planning(triton: ModuleType) -> None:
    from diffkern.providers.triton.norm import _plan

    x = (2, 512), (2**31, 1)
    plan = _plan((2, 512), ((None,) * 8,), (512, 1), None, x, None, None, None)
    assert plan is not None
    assert plan.rest[:4] == (512, 2, 1, 1)
    assert plan.rest[4:13] == (512, 0, 0, 0, 0, 0, 2**31, 0, 0)
    assert plan.grid == (1,)


class _Kernel:
    """A kernel as :func:`launch` sees one: asked for a grid, it launches, and gives what was compiled for that."""

    def __init__(self) -> None:
        self.compiled: list[list[tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.compiled.append(launches := [(grid, options, *args)])
            return _Compiled(launches)

        return run


class _Compiled:
    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self._launches.append((grid, *args))


def test_a_compiled_kernel_is_called_again_with_tensors_of_its_kind_and_with_no_others(triton: ModuleType) -> None:
    from diffkern.providers.triton.launching import Plan, launch

    kernel, plan = _Kernel(), Plan((7,), (3, 0.5, True), {"num_warps": 2})
    memory = torch.zeros(64)
    aligned, other, half = memory[:8], memory[8:16], memory[:8].half()
    for tensors in ((aligned, None), (other, None), (memory[1:9], None), (half, None), (aligned, other)):
        launch(plan, kernel, tensors, torch.device("cpu"))
    first, unaligned, halves, two = kernel.compiled
    (grid, options, x, nothing, *rest), (again, *args) = first
    assert (grid, options, rest) == ((7,), {"num_warps": 2}, [3, 0.5, True]) and x is aligned and nothing is None
    assert again == (7, 1, 1) and args[0] is other and args[1:] == [None, 3, 0.5, True]
    assert [len(launches) for launches in (unaligned, halves, two)] == [1, 1, 1]
    launch(plan, kernel, (aligned, None), torch.device("meta"))
    assert len(kernel.compiled) == 5
