"""What ``diffkern bench ops`` times on both sides is the same computation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diffkern.bench import op_cases
from diffkern.bench.op_cases import OpCase

DRAW = torch.randn

BUILDERS: list[Callable[[], OpCase]] = [
    lambda: op_cases._rms_norm(DRAW, (2, 5, 64)),
    lambda: op_cases._layer_norm(DRAW, (2, 5, 64)),
    lambda: op_cases._norm_modulate(DRAW, (2, 5, 64), False),
    lambda: op_cases._norm_modulate(DRAW, (2, 5, 64), True),
    lambda: op_cases._gate_residual(DRAW, (2, 5, 64), True),
    lambda: op_cases._gate_residual_norm_modulate(DRAW, (2, 5, 64), False),
    lambda: op_cases._qk_norm_rope_ltx(DRAW, 2, (2, 3, 4), 4, 16),
    lambda: op_cases._qk_norm_rope_heads(DRAW, 1, 6, 4, 16, across=False),
    lambda: op_cases._qk_norm_rope_heads(DRAW, 1, 6, 4, 16, across=True),
    lambda: op_cases._joint_qk_norm_rope(DRAW, 1, (2, 4), 4, 16),
    lambda: op_cases._glu(DRAW, (2, 3, 64), "geglu"),
    lambda: op_cases._glu(DRAW, (2, 3, 64), "swiglu"),
    lambda: op_cases._gelu(DRAW, (2, 3, 64)),
    lambda: op_cases._group_norm_silu(DRAW, (1, 64, 4, 4), True),
    lambda: op_cases._group_norm_silu(DRAW, (1, 64, 3, 4, 4), False),
    lambda: op_cases._channel_rms_norm_silu(DRAW, (1, 32, 3, 4, 4), True),
    lambda: op_cases._channel_glu(DRAW, (1, 32, 4, 4)),
    lambda: op_cases._linear_attention(DRAW, (2, 9, 3, 8)),
]


@pytest.mark.parametrize("build", BUILDERS)
def test_both_sides_compute_the_same(build: Callable[[], OpCase]) -> None:
    case = build()
    ours, theirs = case.fused("eager"), case.chain(*case.inputs)
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (ours, theirs)), strict=True):
        torch.testing.assert_close(one.flatten(), other.flatten(), rtol=1e-5, atol=1e-5)
    assert case.bytes >= 2 * max(tensor.nbytes for tensor in case.inputs) * 3 // 4
