"""What this machine can run: the substance of ``diffkern doctor``."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diffkern.providers import OPS, ORDER, explain


@dataclass(frozen=True)
class Row:
    """One provider on one device: the ops it serves, or the reason why it serves none."""

    device: str
    provider: str
    ops: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Checkup:
    """Versions that matter, and a row for each device and provider."""

    versions: dict[str, str]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        return asdict(self)


def examine() -> Checkup:
    """Asks every provider about every device of this machine. Loads libraries, downloads nothing."""
    return Checkup(_versions(), tuple(row for device in _devices() for row in _rows(device)))


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    if torch.xpu.is_available():
        devices += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    return devices


def _rows(device: torch.device) -> list[Row]:
    label = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    refusals = {op: explain(op, device, (torch.bfloat16,)) for op in OPS}
    rows = []
    for provider in ORDER:
        served = tuple(op for op in OPS if refusals[op][provider] is None)
        reasons = dict.fromkeys(reason for op in OPS if (reason := refusals[op][provider]) is not None)
        rows.append(Row(label, provider, served, "; ".join(reasons)))
    return rows


def _versions() -> dict[str, str]:
    versions = {"diffkern": _version("diffkern"), "python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: _version(name) for name in ("triton", "diffusers", "transformers", "accelerate", "kernels")}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip:
        versions["rocm"] = torch.version.hip
    return versions


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
