"""Draws an :class:`~diffkern.injection.report.InjectionReport` for people, with rich."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from diffkern.injection.report import InjectionReport, Site

#: Columns of a text that goes to a file or a notebook, and the most on a terminal.
_WIDTH, _WIDEST = 100, 120
#: Reasons for stock calls that a group of sites has lines for.
_REASONS = 2

_HEADINGS = ("state", "modules", "class", "op", "provider", "matched by", "error / stock")
_GAP = "  "


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
        states = (
            ("planned" if report.dry_run else "patched", report.active),
            ("skipped", report.skipped),
            ("failed", report.failed),
            ("restored", report.restored),
        )
        groups = [(state, group) for state, sites in states for group in _groups(sites)]
        if groups:
            lines = _align([_HEADINGS, *((state, *_cells(group)) for state, group in groups)], options.max_width)
            indent = (0, 0, 0, max(len(state) for state, _ in groups) + len(_GAP))
            yield Text(lines[0], style="bold")
            for line, (_, group) in zip(lines[1:], groups, strict=True):
                yield Text(line)
                yield Padding(Text(f"at {_places(group)}{_ran(group)}"), indent)
                if group[0].reason:
                    yield Padding(Text(f"why: {group[0].reason}"), indent)
                stock = sum((site.stock_calls for site in group), Counter[str]())
                for reason, count in stock.most_common(_REASONS):
                    yield Padding(Text(f"ran stock {count}x: {reason}"), indent)
        for note in report.notes:
            yield Text(f"note: {note}")


def render(report: InjectionReport) -> Drawing:
    """Returns the report as a rich renderable."""
    return Drawing(report)


def render_text(report: InjectionReport) -> str:
    """Returns the report as plain text, as wide as the terminal within reason."""
    width = min(shutil.get_terminal_size().columns, _WIDEST) if sys.stdout.isatty() else _WIDTH
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(report))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def render_html(report: InjectionReport) -> str:
    """Returns the report as HTML for a notebook."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True)
    console.print(render(report))
    return console.export_html(inline_styles=True, code_format="<pre style='white-space:pre'>{code}</pre>")


def _groups(sites: Iterable[Site]) -> list[list[Site]]:
    """Puts sites together that differ only in where they are, so that 169 norms read as three lines."""
    groups: dict[tuple[object, ...], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.class_name, site.op, site.provider, site.how, site.reason), []).append(site)
    return list(groups.values())


def _cells(group: list[Site]) -> tuple[str, ...]:
    first = group[0]
    proofs = [proof for site in group for proof in site.measurements if proof.provider == site.provider]
    worst = max(((proof.fused, proof.stock) for proof in proofs if not math.isnan(proof.fused)), default=None)
    package, _, name = first.class_name.partition(".")
    return (
        str(len(group)),
        f"{package}.{name.rpartition('.')[2]}",
        first.op or "",
        first.provider or "",
        first.how or "",
        f"{worst[0]:.1e} / {worst[1]:.1e}" if worst else "",
    )


def _ran(group: list[Site]) -> str:
    """The calls so far of the modules of a group; nothing before the first."""
    counts = {"fused": sum(s.fused_calls for s in group), "stock": sum(s.stock_calls.total() for s in group)}
    ran = [f"{count} {how}" for how, count in counts.items() if count]
    return f"; calls so far: {', '.join(ran)}" if ran else ""


def _align(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Aligns columns, without those that say nothing; classes lose their package where there is no room."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    if sum(max(map(len, column)) + len(_GAP) for column in columns) - len(_GAP) > width:
        columns = [
            tuple(cell.rpartition(".")[2] for cell in column) if column[0] == "class" else column for column in columns
        ]
    padded = []
    for column in columns:
        size = max(map(len, column))
        padded.append([cell.rjust(size) if column[0] == "modules" else cell.ljust(size) for cell in column])
    return [_GAP.join(cells).rstrip() for cells in zip(*padded, strict=True)]


def _places(group: list[Site]) -> str:
    """The first place of a group, block indices as ``*``, and how many others there are."""
    places = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site.path) for site in group))
    more = len(places) - 1
    others = f" and {more} more place{'s' if more > 1 else ''}" if more else ""
    return (places[0] or "the module itself") + others
