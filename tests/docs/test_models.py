"""docs/models.md is what its script writes for the installed diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.write_rewrite_coverage import document, tables_of_source

WRITTEN = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_tables_of_what_the_source_holds_are_current() -> None:
    """After a change of rules: python scripts/write_rewrite_coverage.py"""
    assert WRITTEN.read_text(encoding="utf-8").startswith(tables_of_source())


@pytest.mark.exhaustive
def test_the_tables_of_models_are_current() -> None:
    """They are made by running every tiny model, which takes minutes."""
    assert document() == WRITTEN.read_text(encoding="utf-8")
