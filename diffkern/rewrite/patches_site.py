"""A convolution that cuts images or videos into patches, as one product; see :mod:`~diffkern.rewrite.patches`.

cuDNN converts images to channels last for such a convolution, and its result back, which is wide; then ``flatten`` and
``transpose`` leave that in an order which the first sum or concatenation has to turn. As a product of patches its rows
are the tokens, and all that is copied are the pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import has_plain_parameters
from diffkern.rewrite.facts import child_of, takes_patches
from diffkern.rewrite.site import AllowedInStrict, FusedSite, Way


class PatchesSite(FusedSite):
    """A convolution as a product of its patches, whose result lies in channels last; else as it is written."""

    not_quick = None

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaf."""
        (x,), conv = leaves, child_of(module, self.plan.modules["patches"])
        if torch.compiler.is_compiling() or type(x) is not Tensor or conv is None:
            return self.original(module, x)
        fits = takes_patches(conv) and x.ndim == 2 + len(conv.kernel_size)  # type: ignore[arg-type]
        if not fits or not has_plain_parameters(conv, x.device, x.dtype):
            why = "its convolution has a hook, an adapter or other settings than when it was read"
            return self.run_original(module, x, reason=AllowedInStrict(f"{self}: {why}"))
        if len(x) == 1:
            # ``flatten`` gives it another stride than the results of blocks have, and the compiler would make a graph
            # of its own for it.
            return self.run_original(module, x, reason=AllowedInStrict(f"{self}: a single sample lies as in stock"))
        return super().__call__(module, x)

    @override
    def call_op(self, module: nn.Module, operands: dict[str, Any], way: Way, provider: str | None) -> Any:
        return of_patches(operands["x"], child_of(module, self.plan.modules["patches"]))


def of_patches(x: Tensor, conv: Any) -> Tensor:
    r"""Computes a convolution whose kernel is its stride, without padding, as a product.

    .. math:: y_{b d i} = \sum_{c k} w_{d c k} \, x_{b, c, i s + k} + b_d

    Args:
        x: Images ``[B, C, H, W]`` or videos ``[B, C, T, H, W]``, any strides, in the dtype of the weight.
        conv: The convolution; pixels behind the last whole patch count for nothing, as they do there.

    Returns:
        ``[B, D, ...]`` with a position for each patch, as a view of rows of ``D``. It rounds once, with the bias.
    """
    for dim, size in enumerate(conv.kernel_size):
        x = x.unfold(2 + dim, size, size)
    of_patch = len(conv.kernel_size) + 1
    patches = x.movedim(1, of_patch).flatten(of_patch)  # [B, ..., C * pixels]
    rows = F.linear(patches.flatten(0, -2), conv.weight.flatten(1), conv.bias)
    return rows.view(*patches.shape[:-1], -1).movedim(-1, 1)
