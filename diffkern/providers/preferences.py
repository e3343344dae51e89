"""Where a provider is asked before those that stand in front of it, because it was measured to be faster.

The order of :mod:`diffkern.providers.registry` holds wherever this table has no entry. An entry names the benchmark
that speaks for it, and stands in reports and in ``diffkern doctor``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Preference:
    """One provider before the others, for one op on one kind of device.

    Attributes:
        op: Name of the op.
        provider: Who is asked first.
        device_type: Type of the device, ``"cuda"`` also for ROCm.
        figures: What was measured, on which card, and where the results lie.
        capability: Compute capability of the NVIDIA GPUs it was measured on and holds for; None for all devices of
            the type.
    """

    op: str
    provider: str
    device_type: str
    figures: str
    capability: tuple[int, int] | None = None

    def holds(self, op: str, device: torch.device) -> bool:
        """Whether it is about ``op`` on ``device``."""
        if op != self.op or device.type != self.device_type:
            return False
        if self.capability is None:
            return True
        return torch.version.hip is None and torch.cuda.get_device_capability(device) == self.capability

    def __str__(self) -> str:
        return f"{self.provider} first for {self.op}: {self.figures}"


#: What was measured. It is empty as long as the compiled kernels are the fastest everywhere.
PREFERENCES: tuple[Preference, ...] = ()


def preference(op: str, device: torch.device) -> Preference | None:
    """Returns the first entry of the table about ``op`` on ``device``, or None."""
    return next((entry for entry in PREFERENCES if entry.holds(op, device)), None)
