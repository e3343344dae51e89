"""Writes the table of numerical contracts, which the ops state, into docs/numerics.md.

python scripts/write_contract_table.py
"""

from __future__ import annotations

from pathlib import Path

from diffkern.ops.contract import markdown, table

DOCUMENT = Path(__file__).parents[1] / "docs" / "numerics.md"
BEGIN = "<!-- contract table: begin (scripts/write_contract_table.py) -->\n"
END = "<!-- contract table: end -->\n"


def main() -> None:
    """Replaces what is between the two marks."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + markdown(table()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
