"""Draws an :class:`~diffkern.injection.report.InjectionReport` for people, with rich."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from diffkern.injection.report import InjectionReport, Site

_WIDTH = 150

#: Kinds of place that a line of the table names.
_PLACES = 3


def render(report: InjectionReport) -> Group:
    """Returns the report as a rich renderable: a line, a table of groups of like sites, notes."""
    parts: list[Text | Table] = [Text(report.summary(), style="bold")]
    states = (
        ("planned" if report.dry_run else "patched", report.patched),
        ("skipped", report.skipped),
        ("failed", report.failed),
    )
    if any(sites for _, sites in states):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("", "modules", "class", "op", "provider", "matched by", "error / stock", "where and why"):
            table.add_column(heading, justify="right" if heading == "modules" else "left", overflow="fold")
        for state, sites in states:
            for group in _groups(sites):
                table.add_row(state, str(len(group)), *_describe(group))
        parts.append(table)
    parts += [Text(f"note: {note}") for note in report.notes]
    return Group(*parts)


def render_text(report: InjectionReport) -> str:
    """Returns the report as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
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


def _describe(group: list[Site]) -> tuple[str, ...]:
    first = group[0]
    errors = [(m.fused, m.stock) for site in group for m in site.measurements if m.provider == site.provider]
    worst = max(errors, default=None)
    package, _, name = first.class_name.partition(".")
    return (
        f"{package}.{name.rpartition('.')[2]}",
        first.op or "",
        first.provider or "",
        first.how or "",
        f"{worst[0]:.1e} / {worst[1]:.1e}" if worst else "",
        f"{_places(group)}: {first.reason}" if first.reason else _places(group),
    )


def _places(group: list[Site]) -> str:
    """The paths of a group, block indices as ``*``; of many kinds of place only the first ones."""
    places = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site.path) for site in group))
    more = f" and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
    return ", ".join(place or "the module itself" for place in places[:_PLACES]) + more
