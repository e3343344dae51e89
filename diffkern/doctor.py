"""What this machine can run: the substance of ``diffkern doctor``."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from diffkern import __version__
from diffkern.bench.environment import version_of
from diffkern.build.installed import KERNELS_VARIABLE
from diffkern.hub.config import MEASURE_VARIABLE
from diffkern.hub.defaults import DEFAULTS
from diffkern.hub.policy import LOCK_VARIABLE, switched_off
from diffkern.hub.rule import device_name
from diffkern.platforms import platform_of
from diffkern.providers import OPS, ORDER, cublaslt, explain, get_provider, hub
from diffkern.providers.registry import ENVIRONMENT_VARIABLE
from diffkern.rewrite.rewriter import SWITCH
from diffkern.verify.choices import VARIABLE

#: What variables that are 0 switch off.
_SWITCHED_OFF = {
    SWITCH: "no forward is rewritten",
    MEASURE_VARIABLE: "nothing is timed, and what is proven runs fused whatever it gains",
    VARIABLE: "what was timed is not kept on disk",
}


@dataclass(frozen=True)
class Row:
    """One provider on one device: the ops it serves, and why not those of its other ops.

    ``reason`` is empty if it serves all that it has code for; if it serves some, every reason names its ops.
    """

    device: str
    provider: str
    ops: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Checkup:
    """Versions that matter, what the environment asks for, and a row for each device and provider.

    ``platforms`` says for each device what kind it is, and what is known of diffkern there.
    """

    versions: dict[str, str]
    settings: tuple[str, ...]
    rows: tuple[Row, ...]
    platforms: dict[str, str]


def examine() -> Checkup:
    """Asks every provider about every device of this machine. Loads libraries, downloads nothing."""
    devices = _devices()
    rows = tuple(row for device in devices for row in _rows(device))
    platforms = {_label(device): platform_of(device) for device in devices}
    standing = {label: f"{known.name}: {known.evidence}" for label, known in platforms.items()}
    return Checkup(_versions(), _settings(), rows, standing)


def _devices() -> list[torch.device]:
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    if torch.xpu.is_available():
        devices += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    return devices


def _label(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _rows(device: torch.device) -> list[Row]:
    label = _label(device)
    refusals = {op: explain(op, device, (torch.bfloat16,)) for op in OPS}
    rows = []
    for provider in ORDER:
        if provider == hub.NAME:
            rows.append(Row(label, provider, (), _of_hub(device)))
            continue
        served = tuple(op for op in OPS if refusals[op][provider] is None)
        reasons: dict[str, list[str]] = {}
        # Nothing can be done about an op that a provider has no code for, on this device or at all.
        for op, support in get_provider(provider).support.items():
            elsewhere = bool(served) and device.type not in (support.device_types or ())
            if not elsewhere and (reason := refusals[op][provider]) is not None:
                reasons.setdefault(reason, []).append(op)
        told = [f"{', '.join(ops)}: {reason}" if served else reason for reason, ops in reasons.items()]
        rows.append(Row(label, provider, served, "; ".join(told)))
    return rows


def _of_hub(device: torch.device) -> str:
    """Why the Hub serves nothing here, and what it would."""
    if (off := switched_off()) is not None:
        return off
    kernels: dict[str, list[str]] = {}
    for op, kernel in DEFAULTS.get(device_name(device.type), {}).items():
        kernels.setdefault(kernel, []).append(op)
    known = ", ".join(f"{kernel} ({', '.join(ops)})" for kernel, ops in kernels.items())
    return f"{hub.NOT_ASKED}, which takes {known or 'nothing here'}"


def _settings() -> tuple[str, ...]:
    """A sentence for every variable of the environment that changes what runs."""
    settings = []
    if provider := os.environ.get(ENVIRONMENT_VARIABLE):
        if provider == "auto":
            effect = "which is the default"
        elif provider in ORDER:
            effect = f"so every op runs on {provider}, whatever is listed here; unset it to let diffkern choose"
        else:
            effect = f"which is no provider, so every op fails: unset it, or choose one of {', '.join(ORDER)}"
        settings.append(f"{ENVIRONMENT_VARIABLE}={provider} is set, {effect}")
    if directory := os.environ.get(KERNELS_VARIABLE):
        settings.append(f"{KERNELS_VARIABLE}={directory} is set, so compiled kernels are looked for there only")
    if path := os.environ.get(LOCK_VARIABLE):
        settings.append(f"{LOCK_VARIABLE}={path} is set, so kernels of the Hub are those that it pins")
    for variable, effect in _SWITCHED_OFF.items():
        if os.environ.get(variable) == "0":
            settings.append(f"{variable}=0 is set, so {effect}")
    return tuple(settings)


def _versions() -> dict[str, str]:
    versions = {"diffkern": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "diffusers", "transformers", "accelerate", "kernels"):
        versions[name] = version_of(name) or "not installed"
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        library = cublaslt.find()
        versions["cublasLt"] = f"not used: {library}" if isinstance(library, str) else "found"
    if torch.version.hip:
        versions["rocm"] = torch.version.hip
    return versions
