"""The tiny denoisers with every forward rewritten: inputs in a batch, what runs in each, and how exact it is."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from diffkern.rewrite import RULES, FusedSite, Rewriter, Rewritten
from diffkern.rewrite.facts import child_of
from diffkern.rewrite.identity import SharingSite
from diffkern.rewrite.reference import CastsLifted, to_float64
from scripts.check_models.model import Denoiser, Draw

#: Sites of the branches of LTX-2's blocks in which video and audio do not attend to each other.
_LTX2_APART = {"gated residual": -4, "norm, modulation": -8, "residual, norm, modulation": -4}
#: Where a forward does not run each site once: model -> (rule, calls more than sites, why).
CALLED_OTHERWISE: dict[str, list[tuple[str, int, str]]] = {
    "cogview4": [("linear, GELU", 2, "the feed-forward of a block serves two streams")],
    "easyanimate": [("linear, GELU", 1, "the feed-forward of a block without one for text serves two streams")],
    "ltx2": [
        ("gated residual", -1, "key frames are embedded only if a mask of them is given"),
        *[(rule, calls, "for calls that keep video and audio apart") for rule, calls in _LTX2_APART.items()],
    ],
}

#: Rules whose sites do more than is written where it pays: with a projected caption, which an injection alone keeps,
#: and for more pairs of tokens than a tiny model has, under a mask.
WHERE_IT_PAYS = ("key or value of a text, once a text", "attention, of the keys that count")
#: The op whose sites stand in attention processors.
_IN_PROCESSORS = "qk_norm_rope"


class RoundDraw(Draw):
    """Draws time steps that bfloat16 holds, times 1000 too: the rounding of any other would hide all that follows."""

    def time(self, scale: float = 1000.0) -> Tensor:
        """One of two time steps."""
        fraction = 0.25 * float(torch.randint(1, 3, (), generator=self.generator))
        return torch.tensor([8 * fraction if scale == 5.0 else fraction * scale], device=self.device)


def batch_of_two(denoiser: Denoiser, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a call for two different samples."""
    draw = drawing(dtype)
    both: dict[str, Any] = _stacked(denoiser.inputs(draw, 8), denoiser.inputs(draw, 8))
    return both


def drawing(dtype: torch.dtype) -> RoundDraw:
    """Draws inputs on the CPU, the same every time."""
    return RoundDraw(torch.Generator().manual_seed(1), torch.device("cpu"), dtype)


def _stacked(one: Any, other: Any) -> Any:
    """Two values as one batch; what has no dimension of size one has no batch."""
    if isinstance(one, Tensor):
        axis = next((axis for axis, size in enumerate(one.shape[:2]) if size == 1), None)
        return one if axis is None else torch.cat([one, other], axis)
    if isinstance(one, dict):
        return {name: _stacked(one[name], other[name]) for name in one}
    if isinstance(one, list):
        return one + other if len(one) == 1 else [_stacked(*pair) for pair in zip(one, other, strict=True)]
    return one


def run(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """All that a call returns, as one vector in float64."""
    torch.manual_seed(0)
    with torch.no_grad():
        plain = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
        results = [leaf for leaf in tree_leaves(model(**arguments, **plain)) if isinstance(leaf, Tensor)]
    return torch.cat([result.double().reshape(-1) for result in results])


def run_in_float64(denoiser: Denoiser, model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """What a model computes with the same weights in float64, casts that it makes itself included."""
    twin = denoiser.build()
    twin.load_state_dict(model.state_dict())
    twin.double()
    wide = tree_map(to_float64, dict(arguments))
    try:
        with CastsLifted():
            return run(twin, wide)
    except RuntimeError:  # it multiplies a table that it has made in float32
        return run(twin, wide)


@dataclass(frozen=True)
class RewrittenModel:
    """A model whose modules run their rewritten forwards.

    Attributes:
        model: The model.
        forwards: The rewritten forwards, each once.
        sites: How many sites its modules hold, by rule.
        left: Expressions that have the shape of a rule and stay as they are: (class, expression) -> reason.
        reached: How often sites of attention processors ran while forced to their original expressions, by rule.
    """

    model: nn.Module
    forwards: tuple[Rewritten, ...]
    sites: Counter[str]
    left: Mapping[tuple[str, str], str]
    reached: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, model: nn.Module, numerics: str = "fast", rewriter: Rewriter | None = None) -> RewrittenModel:
        """Rewrites every module of a model, with the proofs of a rewriter; :meth:`undo` takes that back."""
        rewriter = rewriter or Rewriter(numerics)
        forwards: dict[Rewritten, None] = {}
        sites: Counter[str] = Counter()
        left: dict[tuple[str, str], str] = {}
        inlined: set[nn.Module | None] = set()  # into the forward of what holds them: they are not called
        for module in list(model.modules()):
            rewritten = rewriter.rewrite(module) if module not in inlined else None
            if isinstance(rewritten, Rewritten):
                inlined.update(child_of(module, path) for path, _, _ in rewritten.guard.inlined)
                module.forward = MethodType(rewritten.function, module)
                forwards[rewritten] = None
                sites.update(site.plan.rule.name for site in rewritten.sites)
                left.update({(type(module).__name__, text): why for _, text, why in rewritten.plan.refused})
        return cls(model, tuple(forwards), sites, left)

    def force_original(self) -> None:
        """Makes every site run the expression of the source."""
        for forward in self.forwards:
            forward.guard.force_original()

    def fuse(self) -> None:
        """Takes :meth:`force_original` back; remembers which sites of attention processors ran."""
        for site in self._all_sites():
            if site.plan.rule.op == _IN_PROCESSORS:
                self.reached[site.plan.rule.name] += site.original_calls
            site.original_calls = 0
        for forward in self.forwards:
            forward.guard.disabled = set()

    def fused_calls(self) -> Counter[str]:
        """How often an op ran, by rule; or a site asked whether its result is in memory already."""
        return self.calls_by_rule("fused_calls") + self.calls_by_rule("original_calls", SharingSite)

    def calls_by_rule(self, counter: str, kind: type[FusedSite] = FusedSite) -> Counter[str]:
        """A counter of the sites of a class, such as ``"original_calls"``, by rule."""
        calls: Counter[str] = Counter()
        for site in self._all_sites():
            calls[site.plan.rule.name] += getattr(site, counter) if isinstance(site, kind) else 0
        return +calls

    def original_calls(self) -> int:
        """How often an expression of the source ran."""
        return sum(site.original_calls for site in self._all_sites())

    def reasons(self) -> dict[str, str]:
        """Why expressions of the source ran, by expression."""
        return {site.plan.text: reason for site in self._all_sites() for reason in site.reasons.values()}

    def undo(self) -> None:
        """Gives the modules their own forwards back."""
        for module in self.model.modules():
            module.__dict__.pop("forward", None)

    def expected_fused(self, name: str) -> Counter[str]:
        """How often an op runs in one forward of the model of this name: where a site runs, and it pays."""
        expected = self.expected_calls(name)
        for rule in WHERE_IT_PAYS:
            expected.pop(rule, None)
        return +expected

    def expected_calls(self, name: str) -> Counter[str]:
        """How often a site runs in one forward of the model of this name: each once, with listed exceptions.

        A processor has sites for calls with rotary tables and for calls without: those count that a forced run reached.
        """
        elsewhere = {rule.name for rule in RULES if rule.op != _IN_PROCESSORS}
        expected = Counter({rule: calls for rule, calls in self.sites.items() if rule in elsewhere})
        expected.update(self.reached)
        for rule, more, _ in CALLED_OTHERWISE.get(name, ()):
            expected[rule] += more
        return +expected

    def _all_sites(self) -> list[Any]:
        return [site for forward in self.forwards for site in forward.sites]
