"""Writes docs/comfyui-models.md: the modulated norms and gated residuals of ComfyUI's models, and what fuses them.

A site is a place in a method of a module of ``comfy.ldm``: an expression, or a call of a helper that holds such an
expression (a function, a method, one nested in the method), since each call is fused by itself. Of the branches of a
helper one runs: that is one site. What a helper holds is no site where the helper stands.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from typing_extensions import override

from diffkern.rewrite.expressions import ROTATES
from diffkern.rewrite.facts import ANY_NORM, Facts, Path
from diffkern.rewrite.inline import global_at, inline_helpers
from diffkern.rewrite.plan import plan
from diffkern.rewrite.source import Source
from scripts.write_rewrite_coverage import GATED_KIND, MODULATED, candidates_in, functions, is_forward, modules

GATED = "gated residual"
#: Rules that compute modulations and gated sums; others may find a norm alone in the same place.
_RULES = frozenset({
    "norm, modulation", "residual, norm, modulation", "modulation", "norm, scale", "group norm, modulation",
    "norm, SiLU", "gated residual", "gated residual, in place", "residual, norm", "post-norm, residual",
})  # fmt: skip
_ONE_PLUS = ("1 + ", "1.0 + ", "(1 + ")
#: Variables of a helper that was put in the place of its call, but for its result.
_OF_HELPER = re.compile(r"\b_h\d+_(?!return)")
#: Attributes that decide a branch, as in the checkpoints that there are.
_CONFIGURED = {"use_adaln_single": True}

#: What looks like a site and is none: coordinates, sizes, factors of strength, activations with parameters, deviations
#: and means of latents, definitions of norms.
_NO_SITES = (
    "ace.lyric_encoder", "ace.model.ACEStepTransformer2DModel.decode", "ace.vae", "ace.ace_step15.FSQ",
    "ace.ace_step15.ResidualFSQ", "anima.lllite", "audio.autoencoder", "audio.dit.Attention", "audio.embedders",
    "audio.vae_sa3", "cascade.common.GlobalResponseNorm", "cogvideo.vae.AutoencoderKL", "cosmos.vae",
    "depth_anything_3", "flux.model", "hidream_o1", "ideogram4.model.Ideogram4Transformer._", "lightricks.model.Norm",
    "lightricks.model.LTXVModel._process_input", "lightricks.vae.causal_video", "lightricks.vocoders",
    "lumina.model.NextDiT", "minimax.audio_vae", "minimax.model.MiniMaxH3Model", "minimax_music", "mmaudio", "models",
    "modules.diffusionmodules.mmdit.MMDiT", "modules.encoders", "pixeldit.model.PixDiT", "pixeldit.pid.SigmaAware",
    "rt_detr", "sam3", "seedvr.vae.InflatedCausalConv3d", "supir.supir_modules.ZeroCrossAttn",
    "trellis2.model.Trellis2", "trellis2.vae", "triposplat.model.MultiHeadRMSNorm", "wan.model.AudioInjector",
    "wan.model_multitalk", "wan.vae",
)  # fmt: skip

#: Sites that are one kernel as they are written: pattern on the text -> what it is.
_ONE_KERNEL = {
    r"^\w+\.addcmul_\(": "`addcmul_` writes the sum in one pass, which is what the op does",
    r"rms_norm\(v?x\) \* \(1 \+ v?scale": "for training; else comfy-kitchen's `rms_adaln` does it in one pass",
}
#: Why others stay: file, class and method -> reason.
_REASONS = {
    "cosmos.predict2.Block": "a function inside of the method calls it, and attention behind it",
    "krea2.model.SingleStreamBlock": "tokens of references have a modulation of their own, in place",
    "lightricks.vae.na_diffusion_decoder": "a function that attention calls for parts of the tokens",
    "minimax.model": "a loop over parts of the tokens, each with a modulation of its own",
    "pixeldit.modules.PiTBlock": "a loop over parts of the tokens",
}


@dataclass(frozen=True)
class Place:
    """A site: kind, path from ``comfy.ldm`` on, line and column, what is written there; its rule, or why it has none.

    Attributes:
        one_kernel: Why a site without a rule has nothing to gain, or "".
    """

    kind: str
    path: str
    line: int
    column: int
    text: str
    rule: str = ""
    reason: str = ""
    one_kernel: str = ""


@dataclass(frozen=True)
class _Found:
    kind: str
    line: int
    column: int
    text: str


@dataclass(frozen=True)
class _Function:
    source: Source
    owner: type | None
    own: tuple[_Found, ...]


_Known = Mapping[FunctionType, _Function]


class _Facts(Facts):
    """Names of norms and flags as ComfyUI has them."""

    @override
    def _norm(self, path: Path) -> str:
        return super()._norm(path) or (ANY_NORM if re.search(r"norm[A-Z]?\d*$", path[-1]) else "")

    @override
    def _value(self, path: Path) -> object:
        return _CONFIGURED.get(path[-1], super()._value(path))


def survey(package: str = "comfy.ldm") -> list[Place]:
    """All sites of a package, in the order of its files."""
    known: dict[FunctionType, _Function] = {}
    for module in modules(package):
        for owner, function in (*functions(module), *_static_methods(module)):
            source = Source.of(function)
            if isinstance(source, Source) and is_forward(function.__name__):
                known[function] = _Function(source, owner, tuple(_own(source, owner)))
    helpers = {function for function, one in known.items() if one.own and _is_helper(function, one)}
    while more := {f for f, one in known.items() if f not in helpers and _is_helper(f, one) and _calls(one, helpers)}:
        helpers |= more
    places: list[Place] = []
    for function, one in known.items():
        path = f"{function.__module__}.{function.__qualname__}".removeprefix(f"{package}.")
        is_method = one.owner is not None and issubclass(one.owner, nn.Module) and function not in helpers
        if is_method and not path.startswith(_NO_SITES):
            places += _with_rules(
                path, function, one, [*one.own, *_calls(one, helpers, known), *_around(function, one)]
            )
    return places


def _static_methods(module: ModuleType) -> Iterator[tuple[type, FunctionType]]:
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield from ((value, one.__func__) for one in vars(value).values() if isinstance(one, staticmethod))


def _own(source: Source, owner: type | None) -> Iterator[_Found]:
    """The sites that stand in a function."""
    function, tree = source.function, source.tree
    if ROTATES.search(function.__name__):
        return
    found: dict[tuple[int, int], tuple[str, str]] = {}
    for place, one in candidates_in(tree, owner, function.__module__, function.__qualname__, of_comfyui=True):
        if one.kind == MODULATED:
            found.setdefault(place, (MODULATED, one.text))
        elif one.kind == GATED_KIND and one.gated:
            found[place] = GATED, one.text
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (kind := _kind_of_method(node)):
            found[node.lineno, node.col_offset] = kind, ast.unparse(node)
    for nested in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node is not tree]:
        inside = {(n.lineno, n.col_offset) for n in ast.walk(nested) if isinstance(n, ast.expr)} & found.keys()
        kinds = {found.pop(place)[0] for place in inside}
        for node in ast.walk(tree) if kinds else ():  # it is where the nested function is called
            if isinstance(node, ast.Call) and ast.unparse(node.func) == nested.name:
                found[node.lineno, node.col_offset] = min(kinds), ast.unparse(node)
    gated = [text for kind, text in found.values() if kind == GATED]
    for (line, column), (kind, text) in found.items():
        # The norm of a gated sum is part of it.
        if kind == GATED or not any(one.startswith(f"{text} + ") or one.endswith(f" + {text}") for one in gated):
            yield _Found(kind, line, column, text)


def _kind_of_method(call: ast.Call) -> str:
    """The kind of ``x.addcmul_(y, z)``, ``torch.addcmul(x, x, y)``, ``x.mul_(1 + y)``; "" for other calls."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    operands = [ast.unparse(call.func.value), *map(ast.unparse, call.args)]
    if call.func.attr == "addcmul":
        operands = operands[1:]
    if call.func.attr in ("addcmul", "addcmul_") and len(operands) == 3:
        return MODULATED if operands[0] in operands[1:] else GATED if call.func.attr == "addcmul_" else ""
    return MODULATED if call.func.attr == "mul_" and operands[-1].startswith(_ONE_PLUS) else ""


def _around(function: FunctionType, one: _Function) -> list[_Found]:
    """Sums of what a helper multiplies, which show once the helper is in its place."""
    source = Source.of(function)
    arguments = one.source.tree.args.args
    if not isinstance(source, Source) or not arguments:
        return []
    inline_helpers(source.tree, function, _Facts(arguments[0].arg, one.owner), at_calls=True)
    return [site for site in _own(source, one.owner) if not _OF_HELPER.search(site.text)]


def _is_helper(function: FunctionType, one: _Function) -> bool:
    """Whether a function does arithmetic for its callers: it calls no modules, its own or given ones."""
    parameters = [argument.arg for argument in one.source.tree.args.args]
    if one.owner is None or isinstance(inspect.getattr_static(one.owner, function.__name__, None), staticmethod):
        return True
    if function.__name__ in ("forward", "_forward", "__call__") or not parameters:
        return False
    calls = [node.func for node in ast.walk(one.source.tree) if isinstance(node, ast.Call)]
    if any(isinstance(callee, ast.Name) and callee.id in parameters for callee in calls):
        return False
    own = [one.attr for one in calls if isinstance(one, ast.Attribute) and ast.unparse(one.value) == parameters[0]]
    return all(isinstance(inspect.getattr_static(one.owner, attr, None), (FunctionType, staticmethod)) for attr in own)


def _calls(one: _Function, helpers: set[FunctionType], known: _Known | None = None) -> list[_Found]:
    """The calls of helpers in a function, with their kinds if the functions are given."""
    found = []
    for node in ast.walk(one.source.tree):
        helper = _called(one, node) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and helper in helpers:
            kind = "" if known is None else _kind(helper, helpers, known, [*map(ast.unparse, node.args)])
            found.append(_Found(kind, node.lineno, node.col_offset, ast.unparse(node)))
    return found


def _kind(helper: FunctionType, helpers: set[FunctionType], known: _Known, arguments: list[str]) -> str:
    """What a call of a helper is, which may modulate or gate by its arguments."""
    inner = _calls(known[helper], helpers - {helper}, known)
    if GATED in {site.kind for site in (*known[helper].own, *inner)}:
        return MODULATED if any(text.startswith(_ONE_PLUS) for text in arguments) else GATED
    return MODULATED


def _called(one: _Function, call: ast.Call) -> Any:
    """The function that a call runs, if that can be told."""
    name, arguments = ast.unparse(call.func), one.source.tree.args.args
    receiver, _, attr = name.rpartition(".")
    if one.owner is not None and arguments and receiver in (arguments[0].arg, one.owner.__name__):
        value = inspect.getattr_static(one.owner, attr, None)
        return getattr(value, "__func__", value)
    return global_at(one.source.function.__globals__, name)


def _with_rules(path: str, function: FunctionType, one: _Function, found: list[_Found]) -> Iterator[Place]:
    """The sites of a method, each with its rule or reason."""
    source, arguments = Source.of(function), one.source.tree.args.args
    if not found or not arguments or not isinstance(source, Source):
        return
    planned = plan(source, _Facts(arguments[0].arg, one.owner), at_calls=True)
    rules: dict[tuple[int, int], set[str]] = {}
    reasons: dict[int, str] = {}
    if not isinstance(planned, str):
        for site in planned.sites:
            for place in site.places:
                rules.setdefault(place, set()).add(site.rule.name)
        reasons = {line: reason for line, _, reason in reversed(planned.refused)}
    default = next((why for start, why in _REASONS.items() if path.startswith(start)), "no rule knows this spelling")
    for site in {(site.line, site.column): site for site in reversed(found)}.values():
        rule = min(rules.get((site.line, site.column), set()) & _RULES, default="")
        once = next((why for pattern, why in _ONE_KERNEL.items() if re.search(pattern, site.text)), "")
        reason, once = ("", "") if rule else (reasons.get(site.line, default), once)
        yield Place(site.kind, path, site.line, site.column, site.text, rule, reason, once)


def document(version: str, places: list[Place]) -> str:
    """The page, for a version of ComfyUI."""
    lines = [
        _HEAD.format(version=version),
        "| kind | sites | fused | one kernel as written | left |",
        "|---|---|---|---|---|",
    ]
    for kind, chosen in (*((k, [p for p in places if p.kind == k]) for k in (MODULATED, GATED)), ("both", places)):
        lines.append(f"| {kind} | {_counts(chosen)} |")
    lines += ["", "| rule | sites |", "|---|---|"]
    lines += [f"| {rule} | {n} |" for rule, n in Counter(p.rule for p in places if p.rule).most_common()]
    lines += ["", "| file and class | sites | fused | one kernel as written | left |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(_class_of(place) for place in places):
        lines.append(f"| `{name}` | {_counts([place for place in places if _class_of(place) == name])} |")
    lines += ["", "## Not fused", "", "| site | line | reason |", "|---|---|---|"]
    for place in sorted((p for p in places if not p.rule), key=lambda p: (not p.one_kernel, p.path, p.line)):
        text = place.text.replace("|", "\\|")[:70]
        lines.append(f"| `{_class_of(place)}`: `{text}` | {place.line} | {place.one_kernel or place.reason} |")
    return "\n".join(lines) + "\n"


def _class_of(place: Place) -> str:
    return place.path.rpartition(".")[0]


def _counts(places: list[Place]) -> str:
    fused, once = sum(bool(place.rule) for place in places), sum(bool(place.one_kernel) for place in places)
    return f"{len(places)} | {fused} | {once} | {len(places) - fused - once}"


_HEAD = """# ComfyUI's models: what the rewriter fuses

Written by `scripts/write_rewrite_coverage.py --comfyui FOLDER` from `comfy/ldm` of ComfyUI {version}. A site is a
modulated norm or a gated residual in a method, or a call of a helper that holds one. Which of the sites of a model run
fused, the proofs decide on its own modules; the report of **Optimize Model** says it.
"""
