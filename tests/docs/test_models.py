"""docs/models.md is what its script writes for the installed diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.write_rewrite_coverage import document


@pytest.mark.slow
def test_the_tables_of_models_are_current() -> None:
    """After a change of rules: python scripts/write_rewrite_coverage.py"""
    written = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert document() == written
