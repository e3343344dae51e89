"""Writes the table of platforms, which ``diffkern doctor`` knows as well, into docs/compatibility.md.

python scripts/write_platform_table.py
"""

from __future__ import annotations

from pathlib import Path

from diffkern.platforms import markdown

DOCUMENT = Path(__file__).parents[1] / "docs" / "compatibility.md"
BEGIN = "<!-- platform table: begin (scripts/write_platform_table.py) -->\n"
END = "<!-- platform table: end -->\n"


def main() -> None:
    """Replaces what is between the two marks."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + markdown() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
