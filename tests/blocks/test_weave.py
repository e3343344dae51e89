"""Functions with a part of their source replaced: what stays, and what is not touched."""

from __future__ import annotations

import ast
import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from diffkern.blocks.weave import INSIDE, Pattern


def replace_products(pattern: Pattern) -> None:
    """Lets ``a * b`` be computed by the inside."""

    class Rewriter(ast.NodeTransformer):
        def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
            self.generic_visit(node)
            if not isinstance(node.op, ast.Mult):
                return node
            return ast.copy_location(ast.Call(ast.Name(INSIDE, ast.Load()), [node.left, node.right], []), node)

    pattern.tree = Rewriter().visit(pattern.tree)


def woven(function: Callable[..., Any], inside: Callable[..., Any]) -> Callable[..., Any]:
    pattern = Pattern.of(function)
    assert pattern is not None
    replace_products(pattern)
    return pattern.weave(inside)


def scaled(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator as libraries have them: it holds the function in a closure, beside something of its own."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return name, function(*args, **kwargs)

        return wrapper

    return decorate


def plain(x: int, y: int = 3, *rest: int, z: int = 4) -> int:
    """Doc."""
    inner = [value * y for value in rest]
    return x * y + z + sum(inner)


@scaled("outer")
@scaled("inner")
def decorated(x: int) -> int:
    return x * 2


def closed_over(factor: int) -> Callable[[int], int]:
    def multiply(x: int) -> int:
        return x * factor

    return multiply


class Base:
    def double(self, x: int) -> int:
        return x * 2


class Derived(Base):
    def double(self, x: int) -> int:
        return super().double(x) * 10


def failing(x: int) -> int:
    y = x * 2
    raise ValueError(y)


def test_arguments_defaults_and_globals_stay() -> None:
    other = woven(plain, lambda a, b: 100 * a + b)
    assert plain(1, 2, 5, z=0) == 12 and plain(1) == 7
    assert other(1, 2, 5, z=0) == 102 + 502 and other(1) == 103 + 4
    assert (other.__name__, other.__doc__, other.__module__) == ("plain", "Doc.", __name__)
    assert other.__globals__ is plain.__globals__  # type: ignore[attr-defined]


def test_decorators_stay_around_it() -> None:
    other = woven(decorated, lambda a, b: (a, b))
    assert other(4) == ("outer", ("inner", (4, 2))) and decorated(4) == ("outer", ("inner", 8))


def test_closures_are_shared() -> None:
    three = closed_over(3)
    other = woven(three, lambda a, b: (a, b))
    assert other(2) == (2, 3) and three(2) == 6
    three.__closure__[0].cell_contents = 5  # type: ignore[index]
    assert other(2) == (2, 5)


def test_super_finds_the_class() -> None:
    other = woven(Derived.double, lambda a, b: (a, b))
    assert other(Derived(), 3) == (6, 10) and Derived().double(3) == 60


def test_a_traceback_shows_the_lines_of_the_source() -> None:
    other = woven(failing, lambda a, b: "from inside")
    with pytest.raises(ValueError, match="from inside") as error:
        other(1)
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert last.filename == __file__ and last.line == "raise ValueError(y)"


def test_source_that_is_not_what_runs_is_left_alone() -> None:
    def edited(x: int) -> int:
        return x * 2

    def newer(x: int) -> int:
        return x * 3

    edited.__code__ = edited.__code__.replace(co_consts=newer.__code__.co_consts)
    assert edited(1) == 3 and Pattern.of(edited) is None and Pattern.of(newer) is not None


def test_what_has_no_source_is_left_alone() -> None:
    scope: dict[str, Any] = {}
    exec("def generated(x):\n    return x * 2", scope)
    for function in (scope["generated"], len, functools.partial(plain, 1), lambda x: x * 2, Base):
        assert Pattern.of(function) is None


def test_a_decorator_that_hides_the_function_is_left_alone() -> None:
    class Hiding:
        def __init__(self, function: Callable[..., Any]) -> None:
            functools.update_wrapper(self, function)

        def __call__(self, x: int) -> int:
            return self.__wrapped__(x)  # type: ignore[attr-defined, no-any-return]

    held = [plain]

    @functools.wraps(plain)
    def by_list(x: int) -> int:
        return held[0](x)

    assert Pattern.of(Hiding(plain)) is None and Pattern.of(by_list) is None
