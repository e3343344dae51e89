"""``torch.cat([front, gelu(layer(x))], -1)``: in the memory of one result, or in rows of fp8 for a layer that reads it.

Single-stream blocks have attention and feed-forward side by side, and one layer reads both. Where that layer and the
one before the GELU are in fp8, the GELU, the concatenation and the rounding to fp8 are one pass, and nothing is written
in another dtype. That the layer is the only reader, the source says; see :func:`diffkern.rewrite.plan.plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern import ops
from diffkern.blocks.fp8 import RowwiseFp8, takes_rows, was_asked, weight_of
from diffkern.ops.linear import concatenate
from diffkern.rewrite.facts import child_of
from diffkern.rewrite.site import AllowedInStrict, FusedSite


class _Unactivated(NamedTuple):
    """What the layer before a GELU returned, on its way to :func:`join`."""

    values: Tensor


class _Both(NamedTuple):
    """What a layer reads that is not known to compute in fp8: its input, and that in rows of fp8."""

    values: Tensor
    rows: RowwiseFp8


class SingleStreamSite(FusedSite):
    """The GELU of a layer in fp8, whose result is concatenated behind something and read by another layer in fp8."""

    calls_layer = True

    not_quick = None

    @override
    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        x, reader = self._operands(module, *leaves)["x"], child_of(module, self.plan.read_by)
        if torch.compiler.is_compiling():
            return self.original(module, *leaves)
        if torch.is_grad_enabled() or x.ndim != 3 or takes_rows(reader, x) is False:
            why = "its reader takes no rows of fp8, or gradients are wanted"
            return self.run_original(module, *leaves, reason=AllowedInStrict(f"{self}: {why}"))
        self.count_fused(module)
        layer: Any = child_of(module, self.plan.modules["linear"])
        return _Unactivated(layer(x))


def join(
    site: Callable[..., Any], front: Tensor, x: Tensor | _Unactivated, dim: int, reader: Any = None
) -> Tensor | RowwiseFp8 | _Both:
    """``torch.cat([front, x], dim)`` of the result of a site, which has room for it the next time.

    Args:
        site: The site, or what runs in its place.
        front: What comes first.
        x: The result.
        dim: The dimension.
        reader: The layer that alone reads this, by :func:`read`; None if it has other readers.
    """
    if isinstance(x, _Unactivated):
        y, rows = x.values, None
        wide = front.shape[-1] + y.shape[-1] == reader.in_features
        if type(front) is Tensor and wide and front.dtype is y.dtype and front.shape[:-1] == y.shape[:-1]:
            rows = RowwiseFp8(*ops.activation_fp8(y, "gelu_tanh", front=front))
            if takes_rows(reader, y):
                return rows
        joined = torch.cat([front, F.gelu(y, approximate="tanh")], dim)
        return joined if rows is None else _Both(joined, rows)
    if isinstance(site, FusedSite) and not site.calls_layer and not torch.compiler.is_compiling():
        site.room = front.shape[-1]
    return concatenate(front, x, dim)


def read(layer: nn.Module, x: Tensor | RowwiseFp8 | _Both) -> Tensor:
    """Calls a layer with what :func:`join` returned.

    At its first call of a size the layer itself says whether it computes in fp8; if it does, that call has the bits of
    those that follow.
    """
    if isinstance(x, _Both):
        y: Tensor = layer(x.values)
        was_asked(layer, x.values)
        if not takes_rows(layer, x.values):
            return y
        x = x.rows
    if isinstance(x, RowwiseFp8):
        return weight_of(layer, x.values.device).run(layer, x)
    return layer(x)  # type: ignore[no-any-return]
