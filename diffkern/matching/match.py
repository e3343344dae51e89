"""Which modules are norms, and what each of them computes."""

from __future__ import annotations

import torch
from torch import nn

from diffkern.matching.genuine import replacement
from diffkern.matching.probe import PARAMETERS, is_empty, probe
from diffkern.matching.probe_eligibility import unprobeable_reason
from diffkern.matching.semantics import LeftAlone, Match, NormSemantics
from diffkern.matching.tables import TABLE

_SCALES = ("weight", "gamma", "scale")


def full_name(cls: type) -> str:
    """Returns the name under which the tables know a class: its module and qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def match(module: nn.Module) -> Match | None:
    """Says what a module computes if it is, or looks like, a norm.

    The tables are asked by exact class, never by part of the name and never by base class: classes of one
    name differ in rounding, dimension, eps and offset, and a subclass exists because it differs. A class
    they do not know is compared with the candidates on random input, see :func:`probe`, if its forward is a
    straight line of operations, see :mod:`diffkern.matching.probe_eligibility`.

    Only the class is judged. Whether the instance has hooks or a replaced forward is for the caller to see. None is
    returned for a module that has nothing to do with norms.
    """
    cls = type(module)
    entry = TABLE.get(full_name(cls))
    if entry is not None:
        if isinstance(entry, LeftAlone):
            return Match(None, "table", entry.reason)
        if (replaced := replacement(cls)) is not None:
            return Match(None, "table", f"the forward of its class was replaced by {replaced}")
        return Match(entry, "table")
    # A scripted module has no Python forward to replace, whatever it was scripted from.
    if isinstance(module, torch.jit.ScriptModule) or not _looks_like_norm(module):
        return None
    if any(base.__qualname__ == "FSDPModule" and base.__module__.startswith("torch.") for base in cls.__mro__):
        return Match(None, None, "sharded by FSDP, which gathers its parameters around its own forward")
    if next(module.children(), None) is not None:
        known = next((base for base in cls.__mro__ if isinstance(TABLE.get(full_name(base)), NormSemantics)), None)
        if known is None:
            return None
        return Match(None, None, f"a {known.__qualname__} with modules inside, for example a parametrization")
    reason = unprobeable_reason(cls, set(module._parameters) | {n for n in PARAMETERS if is_empty(module, n)})
    if reason is not None:
        return Match(None, None, f"not in the tables, and not probed: {reason}")
    return probe(module)


def _looks_like_norm(module: nn.Module) -> bool:
    """Whether the class is named like a norm, or has a norm's one scale vector and an eps."""
    if "norm" in type(module).__qualname__.lower():
        return True
    scale = next((p for name in _SCALES if (p := module._parameters.get(name)) is not None), None)
    return scale is not None and scale.ndim == 1 and any("eps" in name for name in vars(module))
