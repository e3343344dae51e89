"""What every launch of a Triton kernel needs, whatever the op."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one, on which Triton launches whatever the tensors say."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    return torch.xpu.device(device) if device.type == "xpu" else contextlib.nullcontext()
