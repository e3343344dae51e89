"""The documentation shows the contracts that the ops state and the tests check."""

from __future__ import annotations

from pathlib import Path

from diffkern.ops.contract import markdown, table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_contract_is_the_tested_one() -> None:
    document = (DOCS / "numerics.md").read_text(encoding="utf-8")
    assert markdown(table()) in document, "run: python scripts/write_contract_table.py"
