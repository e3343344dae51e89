"""Statements that no rule enters, as such that do: stores into a part of a tensor, pairs of slices, pairs of casts."""

from __future__ import annotations

import ast
import copy

from diffkern.rewrite.syntax import Swap, blocks, only_target, separated, statements_of


def without_store(statement: ast.stmt) -> ast.stmt:
    """``x[:, t:] = f(x[:, t:], ...)`` as ``x = torch.cat([x[:, :t], f(x[:, t:], ...)], dim=1)``; others as they are."""
    target = only_target(statement)
    value = getattr(statement, "value", None)
    if (
        not isinstance(target, ast.Subscript)
        or not isinstance(target.value, ast.Name)
        or not isinstance(value, ast.Call)
    ):
        return statement
    if not value.args or ast.unparse(value.args[0]) != ast.unparse(target):
        return statement
    slices = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    if not all(isinstance(part, ast.Slice) and part.step is None and part.upper is None for part in slices):
        return statement
    bounded = [dim for dim, part in enumerate(slices) if part.lower is not None]  # type: ignore[attr-defined]
    if len(bounded) != 1 or not isinstance(slices[bounded[0]].lower, ast.Name):  # type: ignore[attr-defined]
        return statement
    front = copy.deepcopy(value.args[0])
    place = front.slice.elts[bounded[0]] if isinstance(target.slice, ast.Tuple) else front.slice  # type: ignore[attr-defined]
    place.lower, place.upper = None, place.lower
    joined = ast.parse(f"{target.value.id} = torch.cat([0, 0], dim={bounded[0]})").body[0]
    joined.value.args[0].elts = [front, value]  # type: ignore[attr-defined]
    for node in ast.walk(joined):
        if not hasattr(node, "lineno") or node.lineno == 1:
            ast.copy_location(node, statement)
    return ast.fix_missing_locations(joined)


def separate_pairs(tree: ast.FunctionDef) -> None:
    """Makes two statements of ``a, b = x[..., :n], x[..., n:]`` and of ``a, b = a.float(), b.float()``.

    No rule enters the one statement.
    """
    for block in blocks(tree):
        for index in reversed(range(len(block))):
            pairs = separated(block[index])
            cast = all(ast.unparse(one.value) == f"{ast.unparse(one.targets[0])}.float()" for one in pairs)
            if pairs and (cast or all(isinstance(one.value, ast.Subscript) for one in pairs)):
                block[index : index + 1] = pairs
    ast.fix_missing_locations(tree)


def name_starts(tree: ast.FunctionDef) -> None:
    """Names ``text.shape[1]`` in front of ``x[:, text.shape[1]:] = f(x[:, text.shape[1]:], ...)``: leaves are names."""
    for block in blocks(tree):
        index = 0
        while index < len(block):
            first, names = index, dict[str, str]()
            while index < len(block) and (start := _start_of_store(block[index])) is not None:
                name = names.setdefault(start, f"_s{block[index].lineno}_start")
                for node in [node for node in ast.walk(block[index]) if isinstance(node, ast.Subscript)]:
                    if ast.unparse(node) == start:
                        Swap(node, ast.copy_location(ast.Name(name, ast.Load()), node)).visit(block[index])
                index += 1
            made = [one for start, name in names.items() for one in statements_of(f"{name} = {start}", block[first])]
            block[first:first] = made
            index += len(made) + (not made)


def _start_of_store(statement: ast.stmt) -> str | None:
    """``text.shape[1]`` as such a statement has it, for a text that is not ``x``; None for others."""
    target = only_target(statement)
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
        return None
    slices = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    starts = [part.lower for part in slices if isinstance(part, ast.Slice) and part.lower is not None]
    start = starts[0] if len(starts) == 1 else None
    of = start.value if isinstance(start, ast.Subscript) and isinstance(start.slice, ast.Constant) else None
    shape = isinstance(of, ast.Attribute) and of.attr == "shape" and isinstance(of.value, ast.Name)
    return ast.unparse(start) if shape and of.value.id != target.value.id else None  # type: ignore[union-attr, arg-type]
