"""Whether Triton can run on a device, as a reason that a user can act on."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from diffkern.providers.foreign import summary

#: Oldest NVIDIA compute capability that Triton generates code for.
MINIMUM_CAPABILITY = (7, 0)


def unavailable_reason(device: torch.device) -> str | None:
    """Returns why Triton kernels cannot run on ``device`` and what to do about it, or None; never raises."""
    try:
        triton = import_module("triton")
    except ModuleNotFoundError as error:
        only = "" if device.type != "cpu" else "; on a CPU it only interprets its kernels, with TRITON_INTERPRET=1"
        return f"Triton is not installed ({error}): pip install triton (on Windows triton-windows){only}"
    except Exception as error:  # a broken installation may raise anything
        return f"importing Triton failed ({summary(error)}): reinstall the package 'triton'"
    try:
        import_module("triton.language")
        import_module("triton.runtime")
        interpreted = bool(import_module("triton.knobs").runtime.interpret)
    except Exception as error:
        place = getattr(triton, "__file__", None) or "an unknown place"
        return (
            f"the module 'triton' from {place} is not a Triton of version 3.6 or newer ({summary(error)}): "
            "rename the file if it is yours, else upgrade the package 'triton'"
        )
    if interpreted:
        return None
    if device.type == "cpu":
        return "Triton does not compile for the CPU: start with TRITON_INTERPRET=1 to interpret the kernels"
    return _driver_reason(triton, device) or _capability_reason(device)


def _driver_reason(triton: ModuleType, device: torch.device) -> str | None:
    wanted = "hip" if device.type == "cuda" and torch.version.hip else device.type
    try:
        backend = triton.runtime.driver.active.get_current_target().backend
    except Exception as error:  # no GPU, no C compiler for Triton's launcher, an unwritable cache folder ...
        return (
            f"Triton has no active GPU driver ({summary(error)}): "
            "check the GPU driver, the C compiler and Triton's cache folder"
        )
    if backend != wanted:
        return f"Triton drives {backend} here and not {wanted}: set TRITON_DEFAULT_BACKEND={wanted}"
    return None


def _capability_reason(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        capability = torch.cuda.get_device_capability(device)
    except Exception as error:
        return f"the compute capability of {device} cannot be read ({summary(error)}): check the GPU driver"
    if capability < MINIMUM_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, MINIMUM_CAPABILITY))
        return f"Triton needs compute capability {need}, {device} has {have}: use a newer GPU or the eager provider"
    return None
