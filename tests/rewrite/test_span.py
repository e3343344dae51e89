"""The blocks of a forward as a function of their own: the same bits, and what a CUDA graph could hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from diffkern.rewrite.span import Span, with_span
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.rewritten import batch_of_two, run

#: Models whose heads no graph can hold: they read values, or copy what they make on the CPU.
HEADS = ("chroma", "hunyuan_video15", "lumina2", "omnigen")
#: Models of whose blocks no graph is tried here, with the reason.
UNTRIED = {
    "hidream": "its blocks read how many tokens an expert has",
    "mochi": "its blocks read how many tokens a text has",
    "zimage": "it keeps tables as plain attributes, which stay on the CPU in a copy on meta",
}
USUAL = (*HEADS, "qwenimage", "ltx2", "sdxl")


class Captures(TorchDispatchMode):
    """Refuses copies between devices, which a CUDA graph cannot hold; reads of values refuse themselves on meta."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise RuntimeError(f"{func} on several devices")
        return result


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.exhaustive]) for name in DENOISERS]
)
def test_the_blocks_of_a_denoiser_run_alone_with_the_bits_of_stock_and_a_graph_could_hold_them(name: str) -> None:
    denoiser = DENOISERS[name]
    model: Any = denoiser.in_dtype(torch.device("cpu"), torch.float32)
    arguments = batch_of_two(denoiser, torch.float32)
    stock = run(model, arguments)
    on_meta = copy.deepcopy(model).to("meta")
    spans: list[Span] = []

    def capture(module: nn.Module, span: Span, values: dict[str, Any]) -> tuple[Any, ...]:
        spans.append(span)
        copied = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), values)
        copied = tree_map_only(torch.device, lambda device: torch.device("meta"), copied)
        with Captures():
            span(on_meta, copied)
        return span(module, values)

    forward = with_span(model, capture if name not in UNTRIED else lambda module, span, values: span(module, values))
    assert not isinstance(forward, str), forward
    model.forward = forward.__get__(model)
    assert torch.equal(run(model, arguments), stock)
    assert bool(spans) == (name not in UNTRIED)


class Blocks(nn.Module):
    """A model in the shape of a denoiser."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.last = nn.ModuleList([nn.Linear(4, 4)])
        self.eval().requires_grad_(False)


class Plain(Blocks):
    def forward(self, x: Tensor, scale: float = 2.0, *more: Tensor, residuals: Any = None, **rest: Any) -> Any:
        x = x * scale
        kept = ()
        if residuals is not None:
            step = len(residuals)
        for i, block in enumerate(self.blocks):
            x = block(x)
            kept += (x,)
            if residuals is not None:
                x = x + residuals[i % step]
        before, found = x, [y for y in more]
        del scale
        for block in self.last:
            x += block(x)
        return x, before, kept, found, rest


class Closure(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        def add(y: Tensor) -> Tensor:
            return y + x

        for block in self.blocks:
            x = block(x)
        return add(x)


class Returns(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.ndim > 3:
                return x
        return x


class Frames(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return locals()["x"]  # type: ignore[no-any-return]


class NoLoop(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)  # type: ignore[no-any-return]


def as_written(module: nn.Module, span: Span, values: dict[str, Any]) -> tuple[Any, ...]:
    return span(module, values)


def test_variables_that_may_have_no_value_and_those_that_are_changed_go_in_and_out() -> None:
    model, x = Plain(), torch.randn(2, 4)
    seen: list[dict[str, Any]] = []

    def note(module: nn.Module, span: Span, values: dict[str, Any]) -> tuple[Any, ...]:
        seen.append(values)
        return span(module, values)

    forward: Any = with_span(model, note)
    for options in ({}, {"residuals": [x, 2 * x]}, {"extra": x}):
        expected, result = model(x, 3.0, x, **options), forward(model, x, 3.0, x, **options)
        assert [*map(type, result)] == [*map(type, expected)]
        for one, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            assert torch.equal(one, other)
    assert "step" not in seen[0] and seen[1]["step"] == 2 and "rest" not in seen[0]


def test_the_span_may_begin_at_a_later_loop() -> None:
    model, x, seen = Plain(), torch.randn(2, 4), []

    def note(module: nn.Module, span: Span, values: dict[str, Any]) -> tuple[Any, ...]:
        seen.append(span.lines)
        return span(module, values)

    for skip in (0, 1):
        forward: Any = with_span(model, note, skip)
        assert torch.equal(forward(model, x)[0], model(x)[0])
    (first, end), (later, same) = seen
    assert first < later < end == same
    assert with_span(model, note, 2) == "it has no other loop over blocks"


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Closure, "has a function that sees what the blocks set"),
        (Returns, "leaves it between the blocks"),
        (Frames, "calls locals, which sees more than variables"),
        (NoLoop, "it has no loop over blocks"),
        (lambda: nn.Linear(2, 2), "it has no loop over blocks"),
    ],
)
def test_what_cannot_be_cut_is_left_whole(build: Callable[[], nn.Module], reason: str) -> None:
    found = with_span(build(), as_written)
    assert isinstance(found, str) and found.endswith(reason)
