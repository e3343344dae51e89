"""Writes docs/models.md: which expressions of diffusers' models look like glue, and which of them rules fuse.

python scripts/write_rewrite_coverage.py [--comfyui FOLDER]

Reads the source alone; no model is built. With ``--comfyui`` it reads the models of a checkout of ComfyUI, and writes
docs/comfyui-models.md instead.

A candidate is what looks like glue to a scan that is looser than the rules: it goes through any definition that reaches
a name, whatever else uses it, and asks nothing about order, branches and aliases. So what a rule misses shows.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diffkern.rewrite.expressions import ANY_ACTIVATION, is_addcmul, is_number
from diffkern.rewrite.facts import Facts
from diffkern.rewrite.flow import Definition, Flow
from diffkern.rewrite.match import (
    Activated,
    AddedInPlace,
    Either,
    Kept,
    Leaf,
    Match,
    Norm,
    OnePlus,
    Product,
    Scope,
    Shape,
    Sum,
)
from diffkern.rewrite.plan import Plan, plan
from diffkern.rewrite.source import Source
from scripts.check_models.rotary import rotary_functions, rotary_table

_GATES = frozenset({"tanh", "sigmoid"})
_GLU = frozenset({"silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid"})
_GATE = Either((Activated("gate", _GATES), Leaf("gate")))
_GATED = Sum(Leaf("residual"), Product(_GATE, Leaf("x")))
_POST_NORM = Sum(Leaf("residual"), Norm(Leaf("x"), "post_norm"))
_RESIDUAL = Either((_GATED, Sum(Leaf("residual"), Leaf("x"))))
_SCALED = Either((Product(Leaf("x"), OnePlus("scale")), Product(Norm(Leaf("x")), Leaf("scale"))))


def _modulated_norm() -> Shape:
    product = Product(Norm(Leaf("x")), OnePlus("scale"))
    return Either((Sum(product, Leaf("shift")), product))


MODULATED, GATED_KIND = "norm + modulate", "gated and post-norm residual"
#: What is counted: name -> shape of the node that stands for the candidate.
KINDS: dict[str, Shape] = {
    MODULATED: _SCALED,
    "residual -> norm + modulate": Product(Norm(Kept(_RESIDUAL)), Leaf("scale")),
    GATED_KIND: Either((_GATED, _POST_NORM)),
    "gated linear unit": Product(Activated("gate", _GLU), Leaf("value")),
    "norm, SiLU": Activated("norm", frozenset({"silu"}), Either((_modulated_norm(), Norm(Leaf("x"))))),
}
#: The same for models that add in place.
_KINDS_OF_COMFYUI = {
    **KINDS,
    GATED_KIND: Either((_GATED, _POST_NORM, AddedInPlace(Product(_GATE, Leaf("x"))))),
}
#: The methods of diffusers' models that are rewritten.
_CALLED = frozenset({"forward", "__call__"})
_ROOT = Path(__file__).resolve().parents[1]
_RELEASES = _ROOT / "benchmarks" / "diffusers_releases.json"
#: Packages whose other modulations are not those of a transformer: spatial norms, resnets.
_CONVOLUTIONAL = (".autoencoders.", ".unets.", ".resnet", ".upsampling", ".downsampling", ".adapter", ".vq_model")


_NUMBER_NAME = re.compile(
    r"(_len|_tokens|_patches|_frames|_size|_start|_idx|_height|_width|offset|_std|_mean|eps|scale_factor|lora_scale"
    r"|grid_(start|end)_mel|rescale|depth|hw|ratio|\b[ijk])(\.to\(\w+\))?$|torch\.rand|math\."
)


@dataclass(frozen=True)
class Candidate:
    """One expression that looks like glue.

    Attributes:
        kind: One of :data:`KINDS`.
        module: The file, as a module name.
        function: The qualified name of the function that it stands in.
        line: Its line.
        text: The expression.
        rule: The rule that covers it, or None.
        reason: Why none does.
        gated: Whether it has a gate.
    """

    kind: str
    module: str
    function: str
    line: int
    text: str
    rule: str | None = None
    reason: str = ""
    gated: bool = False


class _LooseFlow(Flow):
    """Goes through any definition of a name."""

    def single(self, name: ast.expr) -> Definition | None:
        if not isinstance(name, ast.Name):
            return None
        reaching = [one for one in self.definitions.get(name, frozenset()) if one.value is not None]
        return min(reaching, key=lambda one: one.value.lineno) if reaching else None  # type: ignore[union-attr]


def survey(package: str = "diffusers.models") -> list[Candidate]:
    """Returns all candidates in a package, each with the rule that covers it or the reason why none does.

    In convolutional files the norms with SiLU are the candidates. A method is planned if it holds one, or calls, by its
    name, what holds one: such a helper may be inlined.

    Args:
        package: The name of the package.
    """
    found: dict[tuple[str, str, int, int], Candidate] = {}
    covered: dict[tuple[str, int, int], str] = {}
    reasons: dict[tuple[str, int], str] = {}
    for module in modules(package):
        read = [(owner, Source.of(function)) for owner, function in functions(module)]
        sources = [(owner, source) for owner, source in read if isinstance(source, Source)]
        holding = set()
        for owner, source in sources:
            if is_forward(source.function.__name__):
                name = source.function.__qualname__
                for key, candidate in candidates_in(source.tree, owner, module.__name__, name):
                    if _is_counted(candidate):
                        found.setdefault((candidate.kind, candidate.module, *key), candidate)
                        holding.add(source.function)
        for owner, source in sources:
            if owner is None or source.function.__name__ not in _CALLED:
                continue
            if not _reaches(source.function, holding, [one.function for _, one in sources]):
                continue
            planned = _plan(source, owner)
            if isinstance(planned, str):
                continue
            for site in planned.sites:
                for place in site.places:
                    covered.setdefault((module.__name__, *place), site.rule.name)
            for line, _, reason in planned.refused:
                reasons.setdefault((module.__name__, line), reason)
    return [
        replace(
            candidate,
            rule=covered.get((name, line, column)),
            reason=reasons.get((name, line), "no rule knows this spelling, or nothing calls it"),
        )
        for (_, name, line, column), candidate in found.items()
    ]


def _reaches(function: FunctionType, holding: set[FunctionType], others: list[FunctionType]) -> bool:
    """Whether a function is one of some, or calls one of them, be it through others."""
    reached = [function]
    for one in reached:  # which grows meanwhile
        reached += [other for other in others if other.__name__ in one.__code__.co_names and other not in reached]
    return not holding.isdisjoint(reached)


def _plan(source: Source, owner: type) -> Plan | str:
    names = [argument.arg for argument in (*source.tree.args.posonlyargs, *source.tree.args.args)]
    return plan(source, Facts(names[0], owner)) if names else "it takes no module"


def is_forward(name: str) -> bool:
    """Whether a function may run in a forward, by its name."""
    return not name.startswith(("__init__", "_fuse", "unpatchify", "project_"))


def candidates_in(
    tree: ast.FunctionDef, owner: type | None, module: str, name: str, of_comfyui: bool = False
) -> Iterator[tuple[tuple[int, int], Candidate]]:
    """The candidates of one function, each with its line and column."""
    arguments = tree.args.args
    flow = _LooseFlow(tree)
    scope = Scope(flow, Facts(arguments[0].arg if arguments else "self", owner))
    for node in flow.nodes:
        if not isinstance(node, (ast.BinOp, ast.Call)) or node not in flow.statement:
            continue
        fused = of_comfyui and is_addcmul(flow, node)
        for kind, shape in (_KINDS_OF_COMFYUI if of_comfyui else KINDS).items():
            if (isinstance(node, ast.Call) and not fused) != (kind == "norm, SiLU"):
                continue
            if fused and kind != GATED_KIND:  # a product that is not written
                shape = Sum(Leaf("shift"), shape)
            match = next(iter(shape.match(scope, node, Match())), None)
            if match is None or _is_something_else(flow, kind, match, node, of_comfyui):
                continue
            yield (
                (node.lineno, node.col_offset),
                Candidate(kind, module, name, node.lineno, ast.unparse(node), gated="gate" in match.operands),
            )


def _is_something_else(flow: Flow, kind: str, match: Match, node: ast.expr, of_comfyui: bool) -> bool:
    """Whether a shape that fits is a rotation, an interpolation, a sum of numbers: what no reader calls glue."""
    operands = [operand.node for operand in match.operands.values()]
    if any(is_number(flow, operand) for operand in operands) or _has_number(match, of_comfyui):
        return True
    if kind == "norm, SiLU":  # by the name of a module, any activation might be meant
        return match.options["norm_activation"] not in ("silu", ANY_ACTIVATION)
    if kind == "residual -> norm + modulate":
        return "norm" not in match.modules
    if kind == "gated and post-norm residual":
        residual = match.operands["residual"].node
        definition = flow.single(residual)
        value = definition.value if definition is not None else residual
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            return True
        factor = match.operands.get("gate")
        return factor is not None and any(_is_one_plus(flow, part) for part in (factor.node, match.operands["x"].node))
    return False


def _is_one_plus(flow: Flow, node: ast.expr) -> bool:
    scope = Scope(flow, Facts("self"))
    return next(iter(OnePlus("scale").match(scope, node, Match())), None) is not None


def _has_number(match: Match, of_comfyui: bool) -> bool:
    """Whether an operand is a number by its name: a count of tokens, a constant factor."""
    names = [ast.unparse(operand.node) for operand in match.operands.values()]
    if of_comfyui:  # where some tensors have such names
        names = [name for name in names if not re.match(r"(norm_)?(image|text)_tokens$|prescale$", name)]
    return any(map(_NUMBER_NAME.search, names))


def modules(package: str) -> Iterator[ModuleType]:
    """The modules of a package that can be imported."""
    root = importlib.import_module(package)
    names = [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
    if root.__file__ is None:  # a folder of files, whose folders need be no packages
        files = [(path, Path(path)) for path in root.__path__]
        inside = [file.relative_to(path).with_suffix("").parts for path, top in files for file in top.rglob("*.py")]
        names = [".".join((package, *parts)) for parts in sorted(inside) if parts[-1] != "__init__"]
    else:
        yield root
    for name in names:
        if "flax" in name:
            continue
        try:
            yield importlib.import_module(name)
        except Exception:  # an optional dependency is missing, or anything else that its author left
            continue


def functions(module: ModuleType) -> Iterator[tuple[type | None, FunctionType]]:
    """The functions and methods that a module defines."""
    for value in list(vars(module).values()):
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for method in vars(value).values():
                if isinstance(method, FunctionType) and method.__module__ == module.__name__:
                    yield value, method
        elif isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield None, value


def _is_counted(candidate: Candidate) -> bool:
    """Whether a candidate is convolutional by its kind, or stands in a file of transformers."""
    return candidate.kind == "norm, SiLU" or not any(part in f"{candidate.module}." for part in _CONVOLUTIONAL)


def table(candidates: list[Candidate]) -> str:
    """The counts as a table in Markdown, and below it what is not covered, with its reason."""
    lines = ["| kind | candidates | fused | share |", "|---|---|---|---|"]
    for kind in KINDS:
        of_kind = [one for one in candidates if one.kind == kind]
        fused = sum(one.rule is not None for one in of_kind)
        lines.append(f"| {kind} | {len(of_kind)} | {fused} | {fused / max(len(of_kind), 1):.0%} |")
    rules = Counter(one.rule for one in candidates if one.rule is not None)
    lines += [
        "",
        "| rule | expressions |",
        "|---|---|",
        *[f"| {rule} | {count} |" for rule, count in rules.most_common()],
    ]
    lines += ["", "| left | where | reason |", "|---|---|---|"]
    for one in sorted(candidates, key=lambda one: (one.kind, one.module, one.line)):
        if one.rule is None:
            text = one.text.replace("|", "\\|")
            lines.append(f"| {one.kind} | `{one.module}.{one.function}`: `{text[:80]}` | {one.reason} |")
    return "\n".join(lines) + "\n"


def model_table() -> str:
    """The sites of every tiny denoiser by rule, and below it what stays as it is."""
    import torch

    from scripts.check_models.controlnets import CONTROLNETS
    from scripts.check_models.convolutional import AUTOENCODERS, LEFT, NOT_FUSED, UNETS
    from scripts.check_models.denoisers import DENOISERS
    from scripts.check_models.rewritten import CALLED_OTHERWISE, RewrittenModel, batch_of_two, run

    lines = ["| model | class | fused calls of one forward |", "|---|---|---|"]
    left: dict[tuple[str, str, str], None] = {}
    for name, denoiser in DENOISERS.items():
        model = denoiser.build()
        rewritten = RewrittenModel.of(model)
        rewritten.force_original()
        run(model, batch_of_two(denoiser, torch.float32))
        rewritten.fuse()
        calls = rewritten.expected_fused(name)
        text = "; ".join(f"{rule}: {calls[rule]}" for rule in sorted(calls))
        for rule, more, why in CALLED_OTHERWISE.get(name, ()):
            text += f" ({more:+d} {rule}: {why})"
        lines.append(f"| {name} | `{denoiser.cls}` | {text} |")
        left.update({(*place, why): None for place, why in rewritten.left.items()})
    lines += ["", "| convolutional model | class | sites | what stays |", "|---|---|---|---|"]
    for name, tiny in (AUTOENCODERS | UNETS | CONTROLNETS).items():
        rewritten = RewrittenModel.of(tiny.build())
        counts = "; ".join(f"{rule}: {rewritten.sites[rule]}" for rule in sorted(rewritten.sites))
        stays = [f"{rule}: {why}" for rule, why in NOT_FUSED.get(name, {}).items()]
        stays += [LEFT[name]] if name in LEFT else []
        lines.append(f"| {name} | `{tiny.cls}` | {counts or 'none'} | {'; '.join(stays)} |")
        left.update({(*place, why): None for place, why in rewritten.left.items()})
    lines += ["", "| class | left | reason |", "|---|---|---|"]
    for owner, expression, why in sorted(left):
        lines.append(f"| `{owner}` | {_cell(expression)} | {why} |")
    return "\n".join(lines) + "\n"


def _cell(expression: str) -> str:
    rule, _, text = expression.partition(": ")
    return f"{rule}: `{text[:80]}`".replace("|", "\\|")


def release_table() -> str:
    """The counts of :mod:`scripts.sweep_diffusers` by release."""
    releases = json.loads(_RELEASES.read_text(encoding="utf-8"))
    rules = sorted({rule for result in releases.values() for rule in result["rules"]})
    counted = [kind for kind in KINDS if any(kind in result["candidates"] for result in releases.values())]
    lines = ["| diffusers | " + " | ".join([*counted, *rules]) + " |", "|---" * (1 + len(counted) + len(rules)) + "|"]
    for version, result in releases.items():
        kinds = [f"{result['fused'].get(kind, 0)} of {result['candidates'].get(kind, 0)}" for kind in counted]
        counts = [str(result["rules"].get(rule, 0)) for rule in rules]
        lines.append(f"| {version} | " + " | ".join([*kinds, *counts]) + " |")
    lines += ["", "| diffusers | no longer found there |", "|---|---|"]
    lines += [f"| {version} | `{one}` |" for version, result in releases.items() for one in result.get("lost", ())]
    lines += ["", "| diffusers | read by syntax alone | candidates |", "|---|---|---|"]
    for version, result in releases.items():
        lines += [f"| {version} | `{name}` | {count} |" for name, count in result["by syntax alone"].items() if count]
    return "\n".join(lines) + "\n"


def document() -> str:
    """The text of docs/models.md."""
    text = tables_of_source() + _BY_MODEL + model_table()
    return text + _BY_RELEASE + release_table() if _RELEASES.is_file() else text


def tables_of_source() -> str:
    """Its first part, for which source is read and no model runs."""
    import diffusers

    head = _HEAD.format(version=diffusers.__version__)
    methods = ((module, *method) for module in modules("diffusers.models") for method in functions(module))
    return head + table(survey()) + _ROTARY + rotary_table(rotary_functions(methods))


def document_of_comfyui(folder: str) -> str:
    """The text of docs/comfyui-models.md, from a checkout of ComfyUI, whose models are rewritten in every method."""
    sys.path.insert(0, folder)
    from comfy.cli_args import args
    from comfyui_version import __version__

    from scripts import comfyui_sites

    args.cpu = True
    return comfyui_sites.document(__version__, comfyui_sites.survey())


def main() -> None:
    """Writes the document."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", metavar="FOLDER", help="write docs/comfyui-models.md from a checkout of ComfyUI")
    given = parser.parse_args()
    if given.comfyui is not None:
        (_ROOT / "docs" / "comfyui-models.md").write_text(document_of_comfyui(given.comfyui), encoding="utf-8")
        return
    (_ROOT / "docs" / "models.md").write_text(document(), encoding="utf-8")


_HEAD = """# Models: what the rewriter fuses

Written by `scripts/write_rewrite_coverage.py` from the source of diffusers {version}: transformers and what they share,
and of convolutional models the norms with SiLU behind them. A candidate is an expression that looks like glue; the last
table lists every one that stays as it is, with the reason.

"""

_ROTARY = """
## Rotary attention

Every attention processor that calls a rotary function, read with the usual configuration of its class. A rotation is
fused with the norms in front of it and with the join of text and image. Reasons are written by hand, in
`scripts/check_models/rotary.py`.

"""
_BY_MODEL = """
## By model

The fused calls of one forward of each tiny denoiser in `scripts/check_models`, by rule: one for each site of each of
its modules, with exceptions as stated. The second table has the sites of autoencoders, UNets and ControlNets, some of
which run once for each chunk of frames. Tests run them all. The last table lists what has the shape of a rule there and
stays as it is.

Of convolutional models these stay on purpose:

* The concatenation with a skip connection in front of a norm. The shortcut convolution of the same block reads it, too,
  so it has to be made: that holds for all 56 such concatenations in one forward of each of the models below.
* The sum at the end of a block, with the norm of the next one. They stand in two modules, and of six passes over memory
  one would go.
* The bias of a convolution inside of a module that pads with a copy, as in HunyuanVideo and Wan. The copy would live as
  long as the norm that follows, and the peak of memory would be higher than in stock.
* Norms that take the latents or a cache, too, such as `SpatialNorm`. The GroupNorm inside of them is fused.
* Gates that are a sigmoid. There is one for each control, or in a small model.
* Keys and values of a text in a UNet. What is kept of a text needs a projection of it, by which it is known again.

"""
_BY_RELEASE = """
## By release

Written by `scripts/sweep_diffusers.py`: fused of all candidates by kind, and expressions by rule, in each release of
diffusers. Below it stand the classes in which a rule finds nothing any more, and files that do not import beside the
installed packages, with their candidates.

"""

if __name__ == "__main__":
    main()
