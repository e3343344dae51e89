"""Tensors that are computed from other tensors and kept between calls, and the one rule of how long they are valid."""

from diffkern.cache.derived import (
    DerivedCache,
    TensorFingerprint,
    caches_of,
    checks_paused,
    entries_of,
    generation,
    match_all,
    start_round,
    version,
)
from diffkern.cache.memory import UNDO, drop, forget, kept_of, memory

__all__ = [
    "UNDO",
    "DerivedCache",
    "TensorFingerprint",
    "caches_of",
    "checks_paused",
    "drop",
    "entries_of",
    "forget",
    "generation",
    "kept_of",
    "match_all",
    "memory",
    "start_round",
    "version",
]
