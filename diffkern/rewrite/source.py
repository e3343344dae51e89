"""Reads the source of a function, checks that this source is what runs, and recompiles it after a change.

The source is compiled, never executed: the new code runs with the globals, the defaults, the free variables and the
decorators of the old function, in whose file tracebacks and debuggers find it line by line. Nothing of the old function
changes.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from symtable import symtable
from threading import RLock
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

#: Held while a function is read or rewritten: threads that meet the same class share one result.
LOCK = RLock()

_FEATURES = 0
for _name in __future__.all_feature_names:
    _FEATURES |= getattr(__future__, _name).compiler_flag

#: What two code objects have in common that do the same, constants aside.
_SAME = ("co_code", "co_names", "co_varnames", "co_freevars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount")

_LOCALS = ".<locals>."


@dataclass(frozen=True, eq=False)
class Source:
    """A function whose source is known to be what runs.

    Attributes:
        decorated: The function with its decorators.
        function: The function without them.
        tree: Its source. Large: it is dropped once a changed copy is compiled.
    """

    decorated: FunctionType
    function: FunctionType
    tree: ast.FunctionDef

    @classmethod
    def of(cls, decorated: Callable[..., Any]) -> Source | str:
        """Returns the source of a function, or the reason why it cannot be rewritten."""
        if not isinstance(decorated, FunctionType):
            return f"it is a {type(decorated).__name__}, not a Python function"
        function = inspect.unwrap(decorated)
        if not isinstance(function, FunctionType):
            return "a decorator wraps something that is not a Python function"
        with LOCK:
            if _redecorated(decorated, function, function) is None:
                return "a decorator keeps the function where it cannot be replaced"
            tree = _parsed(function)
            if tree is None:
                return "its source is not available"
            free = function.__code__.co_freevars
            for imported in (_imported, _imported_in_file):
                code = compiled(tree, function, free, imported(function))
                if code is not None and _same(code, function.__code__):
                    return cls(decorated, function, tree)
        return "its source is not what runs"

    def code(self, tree: ast.FunctionDef, names: Iterable[str] = ()) -> CodeType:
        """Compiles a changed tree, which may use ``names`` beside the free variables of the function."""
        free = (*self.function.__code__.co_freevars, *names)
        code = compiled(tree, self.function, free, _imported(self.function))
        assert code is not None, "the rewritten function lost its name"
        return code


def recompile(decorated: FunctionType, code: CodeType, values: Mapping[str, Any]) -> FunctionType:
    """Returns a function like ``decorated``, its decorators around other code, in which ``values`` are bound.

    Args:
        decorated: A function that :class:`Source` accepted.
        code: What :meth:`Source.code` made of it.
        values: What the names mean that were added; they are free variables of the new function.
    """
    function = inspect.unwrap(decorated)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells.update({name: CellType(value) for name, value in values.items()})
    new = _like(function, code, tuple([cells[name] for name in code.co_freevars]))
    whole = _redecorated(decorated, function, new)
    assert whole is not None, "the decorators were rebuilt before"
    return whole


def compiled(
    tree: ast.FunctionDef, function: FunctionType, free: tuple[str, ...], imported: set[str]
) -> CodeType | None:
    """Compiles a function with these free variables in the file of ``function``."""
    # The imports are never run, but Python compiles calls of imported names in another way.
    imports = "".join([f"import {name}\n" for name in sorted(imported)])
    module = ast.parse(f"{imports}def scope({', '.join(free)}): pass")
    module.body[-1].body = [tree]  # type: ignore[attr-defined]
    code = function.__code__
    outer = compile(module, code.co_filename, "exec", code.co_flags & _FEATURES, dont_inherit=True)
    (inner,) = (constant for constant in outer.co_consts if isinstance(constant, CodeType))
    named = [const for const in inner.co_consts if isinstance(const, CodeType) and const.co_name == tree.name]
    return named[0] if len(named) == 1 else None


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        lines, first = inspect.getsourcelines(function)
        # At its place in the file, and as it stands in a class, so that all positions are right.
        head = "\n" * (first - 2) + "if True:\n" if lines[0][:1].isspace() else "\n" * (first - 1)
        parsed = ast.parse("".join([head, *lines])).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    tree = parsed.body[0] if isinstance(parsed, ast.If) else parsed
    if not isinstance(tree, ast.FunctionDef):
        return None
    tree.decorator_list = []
    return tree


def _imported(function: FunctionType) -> set[str]:
    """Names of modules, functions and classes from elsewhere that the code may use."""
    names: set[str] = set()
    codes = [function.__code__]
    for code in codes:  # which grows meanwhile
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    found = {name: function.__globals__.get(name) for name in names}
    return {
        name
        for name, value in found.items()
        if isinstance(value, ModuleType)
        or (isinstance(value, (type, FunctionType)) and value.__module__ != function.__module__)
    }


def _imported_in_file(function: FunctionType) -> set[str]:
    """The same, with every global that the file imports, under whatever condition."""
    return _imported(function) | _imports_of(function.__module__)


@cache
def _imports_of(module: str) -> set[str]:
    try:
        table = symtable(inspect.getsource(sys.modules[module]), module, "exec")
    except (KeyError, OSError, TypeError, SyntaxError):
        return set()
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported()}


def _same(one: CodeType, other: CodeType) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in _SAME):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, str) and isinstance(other, str) and _LOCALS in one and _LOCALS in other:
        # Where a nested function is: before Python 3.11 that is a constant of the function around it.
        return one.rpartition(_LOCALS)[2] == other.rpartition(_LOCALS)[2]
    return type(one) is type(other) and one == other


# --- decorators ----------------------------------------------------------------------------------------


def _redecorated(decorated: Any, function: FunctionType, replacement: FunctionType) -> FunctionType | None:
    """``replacement`` with the decorators of ``function``; None if one does not hold it in exactly one cell."""
    if decorated is function:
        return replacement
    if not isinstance(decorated, FunctionType) or hasattr(decorated, "_torchdynamo_orig_callable"):
        return None
    inner = decorated.__dict__["__wrapped__"]
    cells = decorated.__closure__ or ()
    holders = [cell for cell in cells if _content(cell) is inner]
    if len(holders) != 1 or _keeps(decorated, function) or _keeps(decorated, inner):
        return None
    new = _redecorated(inner, function, replacement)
    if new is None:
        return None
    closure = tuple(CellType(new) if cell is holders[0] else cell for cell in cells)
    wrapper = _like(decorated, decorated.__code__, closure)
    wrapper.__dict__["__wrapped__"] = new
    return wrapper


def _keeps(wrapper: FunctionType, function: FunctionType) -> bool:
    """Whether a wrapper reaches the function by another way than the cell that calls it: a registry, say."""
    reached = [_content(cell) for cell in wrapper.__closure__ or ()]
    reached += [wrapper.__globals__.get(name) for name in wrapper.__code__.co_names]
    reached += [wrapper.__defaults__, wrapper.__kwdefaults__]
    reached += [value for name, value in wrapper.__dict__.items() if name != "__wrapped__"]
    return any(value is not function and _holds(value, function) for value in reached)


def _holds(value: Any, function: FunctionType) -> bool:
    if isinstance(value, dict):
        return any(part is function for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(part is function for part in value)
    if isinstance(value, (type, ModuleType, FunctionType)):
        return False
    try:
        return any(part is function for part in vars(value).values()) or getattr(value, "func", None) is function
    except TypeError:  # without a __dict__
        return getattr(value, "func", None) is function


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    new = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__qualname__, new.__module__, new.__doc__ = function.__qualname__, function.__module__, function.__doc__
    new.__dict__.update(function.__dict__)
    return new
