"""What an injection did, and why not elsewhere: for people, for machines, and to take it back."""

from __future__ import annotations

import itertools
import json
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from diffkern.verify.measures import Measurement

if TYPE_CHECKING:
    from rich.console import RenderableType

    from diffkern.attention import Route
    from diffkern.injection.state import PatchState


@dataclass
class Site:
    """One module that was looked at.

    Attributes:
        path: Where it sits, from the pipeline's component on: ``"transformer.transformer_blocks.0.norm1"``.
        class_name: Full name of its class.
        op: The op that computes it, or None if it was not understood.
        provider: Who serves the op on the device the model is on, or None.
        how: ``"table"`` (the norm class is known), ``"recipe"`` (the block and the source of its forward are),
            ``"probe"`` (its forward is compared), ``"config"`` (the user named a layer for it), or None.
        reason: Why it was left alone or failed; for a patched site why the provider is not the first choice.
        measurements: The proofs that speak for this site; those made at first use are added as they run.
        revoked: Whether a proof at first use failed: then the module runs stock, for the reason given.
    """

    path: str
    class_name: str
    op: str | None = None
    provider: str | None = None
    how: str | None = None
    reason: str = ""
    measurements: list[Measurement] = field(default_factory=list)
    revoked: bool = False
    _module: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    _state: PatchState | Route | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled report is a record: it does not hold on to modules, and cannot restore them."""
        return {**vars(self), "_module": None, "_state": None}

    def to_dict(self) -> dict[str, Any]:
        """Returns the public fields as plain data."""
        return {
            "path": self.path,
            "class_name": self.class_name,
            "op": self.op,
            "provider": self.provider,
            "how": self.how,
            "reason": self.reason,
            "measurements": [measurement.to_dict() for measurement in self.measurements],
        }


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
        skipped: Norms and blocks that were looked at and left alone, each with its reason.
        notes: Sentences about the whole, for example components that were not touched.
        seconds: Time the injection took, in seconds.
    """

    target: str
    numerics: str
    dry_run: bool = False
    skipped: list[Site] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _accepted: list[Site] = field(default_factory=list, repr=False)
    _rejected: list[Site] = field(default_factory=list, repr=False)
    _undo: Callable[[Sequence[Site]], int] | None = field(default=None, repr=False, compare=False)
    _key: str = field(default_factory=lambda: f"report {next(_numbers)}", repr=False, compare=False)

    def __post_init__(self) -> None:
        _reports[self._key] = self

    @property
    def patched(self) -> list[Site]:
        """Sites that run fused now."""
        return [site for site in self._accepted if not site.revoked]

    @property
    def failed(self) -> list[Site]:
        """Sites that broke the contract, at injection or at first use, or that no provider serves."""
        return self._rejected + [site for site in self._accepted if site.revoked]

    def restore(self) -> int:
        """Takes back what this injection patched, and nothing else; returns how many sites that was."""
        return self._undo(self._accepted) if self._undo is not None else 0

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
            if site._state is not None:
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
            "target": self.target,
            "numerics": self.numerics,
            "dry_run": self.dry_run,
            "seconds": self.seconds,
            "patched": [site.to_dict() for site in self.patched],
            "skipped": [site.to_dict() for site in self.skipped],
            "failed": [site.to_dict() for site in self.failed],
            "notes": list(self.notes),
            "calls": self.calls(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Returns :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def summary(self) -> str:
        """Returns one sentence: how many sites, by whom, and how many not."""
        verb = "would patch" if self.dry_run else "patched"
        by = Counter(site.provider or "nobody on this device" for site in self.patched)
        served = ", ".join(f"{count} by {name}" for name, count in by.most_common())
        parts = [f"{verb} {len(self.patched)} modules of {self.target}" + (f" ({served})" if served else "")]
        parts.append(f"left {len(self.skipped)} alone")
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        return ", ".join(parts) + f"; numerics {self.numerics!r}"

    def __str__(self) -> str:
        from diffkern.injection.table import render_text

        return render_text(self)

    def _repr_html_(self) -> str:
        from diffkern.injection.table import render_html

        return render_html(self)

    def __rich__(self) -> RenderableType:
        from diffkern.injection.table import render

        return render(self)
