"""Convolutions that pad videos with frames of their own, prepared to be read where they are called.

``x = self.conv(silu(self.norm(x)), causal=causal)`` becomes the statements of that forward, so that the norm and the
padding are one op, and the bias of the convolution is added with what follows. What a forward pads in branches becomes
one padding, by as many frames as the branch says.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from diffkern.rewrite.padding import FINAL, FIRST
from diffkern.rewrite.query_key import concatenated
from diffkern.rewrite.syntax import names_in, only_target, statements_of

#: The variables by which branches say how many frames they put in front and behind.
_COUNTS = "frames_in_front", "frames_behind"


@dataclass(frozen=True)
class _Padding:
    """``target = torch.cat([first frames, x, last frames], dim=2)``, with the function and the numbers as text."""

    target: str
    x: str
    function: str
    front: str
    back: str
    parts: frozenset[str]


def pads_frames(forward: ast.FunctionDef) -> bool:
    """Whether a forward pads frames once, by numbers that branches may say: then they say nothing else any more."""
    names, block, made = names_in(forward), forward.body, 0
    for index, statement in enumerate(block):
        if not isinstance(statement, ast.If):
            made += _padded([statement]) is not None
            continue
        first, other = _padded(statement.body), _padded(statement.orelse)
        if first is None or other is None or names & set(_COUNTS):
            continue
        alike = (first.target, first.x, first.function) == (other.target, other.x, other.function)
        inside = {*ast.walk(statement)}
        rest = [node for node in ast.walk(forward) if node not in inside]
        read = {node.id for node in rest if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        if not alike or read & (first.parts | other.parts):
            continue
        x, (front, back) = first.x, _COUNTS
        statement.body, statement.orelse = (
            statements_of(f"{front} = {one.front}\n{back} = {one.back}", statement) for one in (first, other)
        )
        parts = f"{x}[:, :, :1].repeat(1, 1, {front}, 1, 1), {x}, {x}[:, :, -1:].repeat(1, 1, {back}, 1, 1)"
        padding = statements_of(f"{first.target} = {first.function}([{parts}], dim=2)", statement)
        block[index + 1 : index + 1] = padding
    return made == 1


def _padded(block: list[ast.stmt]) -> _Padding | None:
    """What a block pads that does nothing else."""
    assigned: dict[str, ast.expr] = {}
    for statement in block:
        target = only_target(statement)
        if not isinstance(target, ast.Name) or target.id in assigned:
            return None
        assigned[target.id] = statement.value  # type: ignore[attr-defined]
    name, value = assigned.popitem() if assigned else ("", ast.Constant(None))
    found = concatenated(value)
    if found is None or found[1] != 2:
        return None
    parts = [assigned.get(part.id, part) if isinstance(part, ast.Name) else part for part in found[0]]
    at = next((i for i, part in enumerate(parts) if isinstance(part, ast.Name)), -1)
    counts: list[str] = []
    for around, frame in ((parts[:at], FIRST), (parts[at + 1 :], FINAL)) if at >= 0 else ():
        filled = [frame.fill(None, part, known={"_x": parts[at]}) for part in around]
        known = [ast.unparse(one[0]["_n"]) for one in filled if one is not None]
        if len(known) != len(around) or len(around) > 1:
            return None
        counts.append(known[0] if known else "0")
    if not counts or len(parts) - 1 < max(1, len(assigned)):
        return None
    function = ast.unparse(value.func)  # type: ignore[attr-defined]
    front, back = counts
    return _Padding(name, ast.unparse(parts[at]), function, front, back, frozenset(assigned))
