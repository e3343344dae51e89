"""Every path through the kernels once, small: for compute-sanitizer, ``pytest -m "gpu and sanitize"``."""

from __future__ import annotations

import pytest
import torch

from tests.ops.checks import check_call
from tests.ops.layouts import make, make_parameter

pytestmark = pytest.mark.sanitize

# what it reaches: (layout, batch, rows, row length, parameter kind)
PATHS = {
    "one element": ("vector", 1, 1, 1, "plain"),
    "rows shorter than a vector": ("matrix", 1, 5, 3, "plain"),
    "many short rows per block": ("matrix", 1, 37, 40, "plain"),
    "heads inside qkv": ("heads_of_qkv", 2, 5, 128, "plain"),
    "heads first": ("heads_first", 2, 5, 64, "plain"),
    "one row per block": ("matrix", 1, 9, 3072, "plain"),
    "a tail": ("matrix", 1, 3, 2049, "plain"),
    "a misaligned base": ("offset_by_one", 1, 3, 2048, "offset"),
    "a strided row": ("every_second_column", 2, 3, 96, "strided"),
    "the longest row in registers": ("matrix", 1, 2, 16384, "plain"),
    "a row in several steps": ("matrix", 1, 2, 40001, "plain"),
    "channels in front": ("channel_first", 2, 7, 96, "plain"),
    "many channels in front": ("channel_first", 1, 5, 1100, "plain"),
    "rows of stride 0": ("expanded", 2, 5, 64, "plain"),
    "all the loops that the kernels have": ("three_loops", 2, 3, 24, "plain"),
    "one loop more": ("four_loops", 2, 3, 24, "plain"),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_kernel_path(op: str, path: str, provider: str, device: str) -> None:
    layout, batch, rows, length, kind = PATHS[path]
    for dtype, other in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)):
        x = make(layout, batch, rows, length, dtype, device)
        weight = make_parameter(kind, length, other, device)
        bias = make_parameter(kind, length, other, device, seed=2)
        check_call(op, x, weight, bias, provider=provider)
        check_call(op, x, provider=provider, memory_format=torch.preserve_format)


def test_kernel_path_of_each_rms_option(provider: str, device: str) -> None:
    x = make("matrix", 1, 5, 200, torch.bfloat16, device)
    weight, bias = (make_parameter("plain", 200, torch.bfloat16, device, seed=seed) for seed in (1, 2))
    check_call("rms_norm", x, weight, provider=provider, weight_offset=1.0)
    check_call("rms_norm", x, weight, bias, provider=provider, round_dtype=torch.bfloat16)
    check_call("rms_norm", x, weight, bias, 1e-12, provider=provider, clamp_eps=True, out_dtype=torch.float32)


@pytest.mark.parametrize("length", [2048, 3072, 4096, 5120])
@pytest.mark.parametrize("layout", ["matrix", "three_loops"])
def test_kernel_path_of_rows_that_fill_a_block(layout: str, length: int, provider: str, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = make(layout, 2, 3, length, dtype, device)
        weight, bias = (make_parameter("plain", length, dtype, device, seed=seed) for seed in (1, 2))
        check_call("rms_norm", x, weight, provider=provider)
        check_call("rms_norm", x, weight, provider=provider, round_dtype=dtype)
        check_call("layer_norm", x, weight, bias, provider=provider)
        check_call("layer_norm", x, provider=provider)
