"""Writes the table of platforms, which ``diffkern doctor`` knows as well, into docs/compatibility.md.

python scripts/write_platform_table.py
"""

from __future__ import annotations

from pathlib import Path

from diffkern.platforms import PLATFORMS

DOCUMENT = Path(__file__).parents[1] / "docs" / "compatibility.md"
BEGIN = "<!-- platform table: begin (scripts/write_platform_table.py) -->\n"
END = "<!-- platform table: end -->\n"


def main() -> None:
    """Replaces what is between the two marks."""
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + markdown() + END + after, encoding="utf-8")


def markdown() -> str:
    """Returns the table."""
    lines = ["| platform | served by | what is known |", "|---|---|---|"]
    lines += [f"| {line.name} | {line.served} | {line.evidence} |" for line in PLATFORMS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
