"""Draws an :class:`~diffkern.injection.report.InjectionReport` for people, with rich."""

from __future__ import annotations

import difflib
import io
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from diffkern.injection.fp8_fusion import OP as FP8_OP
from diffkern.injection.fp8_fusion import kind_of

if TYPE_CHECKING:
    from diffkern.injection.report import InjectionReport, Site

#: Columns of a text that goes to a file or a notebook, and the most on a terminal.
_WIDTH, _WIDEST = 80, 120
#: Reasons for stock calls that a group of sites has lines for.
_REASONS = 2

_HEADINGS = ("state", "count", "class", "provider", "match", "error / stock")
_GAP = "  "
#: In the place of the errors of a module whose proof waits for a real input.
_FIRST_CALL = "at first call"
#: What of the path of a layer says in which block it is, and not which layer of it.
_IN_BLOCK = re.compile(r".*(blocks?|layers?)\.\d+\.")


@dataclass(frozen=True)
class Drawing:
    """A report as a rich renderable: a line, a line per group of like sites with where and why below it, notes.

    Columns are aligned by hand and not by a rich table, because "where" and "why" run below all of them.
    """

    report: InjectionReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the parts, for the width there is."""
        report = self.report
        yield Text(report.summary(), style="bold")
        for what, said in (("gain", report.gain()), ("next", report.next_step())):
            if said:
                yield Text(f"{what}: {said}")
        groups = [(state, group) for state, sites in _states(report) for group in _groups(sites)]
        shared = _shared_reasons([group for _, group in groups])

        def say(reason: str) -> str:
            return f"note {shared[reason]}" if reason in shared else reason

        if groups:
            first_call = _FIRST_CALL if report.verified and not report.dry_run else ""
            rows = [_HEADINGS, *((state, *_cells(group, first_call * (state == "patched"))) for state, group in groups)]
            lines, below = _align(rows, options.max_width)
            indent = (0, 0, 0, max(len(state) for state, _ in groups) + len(_GAP))
            yield Text(lines[0], style="bold")
            for line, rest, (_, group) in zip(lines[1:], below[1:], groups, strict=True):
                yield Text(line)
                op = f"{group[0].op} " if group[0].op else ""
                yield Padding(Text(f"{op}at {_places(group)}{_ran(group)}"), indent)
                if rest:
                    yield Padding(Text(rest), indent)
                if errors := _errors_by_layer(group):
                    yield Padding(Text(errors), indent)
                if group[0].reason:
                    yield Padding(Text(f"why: {say(group[0].reason)}"), indent)
                for reason, count in _stock_calls(group):
                    yield Padding(Text(f"ran stock {count}x: {say(reason)}"), indent)
        for reason, number in shared.items():
            yield Text(f"note {number}: {reason}")
        for note in report.notes:
            yield Text(f"note: {note}")


def render_text(report: InjectionReport) -> str:
    """Returns the report as plain text, as wide as the terminal within reason."""
    width = min(shutil.get_terminal_size().columns, _WIDEST) if sys.stdout.isatty() else _WIDTH
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(Drawing(report))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def render_html(report: InjectionReport) -> str:
    """Returns the report as HTML for a notebook."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True)
    console.print(Drawing(report))
    return console.export_html(inline_styles=True, code_format="<pre style='white-space:pre'>{code}</pre>")


#: The states of a site as the table has them, and in a sentence.
_SAID = {
    "planned": "would be patched",
    "patched": "is patched",
    "skipped": "was left alone",
    "failed": "failed and runs stock",
    "unserved": "is served by no provider and runs stock",
    "restored": "was restored and runs stock",
}


def _states(report: InjectionReport) -> list[tuple[str, list[Site]]]:
    """The sites by state; those that failed apart from those that no provider serves."""
    failed = [site for site in report.failed if site.broken or site.revoked]
    return [
        ("planned" if report.dry_run else "patched", report.active),
        ("skipped", report.skipped),
        ("failed", failed),
        ("unserved", [site for site in report.failed if site not in failed]),
        ("restored", report.restored),
    ]


def _groups(sites: Iterable[Site]) -> list[list[Site]]:
    """Puts sites together that differ only in where they are, so that 169 norms read as three lines."""
    groups: dict[tuple[object, ...], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.class_name, site.op, site.provider, site.how, site.reason), []).append(site)
    return list(groups.values())


def _stock_calls(group: list[Site]) -> list[tuple[str, int]]:
    return sum((site.stock_calls for site in group), Counter[str]()).most_common(_REASONS)


def _shared_reasons(groups: list[list[Site]]) -> dict[str, int]:
    """Numbers the reasons that more than one group has, so that each is printed once."""
    reasons = Counter(
        reason
        for group in groups
        for reason in dict.fromkeys((group[0].reason, *(reason for reason, _ in _stock_calls(group))))
    )
    return {reason: number for number, reason in enumerate((r for r, n in reasons.items() if r and n > 1), 1)}


def _cells(group: list[Site], first_call: str) -> tuple[str, ...]:
    first, worst = group[0], _worst(group)
    package, _, name = first.class_name.partition(".")
    return (
        str(len(group)),
        f"{package}.{name.rpartition('.')[2]}",
        first.provider or "",
        first.how or "",
        f"{worst[0]:.1e} / {worst[1]:.1e}" if worst else first_call * any(site.undecided for site in group),
    )


def _worst(group: Iterable[Site]) -> tuple[float, float] | None:
    """The largest error of the fused forwards, and that of stock beside it."""
    proofs = [proof for site in group for proof in site.measurements if proof.provider == site.provider]
    return max(((proof.fused, proof.stock) for proof in proofs if not math.isnan(proof.fused)), default=None)


def _errors_by_layer(group: list[Site]) -> str:
    """The largest error of each kind of layer whose product is in fp8: which to exclude where a result is poor."""
    if group[0].op != FP8_OP:
        return ""
    kinds: dict[str, list[Site]] = {}
    for site in group:
        kinds.setdefault(_IN_BLOCK.sub("", site.path), []).append(site)
    errors = {kind: worst[0] for kind, sites in kinds.items() if (worst := _worst(sites)) is not None}
    said = [f"{kind} {error:.1%}" for kind, error in sorted(errors.items(), key=lambda item: -item[1])]
    return f"error by layer: {', '.join(said)}" if len(said) > 1 else ""


def _ran(group: list[Site]) -> str:
    """The calls so far of the modules of a group; nothing before the first."""
    counts = {"fused": sum(s.fused_calls for s in group), "stock": sum(s.stock_calls.total() for s in group)}
    ran = [f"{count} {how}" for how, count in counts.items() if count]
    return f"; calls so far: {', '.join(ran)}" if ran else ""


def _align(rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], list[str]]:
    """Aligns the columns that say something, and returns beside each line what has no room in it.

    Classes lose their package first; then the last columns move below their lines.
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    if _width(columns) > width:
        columns = [
            tuple(cell.rpartition(".")[2] for cell in column) if column[0] == "class" else column for column in columns
        ]
    moved: list[Sequence[str]] = []
    while _width(columns) > width and len(columns) > 3:
        moved.insert(0, columns.pop())
    padded = []
    for column in columns:
        size = max(map(len, column))
        padded.append([cell.rjust(size) if column[0] == "count" else cell.ljust(size) for cell in column])
    lines = [_GAP.join(cells).rstrip() for cells in zip(*padded, strict=True)]
    below = ["; ".join(f"{c[0]}: {c[row]}" for c in moved if c[row]) for row in range(len(rows))]
    return lines, below


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + len(_GAP) for column in columns) - len(_GAP)


def _places(group: list[Site]) -> str:
    """The first place of a group, block indices as ``*``, and how many others there are."""
    places = list(dict.fromkeys(kind_of(site.path) for site in group))
    more = len(places) - 1
    others = f" and {more} more place{'s' if more > 1 else ''}" if more else ""
    return (places[0] or "the module itself") + others


def explain(report: InjectionReport, path: str) -> str:
    """Returns what happened to the module at ``path``, in a sentence for each of its sites."""
    first_call = ", to be proven at its first call" if report.verified else ""
    found = [
        (_SAID[state] + first_call * (state == "patched" and site.undecided), site)
        for state, sites in _states(report)
        for site in sites
    ]
    here = [_sentence(state, site) for state, site in found if site.path == path]
    if here:
        return " ".join(here)
    around = [pair for pair in found if pair[1].path and path.startswith(f"{pair[1].path}.")]
    if around:
        longest = max(len(site.path) for _, site in around)
        inside = " ".join(_sentence(state, site) for state, site in around if len(site.path) == longest)
        return f"{path} is nothing that diffkern looked at itself. It is inside of this: {inside}"
    paths = list(dict.fromkeys(site.path for _, site in found))
    likely = difflib.get_close_matches(path, paths, 3, 0.5) or paths[:3]
    raise ValueError(f"diffkern looked at nothing at {path!r}; it did at {', '.join(map(repr, likely)) or 'no module'}")


def _sentence(state: str, site: Site) -> str:
    name = site.class_name.rpartition(".")[2]
    said = f"{site.path or 'The module itself'} ({name}) {state}"
    if site.op and site.provider:
        said += f": {site.provider} computes {site.op}"
    if site.how:
        said += f" (matched by {site.how})"
    worst = _worst([site])
    if worst is not None:
        said += f", with an error of {worst[0]:.1e} where stock has {worst[1]:.1e}"
    if site.reason:
        said += f", because: {site.reason}"
    elif state.startswith("is patched"):
        said += _ran([site]) or "; it was not called itself so far"
    for reason, count in _stock_calls([site]):
        said += f"; {count} calls ran stock: {reason}"
    return f"{said}."
