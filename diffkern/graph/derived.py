"""What diffkern itself computed ahead for a step, and a replay reads: text keys and values, fp8 weights, tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import nn

from diffkern import cache
from diffkern.blocks import fp8


def derived_state(patched: Iterable[nn.Module]) -> list[Hashable]:
    """Which derived tensors there are; equal as long as they are the same ones, from unchanged sources."""
    return [cache.generation(), *map(fp8.state_of, patched)]


def derived_tensors(modules: Iterable[nn.Module]) -> list[Any]:
    """What holds the derived tensors of some modules, to keep them alive for a graph that reads them."""
    return [entry for module in modules for entry in cache.entries_of(module)]


def check_sources(device: torch.device) -> None:
    """Has the sources of derived tensors compared, as the calls of the modules themselves would."""
    cache.start_round(device)
