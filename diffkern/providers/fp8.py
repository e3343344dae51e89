"""Where numbers of 8 bits are numbers of the hardware."""

from __future__ import annotations

import torch

#: Compute capability of the first NVIDIA GPUs that multiply e4m3: Ada, then Hopper.
CAPABILITY = (8, 9)


def fp8_unavailable_reason(device: torch.device) -> str | None:
    """Returns why the hardware of ``device`` has no numbers in e4m3 that torch multiplies, or None."""
    if device.type != "cuda" or torch.version.hip:
        return f"8 bits need an NVIDIA GPU of compute capability 8.9 or newer, and this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"8 bits need compute capability 8.9 or newer, and this GPU has {capability[0]}.{capability[1]}"
    return None
