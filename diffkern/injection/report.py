"""What an injection did, and why not elsewhere: for people, for machines, and to take it back."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diffkern.graph.timing import StepTime
from diffkern.matching import full_name
from diffkern.providers.eager.fp8 import fp8_unavailable_reason
from diffkern.verify.counts import CallCounts, CountRecord
from diffkern.verify.measures import Measurement

if TYPE_CHECKING:
    from rich.console import RenderableType


#: A GPU that takes longer than this many times the host's time for a step is what the step waits for.
_BUSY = 1.25
#: How sites are known that nothing proves.
_WITHOUT_PROOF = ("option", "time", "twin")


@dataclass
class Site:
    """One module that was looked at.

    Attributes:
        path: Where it sits, from the pipeline's component on: ``"transformer.transformer_blocks.0.norm1"``.
        class_name: Full name of its class.
        op: The op that computes it, or None if it was not understood.
        provider: Who serves the op on the device the model is on, or None.
        how: ``"table"`` (the norm class is known), ``"recipe"`` (the block and the source of its forward are),
            ``"source"`` (fused sites were found in the source of its forward, see :meth:`InjectionReport.source`),
            ``"probe"`` (its forward is compared), ``"twin"`` (it computes as it is written, and asks once for what
            stays the same), ``"config"`` (the user named a layer for it), or None.
        reason: Why it was left alone or failed; for a patched site why the provider is not the first choice.
        measurements: The proofs that speak for this site; those made at first use are added as they run.
        revoked: Whether a proof at first use failed: then the module runs stock, for the reason given.
        waiting: Whether the module is only watched: whether its steps become CUDA graphs, times decide.
    """

    path: str
    class_name: str
    op: str | None = None
    provider: str | None = None
    how: str | None = None
    reason: str = ""
    measurements: list[Measurement] = field(default_factory=list)
    revoked: bool = False
    waiting: bool = False
    _module: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    _state: CallCounts | CountRecord | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, path: str, module: nn.Module, **known: Any) -> Site:
        """The line of a module, which it does not keep alive."""
        return cls(path, full_name(type(module)), **known, _module=weakref.ref(module))

    @property
    def module(self) -> nn.Module | None:
        """The module, as long as it is there."""
        return None if self._module is None else self._module()

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled report is a record: it does not hold on to modules, and cannot restore them."""
        state = self._state
        if state is not None:
            state = CountRecord(state.fused_calls, state.stock_calls, state.stock_pieces, self.restored)
        return {**vars(self), "_module": None, "_state": state}

    @property
    def broken(self) -> bool:
        """Whether a proof of it failed."""
        return any(not proof.passed for proof in self.measurements)

    @property
    def undecided(self) -> bool:
        """Whether its proof runs at its first call, and nothing is known before; see :attr:`InjectionReport.verified`.

        Graphs and layouts have times, and what computes as it is written has nothing to prove.
        """
        return not (self.measurements or self.fused_calls or self.stock_calls or self.how in _WITHOUT_PROOF)

    @property
    def restored(self) -> bool:
        """Whether the patch was taken away again, by whichever call, or with a ``forward`` that was set over it."""
        restored, module = getattr(self._state, "restored", None), self.module
        if restored is not False or module is None:
            return bool(restored)
        from diffkern.injection.patching import is_in_place

        return not is_in_place(module, self._state)

    @property
    def fused_calls(self) -> int:
        """Calls so far that ran fused."""
        return 0 if self._state is None else self._state.fused_calls

    @property
    def stock_calls(self) -> Counter[str]:
        """Calls so far that ran stock, by reason."""
        return Counter() if self._state is None else self._state.stock_calls

    def to_dict(self) -> dict[str, Any]:
        """Returns the public fields as plain data."""
        plain = {name: getattr(self, name) for name in ("path", "class_name", "op", "provider", "how", "reason")}
        return {**plain, "measurements": [measurement.to_dict() for measurement in self.measurements]}


#: How the reason begins for which a module stays stock that no kernel serves.
ONLY_EAGER = "only plain PyTorch could serve it, which gains nothing"

#: What a model may have that can run fused.
LOOKED_FOR = (
    "RMS and layer norms, modulated norms, rotary embeddings, gated feed-forwards and blocks of LTX, as classes of "
    "torch.nn, diffusers and transformers or equal to one"
)

_numbers = itertools.count(1)
_reports: weakref.WeakValueDictionary[str, InjectionReport] = weakref.WeakValueDictionary()


def find_report(key: str) -> InjectionReport | None:
    """Returns the report with this key, if it is still there."""
    return _reports.get(key)


@dataclass
class InjectionReport:
    """The result of :func:`diffkern.inject_optimized_kernels`.

    Attributes:
        target: Class of the pipeline or model.
        numerics: The contract that was asked for.
        dry_run: Whether this is only a plan; ``patched`` then lists what would be patched.
        verified: Whether sites are proven before they are used.
        skipped: Norms and blocks that were looked at and left alone, each with its reason.
        notes: Sentences about the whole, for example components that were not touched.
        seconds: Time the injection took, in seconds.
        already: Modules that an earlier injection had patched, under the same contract.
        caveat: What of ``numerics`` there is no form of in this model, or "".
        traced: Whether a graph of ``torch.compile`` holds patched modules: their calls in it are not counted.
        expected: What the injection is expected to gain, where that was estimated.
        steps: What was timed of the steps of a model, by its path and the shape of its input: as they are, and as a
            CUDA graph where they became one.
        advises: Whether it says what to do next in Python and on the command line, which is not where every user is.
    """

    target: str
    numerics: str
    dry_run: bool = False
    verified: bool = True
    skipped: list[Site] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    already: int = 0
    caveat: str = ""
    traced: bool = False
    expected: str = ""
    steps: dict[str, tuple[StepTime, StepTime | None]] = field(default_factory=dict)
    advises: bool = True
    _accepted: list[Site] = field(default_factory=list, repr=False)
    _rejected: list[Site] = field(default_factory=list, repr=False)
    _undo: Callable[[Sequence[Site]], int] | None = field(default=None, repr=False, compare=False)
    _key: str = field(default_factory=lambda: f"report {next(_numbers)}", repr=False, compare=False)

    def __post_init__(self) -> None:
        _reports[self._key] = self

    @property
    def patched(self) -> list[Site]:
        """Sites that this injection patched, also those :attr:`restored` since; :meth:`calls` says what ran fused."""
        return [site for site in self._accepted if not site.revoked and not site.waiting]

    @property
    def restored(self) -> list[Site]:
        """Those of the patched sites whose patch was taken away again, by whichever call."""
        return [site for site in self.patched if site.restored]

    @property
    def active(self) -> list[Site]:
        """Those of the patched sites that are patched still."""
        return [site for site in self.patched if not site.restored]

    @property
    def failed(self) -> list[Site]:
        """Sites that broke the contract (:attr:`Site.broken`), at injection or later, or that no provider serves."""
        return self._rejected + [site for site in self._accepted if site.revoked]

    def restore(self) -> int:
        """Takes back what this injection patched, and nothing else; returns how many sites that was."""
        return self._undo(self._accepted) if self._undo is not None else 0

    def source(self, path: str) -> str:
        """Returns the text of a rewritten forward, with its fused sites.

        Args:
            path: That of a site in :attr:`patched` that was found in the source (``how="source"``).

        Raises:
            ValueError: there is none at this path.
        """
        for site in self._accepted:
            fusion = getattr(site._state, "fusion", None)
            if site.path == path and site.how == "source" and fusion is not None:
                text: str = fusion.rewritten.source()
                return text
        paths = [site.path for site in self._accepted if site.how == "source"]
        raise ValueError(f"no forward was rewritten at {path!r}; there are {', '.join(map(repr, paths)) or 'none'}")

    def explain(self, path: str) -> str:
        """Returns what happened to one module, and why, in a sentence.

        Args:
            path: Where it sits, such as ``"transformer.transformer_blocks.0.norm1"``.

        Raises:
            ValueError: diffkern looked at nothing there; the message names the closest paths.
        """
        from diffkern.injection.table import explain

        return explain(self, path)

    def calls(self) -> dict[str, dict[str, Any]]:
        """Counts the calls so far, by path.

        A second thing at a path, such as the graph of a whole denoiser, has its op behind it:
        ``"transformer (cuda_graph)"``.

        Each has ``"fused"`` and ``"stock"`` calls, the latter also by ``"stock_reasons"``; and for blocks that
        ran fused, in how many of these calls which ``"stock_pieces"`` went through the stock child, because it
        has a hook, an adapter, or another processor. The norms inside a fused block are not called themselves.

        Calls inside a graph of ``torch.compile`` or a CUDA graph run without Python and are not counted. A
        site that lost its proof at first use counts as stock from then on, with the reason.
        """
        counts: dict[str, dict[str, Any]] = {}
        for site in self._accepted:
            if site._state is not None and not site.waiting:
                counts[f"{site.path} ({site.op})".strip() if site.path in counts else site.path] = {
                    "fused": site._state.fused_calls,
                    "stock": sum(site._state.stock_calls.values()),
                    "stock_reasons": dict(site._state.stock_calls),
                    "stock_pieces": dict(site._state.stock_pieces),
                }
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        return {
            **{name: getattr(self, name) for name in ("target", "numerics", "dry_run", "verified")},
            "summary": self.summary(),
            "gain": self.gain(),
            "next": self.next_step(),
            "seconds": self.seconds,
            **{
                name: [site.to_dict() for site in getattr(self, name)]
                for name in ("patched", "skipped", "failed", "restored")
            },
            "notes": list(self.notes),
            "calls": self.calls(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Returns :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def summary(self) -> str:
        """Returns the headline: what is patched now, what of it ran fused so far, and under which contract."""
        patched, skipped = self.active, f"left {len(self.skipped)} alone"
        if self.dry_run:
            parts = [f"would patch {_modules(patched)} of {self.target}{_providers(patched)}", skipped]
        elif self.restored and not patched:
            return f"restored: all {_modules(self.restored)} of {self.target} run stock again"
        else:
            more = " more" if self.already else ""
            parts = [f"patched {_modules(patched, more)} of {self.target}{self._runs(patched)}", skipped]
        if self.restored:
            parts.append(f"{len(self.restored)} restored")
        if broken := sum(site.broken for site in self.failed):
            parts.append(f"{broken} failed their proof and stay stock")
        return "; ".join([", ".join(parts), *self._remarks(patched), *self._contract(patched)])

    def gain(self) -> str:
        """Returns what was measured of the gain so far, else what is expected, or ""."""
        said = []
        for what, (step, replay) in self.steps.items():
            if replay is not None:
                said.append(
                    f"{what} takes {replay.step:.1f} ms as a CUDA graph, {step.step:.1f} ms without "
                    f"({step.step / replay.step:.2f}x)"
                )
        fused, stock = (sum(times) for times in zip((0.0, 0.0), *_timed(self.active), strict=True))
        if fused:
            said.append(f"timed sites run {stock / fused:.1f}x as fast as they are written")
        return "; ".join(said) or self.expected

    def next_step(self) -> str:
        """Returns what to do next, or ""."""
        if not self.advises or not self.active:
            return ""
        if self.dry_run:
            return "inject, run, and print the report: it says what ran fused"
        device = _device(self.active)
        ran = self.traced or any(site.fused_calls or site.stock_calls for site in self.active)
        if device is None or not ran:
            return "run it, and print the report again: it says what ran fused"
        if device.type == "cpu":
            return "diffkern bench pipeline compares whole calls with stock"
        said = []
        graphs = [site for site in self._accepted if site.op == "cuda_graph"]
        if any(site.waiting for site in graphs) and not self.steps:
            said.append("some more steps: then their times decide about CUDA graphs")
        busy = any(step.gpu > _BUSY * step.host for step, _ in self.steps.values())
        if busy and not self.traced:
            said.append("compile_repeated_blocks(): the GPU is busy, and the compiler fuses what no rule does")
        if busy and self.numerics == "fast" and fp8_unavailable_reason(device) is None:
            said.append("numerics='fp8', if its error is small enough for you")
        if not graphs and not self.traced:
            said.append("cuda_graph='auto' where the GPU waits for the host")
        if any(note.startswith("component 'vae'") for note in self.notes):
            said.append("the VAE too, by components=None")
        return "; or ".join(said) or "diffkern bench pipeline compares whole calls with stock"

    def _runs(self, patched: Sequence[Site]) -> str:
        """What of the patched sites ran fused, and what stock, so far."""
        if not patched:
            return ""
        fused = [site for site in patched if site.fused_calls]
        stock = [site for site in patched if site.stock_calls]
        if not fused and not stock:
            so_far = "run by torch.compile, which counts no calls" if self.traced else "not run yet"
            return f"{_providers(patched)}, {so_far}"
        mixed = sum(site in stock for site in fused)
        runs = [f"{len(fused)} ran fused{_providers(fused)}"] if fused else ["nothing ran fused"]
        if mixed:
            runs.append(f"{mixed} of them stock at times")
        if len(stock) > mixed:
            runs.append(f"{len(stock) - mixed} ran stock")
        reasons = sum((site.stock_calls for site in stock), Counter[str]())
        if reasons:
            more = len(reasons) - 1
            others = f" and {more} more reason{'s' * (more > 1)}" if more else ""
            runs[-1] += f" ({reasons.most_common(1)[0][0]}{others})"
        if self.traced:
            runs.append("more by torch.compile, which counts no calls")
        idle = len(patched) - len(fused) - len(stock) + mixed
        return ": " + ", ".join(runs + ([f"{idle} not called themselves"] if idle else []))

    def _remarks(self, patched: Sequence[Site]) -> list[str]:
        """Why nothing is patched, or which command would let more run fused."""
        left = Counter(site.reason for site in (*self.skipped, *self.failed))
        if not patched and not self.already:
            if not left:
                return [f"it has none of the modules that diffkern looks for: {LOOKED_FOR}"]
            reason, count = left.most_common(1)[0]
            return [f"{reason} ({count} of {left.total()})"]
        plain = Counter({reason: count for reason, count in left.items() if ONLY_EAGER in reason})
        unserved = Counter(site.reason for site in self.failed if not site.broken)
        remarks = [f"{each.total()} stay stock: {each.most_common(1)[0][0]}" for each in (unserved, plain) if each]
        undecided = sum(site.undecided for site in patched) if self.verified and not self.dry_run else 0
        if undecided:
            remarks.append(f"{undecided} to be proven at the first call, and stock if that fails")
        return remarks + ([f"{self.already} were patched before: restore() first to change them"] * bool(self.already))

    def _contract(self, patched: Sequence[Site]) -> list[str]:
        if not patched and not self.already:
            return [] if self.dry_run else ["it runs stock"]
        caveats = [self.caveat] if self.caveat else []
        if self.dry_run and self.numerics == "exact":
            caveats.append("nothing proven yet: what has other bits than stock here will stay stock")
        return [", ".join([f"numerics {self.numerics!r}", *caveats, *([] if self.verified else ["not verified"])])]

    def __str__(self) -> str:
        from diffkern.injection.table import render_text

        return render_text(self)

    def _repr_html_(self) -> str:
        from diffkern.injection.table import render_html

        return render_html(self)

    def __rich__(self) -> RenderableType:
        from diffkern.injection.table import Drawing

        return Drawing(self)


def _modules(sites: Sequence[Site], more: str = "") -> str:
    return f"{len(sites)}{more} module{'' if len(sites) == 1 else 's'}"


def _providers(sites: Sequence[Site]) -> str:
    by = Counter(site.provider or "whom the first call chooses" for site in sites)
    return f" ({', '.join(f'{count} by {name}' for name, count in by.most_common())})" if by else ""


def _timed(sites: Iterable[Site]) -> Iterator[tuple[float, float]]:
    """What the calls of each timed site took, and would have taken as written, in microseconds."""
    seen: set[int] = set()
    for site in sites:
        for part in getattr(getattr(site._state, "fusion", None), "timed_sites", ()):
            if id(part) not in seen and part.cost is not None:
                seen.add(id(part))
                fused, stock = part.cost
                yield part.fused_calls * fused.device, part.fused_calls * stock.device


def _device(sites: Iterable[Site]) -> torch.device | None:
    """Where the patched modules are, or None if none is left."""
    modules: list[nn.Module] = [m for site in sites if (m := site.module) is not None]
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return next((tensor.device for tensor in tensors), None)
