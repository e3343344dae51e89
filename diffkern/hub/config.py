"""Which provider serves which op or module, as the user says it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from diffkern.providers import OPS, ORDER

_CHOICES = ("auto", *ORDER)

#: The ops that a module can be served by. The others are functions to call; no module becomes one of them.
MODULE_OPS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class KernelConfig:
    """Rules from an op, a class name or a module path to a provider.

    A key is the name of an op (``"rms_norm"``) or of a kind of block (``"ltx_block"``), the name of a class
    (``"FP32LayerNorm"``), or a pattern on module paths with the wildcards of :mod:`fnmatch`
    (``"transformer.transformer_blocks.*.norm1"``). A value is ``"auto"``, a provider's name (``"compiled"``,
    ``"triton"``, ``"eager"``), or ``""`` or None to leave the module alone. A path wins over a class name, a class
    name over an op; of two patterns the later one. A block is left alone also if a norm inside it is.

    Args:
        rules: The rules, in order.

    Raises:
        ValueError: ``rules`` is no mapping, or a key or a value is none of those.

    Example:
        ``KernelConfig({"layer_norm": None, "vae.*": "eager"})``
    """

    rules: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise ValueError(
                f"config={self.rules!r}: pass a dict from an op, a class name or a path to a provider, "
                "such as {'rms_norm': 'eager'}, or {'*': 'eager'} for every module"
            )
        for key, value in self.rules.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"config has the key {key!r}: keys are strings, the name of an op ({' or '.join(MODULE_OPS)}), "
                    "the name of a class, or a pattern on module paths"
                )
            if value is not None and not isinstance(value, str):
                raise ValueError(f"config[{key!r}] is {value!r}: expected the name of a provider, '' or None")
            if value and value not in _CHOICES:
                close = difflib.get_close_matches(value, _CHOICES, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"config[{key!r}] is {value!r}: choose one of {', '.join(_CHOICES)}, or ''.{hint}")

    @classmethod
    def of(cls, config: KernelConfig | Mapping[str, str | None] | None) -> KernelConfig:
        """Returns ``config`` as a :class:`KernelConfig`; None has no rules."""
        if isinstance(config, KernelConfig):
            return config
        return cls() if config is None else cls(config)

    def choose(self, path: str, class_name: str, op: str) -> str | None:
        """Returns the provider for a module, ``"auto"`` if no rule speaks of it, or None to leave it alone."""
        for matches in (
            [key for key in self.rules if fnmatchcase(path, key)],
            [key for key in self.rules if key == class_name],
            [key for key in self.rules if key == op],
        ):
            if matches:
                return self.rules[matches[-1]] or None
        return "auto"

    def check(self, paths: Iterable[str], class_names: Iterable[str], block_ops: Iterable[str] = ()) -> None:
        """Makes sure that every rule speaks of something; ``block_ops`` are ops besides those of the providers.

        Raises:
            ValueError: a key is no op of a module and fits no class and no path; the message names the nearest key
                that would.
        """
        paths, class_names, known = list(paths), sorted(set(class_names)), [*MODULE_OPS, *block_ops]
        for key in self.rules:
            if key in known or key in class_names or any(fnmatchcase(path, key) for path in paths):
                continue
            if key in OPS:
                raise ValueError(
                    f"config names the op {key!r}, which no module is served by in this version: the ops of modules "
                    f"are {' and '.join(known)}"
                )
            close = difflib.get_close_matches(key, [*known, *class_names, *paths], n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"config names {key!r}, which is no op of a module and fits none of this model.{hint}")
