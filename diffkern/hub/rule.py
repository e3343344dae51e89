"""What a configuration says of one module: who serves it, by device and by what the model is doing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from itertools import product

import torch


class Mode(Flag):
    """What a kernel is used for; ``INFERENCE | TORCH_COMPILE`` and ``TRAINING | TORCH_COMPILE`` are modes too.

    ``TORCH_COMPILE`` alone stands for both of these.
    """

    INFERENCE = auto()
    TRAINING = auto()
    TORCH_COMPILE = auto()

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Reads ``"training"`` or ``"inference|torch_compile"``.

        Raises:
            ValueError: it is no mode.
        """
        mode = cls(0)
        for part in text.split("|"):
            try:
                mode |= cls[part.strip().upper()]
            except KeyError:
                raise ValueError(f"{text!r} is no mode: join {', '.join(MODE_NAMES)} with '|'") from None
        if cls.INFERENCE in mode and cls.TRAINING in mode:
            raise ValueError(f"{text!r} is no mode: a call is either inference or training")
        return mode

    @property
    def text(self) -> str:
        """The mode as :meth:`parse` reads it."""
        return "|".join(member.name.lower() for member in Mode if member in self and member.name)


MODE_NAMES = ("inference", "training", "torch_compile")

_COMPILED = Mode.TORCH_COMPILE
#: For each mode of a call, the modes of a rule that fit it, the best first: what trains can also infer, and what
#: compiles also runs eagerly, but not the other way round.
PREFERENCE = {
    Mode.INFERENCE: (Mode.INFERENCE, Mode.INFERENCE | _COMPILED, _COMPILED, Mode.TRAINING, Mode.TRAINING | _COMPILED),
    Mode.TRAINING: (Mode.TRAINING, Mode.TRAINING | _COMPILED),
    Mode.INFERENCE | _COMPILED: (Mode.INFERENCE | _COMPILED, _COMPILED, Mode.TRAINING | _COMPILED),
    Mode.TRAINING | _COMPILED: (Mode.TRAINING | _COMPILED, _COMPILED),
}

#: The devices that a rule can name, and the device types of torch that they are.
DEVICES = ("cuda", "rocm", "metal", "xpu", "npu", "cpu")
#: Other names that users know these devices by.
ALIASES = {"mps": "metal"}

#: A choice for every device and mode, or one for each: as :class:`diffkern.hub.config.KernelConfig` keeps it.
Value = str | Mapping[str, "Value"]

_Situation = tuple[str, bool, bool]


def device_name(device_type: str) -> str:
    """The name that rules have for torch's device type; torch calls an AMD GPU ``"cuda"`` too."""
    if device_type == "cuda" and torch.version.hip is not None:
        return "rocm"
    return ALIASES.get(device_type, device_type)


@dataclass(frozen=True)
class Rule:
    """Who serves a module: the name of a provider, a reference to a kernel, ``"auto"``, or None for none.

    Attributes:
        otherwise: The choice where ``situations`` does not say.
        situations: Choices by device type of torch, whether the module trains, and whether it is being compiled;
            for devices that no rule can name the type is ``""``. Plain values, so that ``torch.compile`` can trace
            the look-up.
    """

    otherwise: str | None = "auto"
    situations: Mapping[_Situation, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Value, mode: Mode | None = None) -> Rule:
        """The rule that a value of a configuration stands for; ``mode`` is the one to assume, None what it is."""
        if isinstance(value, str):
            return cls(value or None)
        situations: dict[_Situation, str | None] = {}
        for device, training, compiling in product((*DEVICES, ""), (False, True), (False, True)):
            present = mode or (Mode.TRAINING if training else Mode.INFERENCE)
            if mode is None and compiling:
                present |= Mode.TORCH_COMPILE
            for device_type in _types(device):
                situations[device_type, training, compiling] = _choose(value, device, present)
        return cls("auto", situations)

    def at(self, device: torch.device, training: bool) -> str | None:
        """The choice for a call on ``device`` of a module with this ``training`` flag, at this moment."""
        if not self.situations:
            return self.otherwise
        compiling = torch.compiler.is_compiling()
        kind = device.type if (device.type, training, compiling) in self.situations else ""
        return self.situations[kind, training, compiling]

    def map(self, choose: Callable[[str | None], str | None]) -> Rule:
        """The rule with every choice replaced."""
        situations = {situation: choose(choice) for situation, choice in self.situations.items()}
        return Rule(choose(self.otherwise), situations)

    def choices(self) -> tuple[str | None, ...]:
        """Every choice there is, in any situation, each once."""
        return tuple(dict.fromkeys(self.situations.values())) if self.situations else (self.otherwise,)


def _types(device: str) -> tuple[str, ...]:
    """The device types of torch that are ``device`` in this process."""
    if device == "metal":
        return ("mps",)
    if device in ("cuda", "rocm"):
        return ("cuda",) if device == device_name("cuda") else ()
    return (device,)


def _choose(value: Value, device: str, mode: Mode) -> str | None:
    if isinstance(value, str):
        return value or None
    if any(key in DEVICES for key in value):
        return _choose(value.get(device, "auto"), device, mode)
    modes = {Mode.parse(key): choice for key, choice in value.items()}
    fitting = next((modes[candidate] for candidate in PREFERENCE[mode] if candidate in modes), "auto")
    return _choose(fitting, device, mode)
