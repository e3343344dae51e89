"""Modes of dispatch and transforms, which see the calls of ops, and nothing of a kernel that reads memory."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def transforms_active() -> bool:
    """Whether a transform of ``torch.func``, or forward-mode differentiation, sees this call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def modes_active() -> bool:
    """Whether a mode of dispatch (fake tensors, tracing, counters of operations) sees the calls of ops."""
    return torch._C._len_torch_dispatch_stack() > 0
