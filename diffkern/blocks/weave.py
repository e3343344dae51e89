"""Functions that are like one that is there, except for a part of their source that does something else.

The source is compiled and not executed: the new code runs with the globals, the defaults and the decorators of the old
one, in whose file tracebacks and debuggers find it, line by line. Nothing of the old function changes.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import sys
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

#: The name under which the new source calls what is put into it.
INSIDE = "_inside"

_FEATURES = 0
for _name in __future__.all_feature_names:
    _FEATURES |= getattr(__future__, _name).compiler_flag

#: What two pieces of code have in common that do the same, constants aside.
_SAME = ("co_code", "co_names", "co_varnames", "co_freevars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount")

_LOCALS = ".<locals>."


class Pattern:
    """A function that can be woven anew.

    Attributes:
        function: It, without decorators.
        tree: Its source, to be changed before anything is woven.
    """

    def __init__(self, decorated: FunctionType, function: FunctionType, tree: ast.FunctionDef) -> None:
        self._decorated = decorated
        self.function = function
        self.tree = tree
        self._code: CodeType | None = None

    @classmethod
    def of(cls, decorated: Callable[..., Any]) -> Pattern | None:
        """Returns the pattern of a function.

        None if its source is not to be had or is not what runs, edited or generated as it may be, and if a decorator
        keeps the function where nobody sees it.
        """
        function = inspect.unwrap(decorated)
        if not isinstance(decorated, FunctionType) or not isinstance(function, FunctionType):
            return None
        if INSIDE in (*function.__code__.co_names, *function.__code__.co_varnames, *function.__code__.co_freevars):
            return None
        tree = _parsed(function)
        if tree is None or _decorated_anew(decorated, function, function) is None:
            return None
        code = _compiled(tree, function, function.__code__.co_freevars)
        return cls(decorated, function, tree) if code is not None and _same(code, function.__code__) else None

    def weave(self, inside: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with the source as it is now; there, :data:`INSIDE` is the name of ``inside``."""
        stock = self.function
        if self._code is None:  # one for all, by which torch.compile knows what it has traced
            self._code = _compiled(self.tree, stock, (*stock.__code__.co_freevars, INSIDE))
        code = self._code
        assert code is not None
        cells = dict(zip(stock.__code__.co_freevars, stock.__closure__ or (), strict=True))
        cells[INSIDE] = CellType(inside)
        woven = _like(stock, code, tuple(cells[name] for name in code.co_freevars))
        whole = _decorated_anew(self._decorated, stock, woven)
        assert whole is not None
        return whole


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        lines, first = inspect.getsourcelines(function)
        # As it stands in a class, so that positions within a line stay right, too.
        indented = lines[0][:1].isspace()
        parsed = ast.parse("".join(["if True:\n" if indented else "\n", *lines])).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    tree = parsed.body[0] if isinstance(parsed, ast.If) else parsed
    if not isinstance(tree, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, first - 2)
    tree.decorator_list = []
    return tree


def _compiled(tree: ast.FunctionDef, function: FunctionType, free: tuple[str, ...]) -> CodeType | None:
    """The code of a function with these free variables."""
    scope = ast.parse(f"def scope({', '.join(free)}): pass").body[0]
    assert isinstance(scope, ast.FunctionDef)
    scope.body = [copy.deepcopy(tree)]
    # Never run; but calls of what a file imports are compiled in another way.
    imports: list[ast.stmt] = [ast.Import([ast.alias(name)]) for name in sorted(_imported(function))]
    module = ast.fix_missing_locations(ast.Module([*imports, scope], []))
    code = function.__code__
    outer = compile(module, code.co_filename, "exec", code.co_flags & _FEATURES, dont_inherit=True)
    (inner,) = (constant for constant in outer.co_consts if isinstance(constant, CodeType))
    named = [const for const in inner.co_consts if isinstance(const, CodeType) and const.co_name == tree.name]
    return named[0] if len(named) == 1 else None


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
        or _is_from_elsewhere(name, value, function.__module__)
    }


def _is_from_elsewhere(name: str, value: object, module: str) -> bool:
    """Whether an object is known by this name in the file of its class, too, which is another one."""
    home = type(value).__module__
    return home != module and value is not None and getattr(sys.modules.get(home), name, None) is value


def _same(one: CodeType, other: CodeType) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in _SAME):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: object, other: object) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same(one, other)
    if isinstance(one, str) and isinstance(other, str) and _LOCALS in one and _LOCALS in other:
        # Where a function inside is: before Python 3.11 that is a constant of the one around it.
        return one.rpartition(_LOCALS)[2] == other.rpartition(_LOCALS)[2]
    return type(one) is type(other) and one == other


def _decorated_anew(decorated: Any, function: FunctionType, replacement: FunctionType) -> FunctionType | None:
    """``replacement`` with the decorators of ``function``, each of which holds what it decorates in a closure."""
    if decorated is function:
        return replacement
    if not isinstance(decorated, FunctionType):
        return None
    inner = decorated.__dict__["__wrapped__"]
    cells = decorated.__closure__ or ()
    holders = [cell for cell in cells if _content(cell) is inner]
    new = _decorated_anew(inner, function, replacement)
    if new is None or len(holders) != 1:
        return None
    closure = tuple(CellType(new) if cell is holders[0] else cell for cell in cells)
    wrapper = _like(decorated, decorated.__code__, closure)
    wrapper.__dict__["__wrapped__"] = new
    return wrapper


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
