"""Takes helpers of a model into the function that calls them, so that rules see through them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType
from typing import Any

from diffkern.rewrite.facts import Facts


def inline_helpers(tree: ast.FunctionDef, function: FunctionType, facts: Facts) -> dict[str, Callable[..., Any]]:
    return {}
