"""Every path through the modulation kernels once, small: for compute-sanitizer, ``pytest -m "gpu and sanitize"``."""

from __future__ import annotations

import pytest
import torch

from diffkern.ops import gate_residual, gate_residual_norm_modulate, norm_modulate
from tests.ops import modulation, reference
from tests.ops.layouts import make, make_parameter
from tests.ops.modulation import make_modulation

pytestmark = pytest.mark.sanitize

# what it reaches: (layout, batch, rows, row length, kind of modulation)
PATHS = {
    "one element": ("matrix", 1, 1, 1, "row"),
    "rows shorter than a vector": ("contiguous", 2, 5, 3, "sample"),
    "several rows per block": ("contiguous", 2, 37, 40, "sample"),
    "the widest row of one packet a lane": ("contiguous", 2, 5, 256, "full"),
    "a row per block": ("contiguous", 2, 5, 264, "sample"),
    "a row per block, one row per token": ("contiguous", 2, 3, 2048, "token_unbind"),
    "three packets a thread": ("contiguous", 2, 3, 3072, "sample_chunk"),
    "the longest row in registers": ("matrix", 1, 2, 10752, "row"),
    "a row beyond registers": ("matrix", 1, 2, 10760, "row"),
    "a tail": ("contiguous", 2, 3, 2049, "sample"),
    "a misaligned input": ("offset_by_one", 2, 3, 2048, "sample"),
    "a misaligned modulation": ("contiguous", 2, 3, 2048, "offset"),
    "a modulation of every second element": ("contiguous", 2, 3, 2048, "every_second"),
    "one number per row": ("contiguous", 2, 3, 2048, "column"),
    "rows across memory": ("transposed", 2, 7, 96, "sample"),
    "rows of stride 0": ("expanded", 2, 5, 512, "sample"),
    "three loops": ("three_loops", 2, 3, 64, "group"),
    "four loops": ("four_loops", 2, 3, 64, "group"),
}


@pytest.mark.parametrize("path", PATHS)
def test_kernel_path(path: str, provider: str, device: str) -> None:
    layout, batch, rows, length, kind = PATHS[path]
    half, single = torch.float16, torch.float32
    for dtype, other in ((half, half), (torch.bfloat16, single), (single, single), (half, torch.bfloat16)):
        x, residual = (make(layout, batch, rows, length, dtype, device, seed=seed) for seed in (1, 2))
        gate, scale, shift = (make_modulation(kind, x.shape, other, device, seed=seed) for seed in (3, 4, 5))
        weight = make_parameter("plain", length, other, device, seed=6)
        for norm in ("rms", "layer"):
            options = {"norm": norm, "out_dtype": dtype}
            y = norm_modulate(x, scale, shift, weight, weight, provider=provider, **options)
            reference.assert_within(y, modulation.norm_modulate(x, scale, shift, weight, weight, **options))
        new, y = gate_residual_norm_modulate(
            residual, x, gate, scale, shift, provider=provider, residual_dtype=dtype, out_dtype=dtype
        )
        reference.assert_within(new, modulation.gate_residual(residual, x, gate, out_dtype=dtype))
        reference.assert_within(y, modulation.norm_modulate(new, scale, shift, out_dtype=dtype))
        for options in ({"rounding": "each"}, {"gate_activation": "tanh"}, {"gate_activation": "sigmoid"}):
            y = gate_residual(residual, x, gate, provider=provider, **options)
            reference.assert_within(y, modulation.gate_residual(residual, x, gate, **options))


def test_kernel_path_of_more_loops_than_the_kernels_have(provider: str, device: str) -> None:
    x = torch.randn(3, 3, 3, 3, 3, 24, device=device)[:2, :2, :2, :2, :2]
    scale = torch.randn(2, 1, 2, 1, 2, 24, device=device)
    new, y = gate_residual_norm_modulate(x, x, scale, scale, scale, provider=provider)
    reference.assert_within(new, modulation.gate_residual(x, x, scale))
    reference.assert_within(y, modulation.norm_modulate(new, scale, scale))
