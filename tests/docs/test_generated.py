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
