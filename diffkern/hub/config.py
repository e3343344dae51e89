"""Which provider or kernel of the Hub serves which op or module, as the user says it."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from diffkern.hub.reference import KernelReference, is_reference, is_repository
from diffkern.hub.rule import ALIASES, DEVICES, MODE_NAMES, PREFERENCE, Mode, Rule, Value
from diffkern.providers import OPS, ORDER

__all__ = ["MODULE_OPS", "KernelConfig", "Mode"]

_CHOICES = ("auto", *ORDER)

#: The ops that a module can be served by. The others are functions to call; no module becomes one of them.
MODULE_OPS = ("layer_norm", "rms_norm")

#: Set to 0 it turns off what :attr:`KernelConfig.measure` does, where that is None.
MEASURE_VARIABLE = "DIFFKERN_MEASURE"

#: What the Hub may be asked for besides kernels that a rule names.
HUB_CHOICES = ("off", "auto")
FP8_WEIGHTS = ("keep", "replace")


@dataclass(frozen=True)
class KernelConfig:
    """Rules from an op, a layer, a class or a module path to a provider or a kernel of the Hub.

    A key is one of these; where several speak of a module, the first kind wins, and of two of a kind the later one:

    * a pattern on module paths with the wildcards of :mod:`fnmatch` (``"transformer.transformer_blocks.*.norm1"``);
    * the name of a class (``"FP32LayerNorm"``);
    * the name that transformers has for a layer (``"RMSNorm"``, for the RMS norm of any of its models);
    * the name of an op (``"rms_norm"``) or of a kind of module (``"caption"``).

    A value is one of these:

    * ``"auto"``, or a provider: ``"compiled"``, ``"triton"``, ``"hub"`` (the kernel that diffkern knows for the op
      and the device), ``"eager"``;
    * a kernel: ``"org/repo:Layer"``, ``"org/repo@v1.2.0:Layer"``, ``"org/repo@>=1.0,<2.0:Layer"``,
      ``"/a/path:Layer"``; without ``:Layer`` whatever of it serves the op;
    * ``""`` or None to leave the module alone;
    * a dict from devices (``"cuda"``, ``"rocm"``, ``"metal"`` or ``"mps"``, ``"xpu"``, ``"npu"``, ``"cpu"``) or
      modes (:class:`Mode`, or its name: ``"inference"``, ``"training"``, ``"torch_compile"``) to such values, or
      from one of these to a dict of the other. What it does not name is ``"auto"``.

    A kernel that cannot be had gives its reason, and the next provider serves. A block is left alone also if a norm
    inside it is.

    Args:
        rules: The rules, in order.
        hub: ``"auto"`` asks the Hub where neither compiled nor Triton kernels serve; ``"off"`` asks it only for
            kernels that a rule names.
        mode: The mode to choose for; None means the one the module is in at each call.
        trust_remote_code: Whether kernels of publishers that the Hub does not list as trusted may run: True for all,
            or the repositories that may.
        lock: The lock file to take commits and digests from; None means ``DIFFKERN_LOCK`` or, if there is one,
            ``diffkern.lock`` in the working directory.
        measure: Whether times are measured, and decide; None means so unless ``DIFFKERN_MEASURE=0`` is set.
        fp8_include: With ``numerics="fp8"``, patterns on the paths of linear layers to compute in fp8 that would be
            left alone for their size, their name or their place.
        fp8_exclude: Patterns on the paths of linear layers to leave in their dtype, also where ``fp8_include`` fits.
        fp8_weights: With ``numerics="fp8"``, ``"keep"`` leaves the weights beside their copies in fp8; ``"replace"``
            moves them to the memory of the host, so that those of the GPU halve (see ``docs/fp8.md``).

    Raises:
        ValueError: a key or a value is none of those; the message names the nearest that is.

    Example:
        ``KernelConfig({"layer_norm": None, "vae.*": "eager", "rms_norm": {"metal": "kernels-community/mlx-rmsnorm"}})``
    """

    rules: Mapping[str, Any] = field(default_factory=dict)
    hub: str = "off"
    mode: Mode | None = None
    trust_remote_code: bool | tuple[str, ...] = False
    lock: str | None = None
    measure: bool | None = None
    fp8_include: tuple[str, ...] = ()
    fp8_exclude: tuple[str, ...] = ()
    fp8_weights: str = "keep"

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise ValueError(
                f"config={self.rules!r}: pass a dict from an op, a class name or a path to a provider, "
                "such as {'rms_norm': 'eager'}, or {'*': 'eager'} for every module; KernelConfig.from_file reads a file"
            )
        put = partial(object.__setattr__, self)
        put(
            "rules",
            {_checked_key(key): _normalised(value, f"config[{key!r}]") for key, value in self.rules.items()},
        )
        for name, choices in (("hub", HUB_CHOICES), ("fp8_weights", FP8_WEIGHTS)):
            chosen = getattr(self, name)
            if chosen not in choices:
                known = " or ".join(map(repr, choices))
                raise ValueError(f"{name}={chosen!r}: choose {known}.{_nearest(chosen, choices)}")
        if self.mode is not None:
            mode = Mode.parse(self.mode) if isinstance(self.mode, str) else self.mode
            if not isinstance(mode, Mode):
                raise ValueError(f"mode={mode!r}: pass a Mode, or its name: {', '.join(MODE_NAMES)}")
            put("mode", _complete(mode))
        trust = self.trust_remote_code
        if isinstance(trust, Iterable) and not isinstance(trust, str):
            put("trust_remote_code", tuple(map(_check_repository, trust)))
        elif not isinstance(trust, bool):
            raise ValueError(f"trust_remote_code={trust!r}: pass True, False, or a list of repositories")
        if self.lock is not None:
            put("lock", str(self.lock))
        if self.measure is not None and not isinstance(self.measure, bool):
            raise ValueError(f"measure={self.measure!r}: pass True, False, or None")
        for name in ("fp8_include", "fp8_exclude"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(f"{name}={patterns!r}: pass a list of patterns on the paths of linear layers")
            put(name, tuple(patterns))

    @property
    def measures(self) -> bool:
        """Whether times are measured, and decide."""
        return os.environ.get(MEASURE_VARIABLE, "1") != "0" if self.measure is None else self.measure

    @classmethod
    def of(cls, config: KernelConfig | Mapping[str, Any] | None) -> KernelConfig:
        """Returns ``config`` as a :class:`KernelConfig`; None has no rules."""
        if isinstance(config, KernelConfig):
            return config
        return cls() if config is None else cls(config)

    # --- what it says of a module ----------------------------------------------------------------------------

    def rule(self, path: str, class_name: str, op: str, layer_name: str = "") -> Rule | None:
        """Returns what the rules say of a module; None if none speaks of it."""
        key = self._key(path, class_name, op, layer_name)
        return None if key is None else Rule.of(self.rules[key], self.mode)

    def references(self) -> tuple[KernelReference, ...]:
        """Every kernel that a rule names, each once."""
        found: dict[KernelReference, None] = {}
        for value in self.rules.values():
            found |= dict.fromkeys(KernelReference.parse(text) for text in _leaves(value) if is_reference(text))
        return tuple(found)

    def check(
        self,
        paths: Iterable[str],
        class_names: Iterable[str],
        block_ops: Iterable[str] = (),
        layer_names: Iterable[str] = (),
    ) -> None:
        """Makes sure that every rule speaks of something; ``block_ops`` are ops besides those of the providers.

        Raises:
            ValueError: a key is no op of a module and fits no class, no layer and no path; the message names the
                nearest key that would.
        """
        paths, class_names, known = list(paths), sorted(set(class_names)), [*MODULE_OPS, *block_ops]
        layers = sorted(set(layer_names))
        for key in self.rules:
            if key in known or key in class_names or key in layers or any(fnmatchcase(path, key) for path in paths):
                continue
            if key in OPS:
                raise ValueError(
                    f"config names the op {key!r}, which no module is served by in this version: the ops of modules "
                    f"are {' and '.join(known)}"
                )
            hint = _nearest(key, [*known, *class_names, *layers, *paths], cutoff=0.5)
            raise ValueError(f"config names {key!r}, which is no op of a module and fits none of this model.{hint}")

    def refuse_fp8(self, ops: Iterable[str], numerics: str) -> None:
        """Refuses what speaks of fp8 where nothing is computed in it.

        Raises:
            ValueError: a rule names one of ``ops``, layers are included or excluded, or weights to be replaced.
        """
        named = [op for op in ops if op in self.rules]
        named += [name for name in ("fp8_include", "fp8_exclude") if getattr(self, name)]
        named += ["fp8_weights"] if self.fp8_weights != "keep" else []
        if named:
            raise ValueError(f"config names {named[0]}, and numerics={numerics!r} computes nothing in fp8: pass 'fp8'")

    def _key(self, path: str, class_name: str, op: str, layer_name: str) -> str | None:
        for matches in (
            [key for key in self.rules if fnmatchcase(path, key)],
            [key for key in self.rules if key == class_name],
            [key for key in self.rules if layer_name and key == layer_name],
            [key for key in self.rules if key == op],
        ):
            if matches:
                return matches[-1]
        return None

    # --- to files and back -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns everything that differs from the defaults as plain data."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        data = {name: _plain(value) for name, (value, default) in values.items() if value != default}
        return {**data, "rules": _plain(self.rules)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelConfig:
        """Reads what :meth:`to_dict` returns.

        Raises:
            ValueError: a key is unknown, or as in the constructor.
        """
        known = tuple(cls.__dataclass_fields__)
        if not isinstance(data, Mapping):
            raise ValueError(f"{data!r} is no configuration: that is a table of {', '.join(known)}")
        for key in data:
            if key not in known:
                raise ValueError(f"{key!r} is no part of a configuration: {', '.join(known)}.{_nearest(key, known)}")
        return cls(**data)

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the configuration as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> KernelConfig:
        """Reads JSON text."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_file(cls, path: str | Path) -> KernelConfig:
        """Reads a file, as TOML if its name ends so, as JSON otherwise.

        Before Python 3.11 TOML needs the package ``tomli``, which ``kernels`` brings along.

        Raises:
            ValueError: there is no configuration in it; the message names the file.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            if not str(path).endswith(".toml"):
                return cls.from_json(text)
            return cls.from_dict(import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _normalised(value: Any, where: str, above: frozenset[str] = frozenset()) -> Value:
    """A value of a configuration with strings for keys, ``""`` for None, and ``"metal"`` for ``"mps"``.

    A message calls it ``where``; ``above`` says what the keys of the dicts around it are: devices, modes.
    """
    if value is None or value == "":
        return ""
    if isinstance(value, Mapping):
        keys = {key: _situation(key, where) for key in value}
        twice = [name for name, count in Counter(keys.values()).items() if count > 1]
        if twice:
            same = " and ".join(repr(key) for key, name in keys.items() if name == twice[0])
            raise ValueError(f"{where} says {twice[0]!r} twice, by the keys {same}: keep one of them")
        kinds = {"a device" if name in DEVICES else "a mode" for name in keys.values()}
        if len(kinds) != 1 or kinds & above or not value:
            raise ValueError(
                f"{where} is {value!r}: a dict goes from devices to choices, from modes to choices, or from one of "
                "these to a dict of the other"
            )
        return {keys[key]: _normalised(choice, f"{where}[{key!r}]", above | kinds) for key, choice in value.items()}
    if isinstance(value, tuple):
        raise ValueError(f"{where} is {value!r}: write the version into the string, as in 'org/repo@v2:Layer'")
    if not isinstance(value, str):
        raise ValueError(f"{where} is {value!r}: expected the name of a provider, a kernel, '' or None")
    if is_reference(value):
        try:
            return str(KernelReference.parse(value))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if value not in _CHOICES:
        raise ValueError(
            f"{where} is {value!r}: choose one of {', '.join(_CHOICES)}, a kernel such as 'org/repo:Layer', or ''."
            f"{_nearest(value, _CHOICES)}"
        )
    return value


def _situation(key: Any, where: str) -> str:
    """A key of a dict that is a value: the name of a device or of a mode."""
    if isinstance(key, (Mode, str)):
        text = key.text if isinstance(key, Mode) else key.lower()
        name = ALIASES.get(text, text)
        if name in DEVICES:
            return name
        if all(part.strip() in MODE_NAMES for part in name.split("|")):
            try:
                return Mode.parse(name).text
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    names = (*DEVICES, *ALIASES, *MODE_NAMES)
    raise ValueError(
        f"{where} has the key {key!r}, which is no device and no mode: {', '.join(names)}.{_nearest(str(key), names)}"
    )


def _checked_key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(
            f"config has the key {key!r}: keys are strings, the name of an op ({' or '.join(MODULE_OPS)}), "
            "the name of a class, or a pattern on module paths"
        )
    return key


def _check_repository(repository: Any) -> str:
    if not isinstance(repository, str) or not is_repository(repository):
        raise ValueError(f"trust_remote_code names {repository!r}: name repositories, 'org/repo', without a revision")
    return repository


def _complete(mode: Mode) -> Mode:
    """The mode of a call: one that says neither inference nor training is inference."""
    complete = mode if mode & (Mode.INFERENCE | Mode.TRAINING) else mode | Mode.INFERENCE
    if complete not in PREFERENCE:
        raise ValueError(f"mode={mode!r}: a call is either inference or training")
    return complete


def _leaves(value: Value) -> list[str]:
    return [value] if isinstance(value, str) else [leaf for choice in value.values() for leaf in _leaves(choice)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value.text if isinstance(value, Mode) else value


def _nearest(word: Any, words: Sequence[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=cutoff) if isinstance(word, str) else ()
    return f" Did you mean {close[0]!r}?" if close else ""
