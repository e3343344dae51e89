"""docs/compatibility.md says what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stateful.features import FEATURES, Feature, outcome, table

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = json.loads((DOCS / "compatibility.json").read_text(encoding="utf-8"))
STALE = "run: python scripts/write_compatibility_table.py"

ROWS = [
    pytest.param(feature, model, id=f"{feature.name}-{model}", marks=[pytest.mark.gpu] * feature.gpu)
    for feature in FEATURES
    for model in feature.models
]


@pytest.mark.exhaustive  # all rows take two minutes
@pytest.mark.parametrize(("feature", "model"), ROWS)
def test_a_row_is_what_is_measured(feature: Feature, model: str) -> None:
    assert outcome(feature, model) == RESULTS[feature.name][model], STALE


def test_the_page_shows_the_results() -> None:
    assert table(RESULTS) in (DOCS / "compatibility.md").read_text(encoding="utf-8"), STALE
