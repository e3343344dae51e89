"""Calls of modules in rewritten forwards: quick, and as they are written where something watches them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from diffusers.models.embeddings import TimestepEmbedding
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from diffkern import inject_optimized_kernels
from diffkern.rewrite.layers import call_layer, call_module
from diffkern.rewrite.twins import twin_of
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.model import Draw


class Called(Exception):
    """Something that a call must not pass by."""


def _raise(*given: Any, **options: Any) -> Any:
    raise Called


class Calls(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def _hook(kind: str) -> Callable[[nn.Module, pytest.MonkeyPatch], Any]:
    return lambda layer, _: getattr(layer, f"register_{kind}")(_raise)


def _own_forward(layer: nn.Module, _: pytest.MonkeyPatch) -> None:
    layer.forward = MethodType(_raise, layer)


def _compiled(layer: nn.Module, _: pytest.MonkeyPatch) -> None:
    layer._compiled_call_impl = _raise


def _of_class(name: str) -> Callable[[nn.Module, pytest.MonkeyPatch], Any]:
    return lambda layer, patched: patched.setattr(type(layer), name, _raise)


def _of_all(name: str) -> Callable[[nn.Module, pytest.MonkeyPatch], Any]:
    return lambda _, patched: patched.setattr(nn.Module, name, _raise)


def _global(kind: str) -> Callable[[nn.Module, pytest.MonkeyPatch], Any]:
    return lambda _, __: getattr(nn.modules.module, f"register_module_{kind}")(_raise)


_WATCHED = {
    "forward_hook": _hook("forward_hook"),
    "forward_pre_hook": _hook("forward_pre_hook"),
    "global forward_hook": _global("forward_hook"),
    "global forward_pre_hook": _global("forward_pre_hook"),
    "forward of the module": _own_forward,
    "compiled": _compiled,
    "forward of the class": _of_class("forward"),
    "__call__": _of_all("__call__"),
    "_call_impl": _of_all("_call_impl"),
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("watch", _WATCHED.values(), ids=_WATCHED)
@pytest.mark.parametrize("call", [call_layer, call_module])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(8, 4), nn.SiLU, lambda: nn.Dropout().eval(), lambda: FeedForward(8)]
)
def test_what_watches_a_call_or_takes_its_place_is_called(
    watch: Any, call: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(), torch.randn(2, 8)
    assert torch.equal(call(layer, x), layer(x)) and torch.equal(call(layer, x), layer(x))
    handle = watch(layer, monkeypatch)
    try:
        with pytest.raises(Called):
            call(layer, x)
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("register", [nn.Module, nn.modules.module], ids=["module", "global"])
def test_hooks_see_a_backward(kind: str, register: Any) -> None:
    layer, seen = nn.Linear(8, 4), []
    name = f"register_{kind}" if register is nn.Module else f"register_module_{kind}"
    hook: Any = lambda *given: seen.append(given)  # noqa: E731
    handle = getattr(layer, name)(hook) if register is nn.Module else getattr(register, name)(hook)
    with torch.enable_grad():
        call_layer(layer, torch.randn(2, 8, requires_grad=True)).sum().backward()
    handle.remove()
    assert len(seen) == 1


@pytest.mark.parametrize("where", ["weight", "bias"])
def test_a_parameter_that_became_an_attribute_is_read(where: str) -> None:
    layer, x = nn.Linear(8, 4), torch.randn(2, 8)
    before = call_layer(layer, x)
    value = getattr(layer, where).detach() + 1
    layer.__dict__[where] = value  # hides the parameter
    assert torch.equal(call_layer(layer, x), layer(x)) and not torch.equal(layer(x), before)
    del layer._parameters[where]
    assert torch.equal(call_layer(layer, x), layer(x)) and not torch.equal(layer(x), before)


def test_a_subclass_computes_what_it_computes() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer, x = Doubled(8, 4), torch.randn(2, 8)
    assert torch.equal(call_layer(layer, x), 2 * F.linear(x, layer.weight, layer.bias))


def test_a_dropout_drops_in_training_and_modes_see_its_function() -> None:
    layer, x = nn.Dropout(0.5), torch.ones(64, 64)
    assert call_layer(layer, x).eq(0).any() and call_layer(layer.eval(), x) is x
    with Calls() as calls:
        call_layer(layer, x)
    assert F.dropout in calls.functions


def test_modes_see_the_functions_that_a_module_calls() -> None:
    stock, x = TimestepEmbedding(8, 16), torch.randn(2, 8)
    twin, seen = twin_of(TimestepEmbedding.forward), []
    assert twin is not None
    for run in (lambda: stock(x), lambda: twin(stock, x)):
        with Calls() as calls:
            run()
        seen.append([function for function in calls.functions if "linear" in str(function) or "silu" in str(function)])
    assert seen[0] == seen[1] and len(seen[0]) == 3


def test_a_function_of_the_file_that_is_replaced_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers import transformer_flux

    injected = DENOISERS["flux"].build()
    inject_optimized_kernels(injected)
    inputs = DENOISERS["flux"].inputs(Draw(torch.Generator().manual_seed(1), torch.device("cpu"), torch.float32), 8)
    for _ in range(4):
        injected(**inputs)
    monkeypatch.setattr(transformer_flux, "_get_qkv_projections", _raise)
    with pytest.raises(Called):
        injected(**inputs)


@pytest.mark.parametrize("name", ["flux", "wan", "hidream", "sd15"])
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_hooks_deep_in_a_model_see_the_calls_that_they_see_in_stock(name: str, mode: Any) -> None:
    stock = DENOISERS[name].build()
    injected = copy.deepcopy(stock)
    inject_optimized_kernels(injected)
    inputs = DENOISERS[name].inputs(Draw(torch.Generator().manual_seed(1), torch.device("cpu"), torch.float32), 8)
    with mode():
        for _ in range(4):
            injected(**inputs)
        seen: list[list[str]] = []
        for model in (stock, injected):
            paths: list[str] = []
            for path, module in model.named_modules():
                if type(module) in (nn.Linear, nn.SiLU, nn.Dropout, FeedForward):
                    module.register_forward_hook(lambda *_, path=path, paths=paths: paths.append(path))
            model(**inputs)
            seen.append(paths)
    assert seen[0] and sorted(seen[1]) == sorted(seen[0])


def test_an_object_that_is_no_module_is_called_as_it_is() -> None:
    injected = DENOISERS["flux"].build()
    for block in injected.single_transformer_blocks:
        del block.act_mlp
        block.act_mlp = torch.ops.aten.silu.default
    stock = copy.deepcopy(injected)
    inject_optimized_kernels(injected)
    inputs = DENOISERS["flux"].inputs(Draw(torch.Generator().manual_seed(1), torch.device("cpu"), torch.float32), 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(injected(**inputs)[0], stock(**inputs)[0], rtol=1e-4, atol=1e-4)
