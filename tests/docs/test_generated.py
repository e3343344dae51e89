"""Pages that scripts write are current, and the API reference builds without a warning."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from scripts import write_performance

ROOT = Path(__file__).parents[2]


def test_the_figures_are_those_of_the_result_files() -> None:
    """After new results: python scripts/write_performance.py"""
    page, table = write_performance.documents()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == page
    assert write_performance.with_table(readme, table) == readme
    assert len(readme.splitlines()) <= 150


def test_the_table_of_all_denoisers_says_where_the_compiler_is_ahead_and_what_failed() -> None:
    def arms(*times: float) -> list[dict[str, object]]:
        names = ("stock", "stock + compile", "fast", "fast + compile")
        timed = zip(names[: len(times)], times, strict=True)
        return [{"arm": name, "kernel_ms": {"GEMM": time / 2, "norm": time / 2}} for name, time in timed]

    failed = {"arm": "fast + compile", "wall_ms": 0.0, "unavailable": "InductorError: a | b"}
    models = {
        "ours": {"what": "A", "layers": {"num_layers": 2}, "arms": arms(4.0, 3.0, 2.0, 2.5)},
        "compiler's": {"what": "B", "layers": {}, "arms": arms(4.0, 2.0, 3.0, 2.5), "cause": "it fuses a norm"},
        "failed arm": {"what": "C", "layers": {"depth": 2}, "arms": [*arms(4.0, 1.0, 2.0), failed]},
        "failed": {"what": "D", "layers": {"depth": 2}, "arms": [], "failed": "OutOfMemoryError: no room"},
    }
    (table,) = [kind for key, kind in write_performance.KINDS.items() if key({"breadth": models})]
    assert table({"breadth": models}) == [
        "| model | layers | stock, ms | stock + compile, ms | fast, ms | fast + compile, ms | ours against stock | "
        "compile is ahead of fast |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| A | num_layers=2 | 4.00 | 3.00 | 2.00 | 2.50 | 2.00x |  |",
        "| B | all | 4.00 | 2.00 | 3.00 | 2.50 | 1.60x | 1.50x; it fuses a norm |",
        "| C | depth=2 | 4.00 | 1.00 | 2.00 |  | 2.00x | 2.00x; not run: fast + compile: InductorError: a \\| b |",
        "| D | depth=2 |  |  |  |  |  | not run: OutOfMemoryError: no room |",
    ]


def test_the_reference_has_every_public_name_with_its_docstring(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    from scripts.write_api_reference import MODULES, write

    write(tmp_path)
    for name in MODULES:
        module = __import__(name, fromlist=["x"])
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text(encoding="utf-8")
        for each in module.__all__:
            assert f'id="{each}"' in page, f"{name}.{each}"
            member = getattr(module, each)
            documented = inspect.isclass(member) or inspect.isroutine(member)
            assert not documented or inspect.getdoc(member), f"{name}.{each} has no docstring"
        assert not re.search(r":(?:func|class|meth|mod|attr):", page), name
