"""The numerical contract, row by row: no less accurate than the torch chain that the op stands in for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.ops.contract import table
from tests.ops import (
    reference,
    test_activation,
    test_add_norm_silu_pad,
    test_channel_glu,
    test_group_norm,
    test_group_norm_channels,
    test_linear,
    test_linear_attention,
    test_modulate_values,
)
from tests.ops.checks import check_call
from tests.ops.layouts import make, make_parameter
from tests.ops.reference import EXACT_HALF, INTERPRETED, relative_error


@dataclass(frozen=True)
class Stock:
    """A chain of torch ops as models write it, and the options under which our op takes its place.

    The value ``"x"`` of an option stands for the dtype of the input.
    """

    chain: Callable[[Tensor, Tensor], Tensor]
    eps: float = 1e-6
    options: dict[str, Any] = field(default_factory=dict)


def _rms(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


STOCK: dict[tuple[str, str], list[Stock]] = {
    ("rms_norm", "plain"): [
        Stock(lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6)),
        Stock(lambda x, w: (_rms(x) * w.float()).to(x.dtype)),
    ],
    ("rms_norm", "offset weight"): [
        Stock(lambda x, w: (_rms(x) * (1.0 + w.float())).to(x.dtype), options={"weight_offset": 1.0})
    ],
    ("rms_norm", "round_dtype"): [Stock(lambda x, w: w * _rms(x).to(x.dtype), options={"round_dtype": "x"})],
    ("rms_norm", "clamp_eps"): [
        Stock(
            lambda x, w: F.normalize(x.float(), dim=-1).to(x.dtype) * x.shape[-1] ** 0.5 * w,
            1e-12,
            {"clamp_eps": True, "round_dtype": "x"},
        )
    ],
    ("layer_norm", "plain"): [
        Stock(lambda x, w: F.layer_norm(x, x.shape[-1:], w, None, 1e-6)),
        Stock(lambda x, w: F.layer_norm(x.float(), x.shape[-1:], w.float(), None, 1e-6).to(x.dtype)),
    ],
}


#: Ops whose cases are those of a test file of their own.
CASES: dict[str, Iterable[str]] = {
    "add_norm_silu_pad": test_add_norm_silu_pad.CASES,
    "channel_glu": test_channel_glu.CASES,
    "channel_rms_norm_silu": test_group_norm_channels.CASES,
    "group_norm_silu": test_group_norm.CASES,
    "linear_attention": test_linear_attention.CASES,
    "linear_gelu": test_linear.CASES,
}
#: Rotations are compared with chains bit by bit, every test of them.
ELSEWHERE = {"rope", "rope_3d", "qk_norm_rope", "joint_qk_norm_rope"}


def test_every_row_is_tested() -> None:
    tested = {*STOCK, *test_activation.CASES, *test_modulate_values.TESTED}
    tested |= {(op, case) for op, cases in CASES.items() for case in cases}
    rows = {(row.op, row.case) for row in table() if row.op not in ELSEWHERE and not row.op.endswith("_fp8")}
    assert rows == tested


@pytest.mark.parametrize(("op", "case"), STOCK)
@pytest.mark.parametrize("length", [64, 1000] if INTERPRETED else [64, 2048, 3072])
def test_the_error_is_at_most_that_of_the_torch_chain(
    op: str, case: str, length: int, provider: str, device: str
) -> None:
    for stock in STOCK[op, case]:
        for dtype in (torch.float32, *EXACT_HALF):
            options = {name: dtype if value == "x" else value for name, value in stock.options.items()}
            x = make("matrix", 1, 64, length, dtype, device, seed=length)
            w = make_parameter("plain", length, dtype, device)
            assert w is not None
            y = check_call(op, x, w, None, stock.eps, provider=provider, **options)
            options.pop("round_dtype", None)
            truth, _ = getattr(reference, op)(x, w, None, stock.eps, **options)
            assert relative_error(y, truth) <= 1.05 * relative_error(stock.chain(x, w), truth) + 1e-6
