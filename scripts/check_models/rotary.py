"""Which functions of diffusers that rotate queries and keys are fused, from the source alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

from diffkern.rewrite.facts import PRESENT, UNKNOWN, Facts, Path
from diffkern.rewrite.plan import Plan, SitePlan, plan
from diffkern.rewrite.source import Source

_ROTATES = re.compile("rotary|rope|rotate")
_NO_ROTATION = re.compile("embed$|embedder|get_|store_")

#: Why functions that rotate have no rotation that is fused, and what the proof refuses of what looks like one.
REASONS = {
    "AnimaTextConditionerAttnProcessor": "tables of the keys are unpacked between the two rotations",
    "FluxIPAdapterAttnProcessor": "a processor that is a module runs its own call",
    "WanAnimate2AttnProcessor": "it rotates each sample by the sizes of its own grid",
}


@dataclass(frozen=True)
class RotaryFunction:
    """A function that rotates queries and keys.

    Attributes:
        module: Its file.
        name: Its class.
        rules: The rules that fuse the rotation, with the norms before it and the join of streams around it.
        norms: Whether at least the norms are fused.
    """

    module: str
    name: str
    rules: tuple[str, ...]
    norms: bool

    @property
    def reason(self) -> str:
        """Why the rotation is not fused; empty if it is."""
        if self.rules and self.name not in REASONS:
            return ""
        return REASONS.get(self.name, "no rule knows this spelling")


class _Configured(Facts):
    """What the usual configuration of a class makes of its branches: norms are there, projections are not fused."""

    def __init__(self, receiver: str, cls: type, joint: bool) -> None:
        super().__init__(receiver, cls)
        self._joint = joint

    def _value(self, path: Path) -> object:
        (name, *_) = path
        if "norm" in name:
            return PRESENT
        if name.startswith("add"):
            return PRESENT if self._joint else None
        if name == "rope_type":
            return "interleaved"
        return False if name.startswith(("fused", "is_cross")) else UNKNOWN


def rotary_functions(methods: Iterable[tuple[ModuleType, type | None, FunctionType]]) -> list[RotaryFunction]:
    """Those among the methods of all classes that call what, by its name, rotates."""
    found = []
    for module, owner, function in methods:
        if owner is None or function.__name__ != "__call__" or not any(map(_ROTATES.search, _names(function.__code__))):
            continue
        source = Source.of(function)
        if isinstance(source, str) or not any(_is_rotation(node) for node in ast.walk(source.tree)):
            continue
        sites = [site for site in _sites(function, owner) if site.rule.op == "qk_norm_rope"]
        rules = {site.rule.name: None for site in sites if any("table" in name for name in site.names)}
        name = module.__name__.rpartition(".")[2]
        norms = any(site.modules for site in sites)
        found.append(RotaryFunction(name, owner.__name__, tuple(sorted(rules)), norms))
    return sorted(found, key=lambda one: (one.reason != "", one.module, one.name))


def rotary_table(functions: list[RotaryFunction]) -> str:
    """Each function in a row, those first that are fused."""
    fused = sum(not one.reason for one in functions)
    lines = [f"{fused} of {len(functions)} functions that rotate queries and keys are fused.", ""]
    lines += ["| file | class | fused | why not the rotation |", "|---|---|---|---|"]
    for one in functions:
        what = "; ".join(one.rules) if not one.reason else "query and key norm" if one.norms else "nothing"
        lines.append(f"| `{one.module}` | `{one.name}` | {what} | {one.reason} |")
    return "\n".join(lines) + "\n"


def _names(code: CodeType) -> set[str]:
    """What a function calls or reads, by name."""
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *code.co_varnames, *code.co_freevars}.union(*nested)


def _sites(function: FunctionType, owner: type) -> list[SitePlan]:
    """The sites of a processor, with the projections of a second stream and without; once if it asks for none."""
    sites: list[SitePlan] = []
    for joint in (True, False):
        source = Source.of(function)
        assert isinstance(source, Source)
        names = [argument.arg for argument in (*source.tree.args.posonlyargs, *source.tree.args.args)]
        facts = _Configured(names[1] if len(names) > 1 else "", owner, joint)
        planned = plan(source, facts)
        sites += planned.sites if isinstance(planned, Plan) else ()
        if not any(name.startswith("add") for name in facts.values):
            break
    return sites


def _is_rotation(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) + len(node.keywords) < 2:
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return bool(_ROTATES.search(name)) and not _NO_ROTATION.search(name)
