"""What a function does with a result of a site that forbids it to lie in memory otherwise, or in that of another."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from diffkern.rewrite.effects import Effects
from diffkern.rewrite.match import Match
from diffkern.rewrite.patches import SPLIT_SAMPLES
from diffkern.rewrite.template import Template

#: Methods of lists and dicts that keep an argument.
_KEEP = frozenset({"append", "extend", "insert", "update", "setdefault", "add"})
_SPLIT_SAMPLES = Template(SPLIT_SAMPLES)
#: What fails, or answers something else, with a tensor whose dimensions lie in another order in memory.
_OF_ORDER = frozenset({"view", "view_as", "as_strided", "stride", "is_contiguous", "data_ptr"})


def is_viewed(effects: Effects, root: ast.expr) -> bool:
    """Whether a result, or a view of it, is asked for its order in memory, which is that of the streams."""
    sides = frozenset(root.elts if isinstance(root, ast.Tuple) else [root])
    splits = {
        node.func for node in effects.flow.nodes if isinstance(node, ast.Call) and _SPLIT_SAMPLES.fill(None, node)
    }
    for node in effects.flow.nodes:
        if isinstance(node, ast.Attribute) and node in splits:
            continue
        if isinstance(node, ast.Attribute) and node.attr in _OF_ORDER and sides & effects.storage(node.value):
            base = node.value.func if isinstance(node.value, ast.Call) else None
            if not (isinstance(base, ast.Attribute) and base.attr == "contiguous"):
                return True
    return False


def is_written(effects: Effects, memory: frozenset[object]) -> bool:
    """Whether a statement writes into one of some storages; calls that are not known are trusted not to."""
    stores = (node for node in effects.flow.nodes if not isinstance(node, ast.Call) or _ends_in_underscore(node))
    return any(memory & effects.written(node) for node in stores)


def is_made_here(effects: Effects, node: ast.expr, shared: Iterable[ast.expr] = ()) -> bool:
    """Whether a function makes all that an expression may be, and neither writes into that, nor keeps or shares it."""
    memory = effects.storage(node)
    if not all(isinstance(root, ast.AST) for root in memory) or is_written(effects, memory):
        return False
    return not any(memory & effects.storage(other) for other in (*_kept(effects), *shared))


def needs_own_memory(effects: Effects, root: ast.expr, match: Match) -> bool:
    """Whether a result may not lie in that of its operands; calls that are not known are trusted not to write."""
    memory = frozenset({root}).union(*[effects.storage(operand.node) for operand in match.operands.values()])
    if is_written(effects, memory):
        return True
    return any(root in effects.storage(node) for node in _kept(effects))


def _kept(effects: Effects) -> list[ast.expr]:
    """What a function returns or keeps."""
    nodes = effects.flow.nodes
    kept = [node.value for node in nodes if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None]
    for node in nodes:
        if isinstance(node, ast.Assign) and not all(isinstance(t, (ast.Name, ast.Tuple)) for t in node.targets):
            kept.append(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEP:
            kept += node.args
    return kept


def _ends_in_underscore(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_")
