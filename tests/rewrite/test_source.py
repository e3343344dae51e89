"""Only a function whose source is what runs is rewritten, and it keeps its decorators."""

from __future__ import annotations

import functools
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from diffkern.rewrite import Rewriter, rewriter
from diffkern.rewrite.rewriter import SWITCH
from diffkern.rewrite.source import Source
from tests.rewrite.modules import block, leaves, rewritten, written

NAMES = "x, scale, shift"
BODY = "return self.norm(x) * (1 + scale) + shift"


def test_a_function_whose_source_is_not_what_runs_is_declined() -> None:
    module, other = block(NAMES, BODY), block(NAMES, "return self.norm(x) * (2 + scale) + shift")
    type(module).forward.__code__ = type(other).forward.__code__.replace(
        co_filename=type(module).forward.__code__.co_filename
    )
    assert Rewriter().rewrite(module) == "its source is not what runs"


def test_names_imported_under_a_condition_do_not_hide_the_source() -> None:
    from diffusers.models.activations import GEGLU

    module = GEGLU(8, 8).eval().requires_grad_(False)
    x = torch.randn(2, 40, 8)
    found = rewritten(module)
    torch.testing.assert_close(found.function(module, x), module(x))
    assert [site.fused_calls for site in found.sites] == [1]


DECORATED = """
import functools
CALLS = []
REGISTRY = {}

def counted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        CALLS.append(1)
        return function(*args, **kwargs)
    return wrapper

def registered(function):
    registry = {function: 0}
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        registry[function] += 1
        return function(*args, **kwargs)
    return wrapper

class Written(Block):
    @DECORATOR
    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale) + shift
"""


def _decorated(decorator: str) -> tuple[dict[str, Any], nn.Module]:
    scope = written(DECORATED.replace("DECORATOR", decorator))
    return scope, scope["Written"]().eval().requires_grad_(False)


def test_decorators_stay_around_the_rewritten_function() -> None:
    scope, module = _decorated("counted")
    found = rewritten(module)
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert scope["CALLS"] == [1, 1] and found.sites[0].fused_calls == 1


@pytest.mark.parametrize("decorator", ["registered", "torch.compile"])
def test_a_decorator_that_keeps_the_function_elsewhere_is_declined(decorator: str) -> None:
    _, module = _decorated(decorator)
    assert Rewriter().rewrite(module) == "a decorator keeps the function where it cannot be replaced"


def test_globals_are_looked_up_when_they_are_called() -> None:
    source = "FACTOR = 1\nclass Written(Block):\n    def forward(self, x, scale, shift):\n"
    source += "        y = self.norm(x) * (1 + scale) + shift\n        return y * FACTOR\n"
    scope = written(source)
    module = scope["Written"]().eval().requires_grad_(False)
    found = rewritten(module)
    scope["FACTOR"] = 3
    torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))


def test_a_traceback_names_the_line_of_the_source() -> None:
    module = block(NAMES, "y = self.norm(x) * (1 + scale) + shift\nraise ValueError(y.shape)")
    frames = []
    for forward in (type(module).forward, rewritten(module).function):
        with pytest.raises(ValueError) as raised:
            forward(module, **leaves(NAMES))
        frame = traceback.extract_tb(raised.value.__traceback__)[-1]
        frames.append((frame.filename, frame.lineno, frame.name))
    assert frames[0] == frames[1]


def test_threads_share_one_rewritten_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*arguments: Any, **options: Any) -> Any:
        found = make_plan(*arguments, **options)
        time.sleep(0.05)  # long enough for the other threads to come as far
        return found

    make_plan = rewriter.plan
    monkeypatch.setattr(rewriter, "plan", slowly)
    module = block(NAMES, BODY)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Rewriter().rewrite(module), range(16)))
    assert len({id(one.function.__code__) for one in found}) == 1


def test_the_switch_turns_rewriting_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert Rewriter().rewrite(block(NAMES, BODY)) == "rewriting is off: DIFFKERN_REWRITE=0"


def test_a_rewritten_function_is_not_rewritten_again() -> None:
    module = block(NAMES, BODY)
    found = rewritten(module)
    assert isinstance(Source.of(found.function), str)


def test_a_class_that_is_gone_is_not_kept() -> None:
    import gc
    import weakref

    module = block(NAMES, BODY)
    rewritten(module).function(module, **leaves(NAMES))
    gone = weakref.ref(type(module))
    del module
    gc.collect()
    assert gone() is None


def test_wrapping_with_partial_is_declined() -> None:
    assert isinstance(Source.of(functools.partial(print)), str)
