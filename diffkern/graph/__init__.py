"""Whole steps as CUDA graphs: what a replay depends on, how one is captured, and when."""

from diffkern.graph.snapshot import ModuleSnapshot
from diffkern.graph.steps import MAX_GRAPHS, StepCall, StepGraphs, is_constant

__all__ = ["MAX_GRAPHS", "ModuleSnapshot", "StepCall", "StepGraphs", "is_constant"]
