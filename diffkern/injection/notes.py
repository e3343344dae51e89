"""What ``torch.compile`` and ``torch.export`` made of patched modules, written into the report of the injection.

They run these functions while they trace, and take the results for constants; hence reports by their keys.
"""

from __future__ import annotations

import warnings

import torch

from diffkern.graph.timing import Stage, Trial
from diffkern.injection.report import find_report
from diffkern.providers.dispatch_modes import constant_in_graphs


@constant_in_graphs
def traced_as_stock(report: str, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Says, once for all modules of a class, that a graph holds the stock forward because a proof has no room in it."""
    what = f"{name} in {str(dtype).removeprefix('torch.')} on {device}"
    advice = "inject after casting, or run one call first"
    return _note(report, f"torch.compile traced {what} as stock, not being proven yet: {advice}")


@constant_in_graphs
def traced_as_written(report: str, name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Says the same of forwards whose parts prove themselves, unless one is proven for such calls."""
    found = find_report(report)
    sites = [] if found is None else found.active
    fusions = [getattr(site._state, "fusion", None) for site in sites if site.class_name.endswith(f".{name}")]
    if any(fusion is not None and fusion.lacks_proof(device, dtype) for fusion in fusions):
        return traced_as_stock(report, name, device, dtype)
    return ""


@constant_in_graphs
def traced_as_fast(report: str, name: str) -> str:
    """Says the same of fp8: a graph has no room for copies of weights."""
    return _note(report, f"torch.compile traced {name} as numerics='fast' has it: its graphs hold no fp8")


@constant_in_graphs
def exported_as_stock(report: str) -> str:
    """Says that torch.export and torch.jit.trace see the stock forwards."""
    return _note(report, "exported as stock: programs of torch.export and torch.jit.trace hold no op of diffkern")


@constant_in_graphs
def traced(report: str) -> str:
    """Notes that a graph of ``torch.compile`` holds modules of a report, whose calls are not counted."""
    found = find_report(report)
    if found is not None:
        found.traced = True
    return report


def add(report: str, note: str) -> None:
    """Adds a line to a report, once."""
    found = find_report(report)
    if found is not None and note not in found.notes:
        found.notes.append(note)


def graph_decided(report: str, path: str, shape: str, trial: Trial) -> None:
    """Says what was measured of the steps of a model, and what they are now: the latest of each shape."""
    found, start = find_report(report), f"{path}, input {shape}: "
    if found is None:
        return
    found.notes[:] = [note for note in found.notes if not note.startswith(start)] + [start + trial.reason]
    if trial.step is not None:
        found.steps[f"a step of {path} ({shape})"] = trial.step, trial.replay if trial.stage is Stage.REPLAY else None


#: What was said aloud, by report, which may be gone by then.
_warned: set[tuple[str, str]] = set()


def _note(report: str, note: str) -> str:
    add(report, note)
    if (report, note) not in _warned:
        _warned.add((report, note))
        warnings.warn(f"diffkern: {note}", stacklevel=4)
    return note
