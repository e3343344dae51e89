"""Where a measurement was made: card, driver-side versions, and the versions of everything involved."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

from diffkern import __version__

_DISTRIBUTIONS = ("diffkern", "torch", "triton", "diffusers", "transformers", "accelerate", "kernels")


def describe_device(device: torch.device) -> str:
    """The name a person would give the device: the card's, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU, {_processor()}, {torch.get_num_threads()} threads"
    return device.type


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Card, platform and versions, as plain data for a JSON file."""
    description: dict[str, Any] = {
        "device": describe_device(device),
        "device_type": device.type,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description["capability"] = f"{properties.major}.{properties.minor}"
        description["device_memory_bytes"] = properties.total_memory
    return description


def dtype_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The keyword argument of ``from_pretrained`` for the dtype of weights: diffusers 0.42 renamed it."""
    major, minor = metadata.version("diffusers").split(".")[:2]
    return {"dtype" if (int(major), int(minor)) >= (0, 42) else "torch_dtype": dtype}


def version_of(distribution: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    if distribution == "torch":  # with its build tag, which the metadata may lack
        return str(torch.__version__)
    if distribution == "diffkern":  # also in a checkout that is not installed
        return __version__
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
