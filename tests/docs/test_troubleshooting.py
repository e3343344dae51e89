"""The messages of the page are those that diffkern prints."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MESSAGES = re.findall(r"(?m)^> (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))


@cache
def _templates() -> str:
    """Every string of the package but the docstrings, a line each; what is filled in stands as three dots."""
    templates = []
    for path in (ROOT / "diffkern").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        said_alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in said_alone:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                templates.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                templates.append(node.value)
    return "\n".join(templates)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_that_diffkern_prints(message: str) -> None:
    assert message.removesuffix("...").strip() in _templates()
