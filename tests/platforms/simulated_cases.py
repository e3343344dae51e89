"""Cases on a device that exists in name only; run in a process of its own, since its name is given once per process.

PyTorch lets Python stand in for a backend (``PrivateUse1``): tensors say that they are on the device, and hold one on
the CPU that computes. What this shows is how diffkern maps and falls back; it claims nothing of any real device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils import backend_registration

from diffkern import InjectionError, inject_optimized_kernels
from diffkern.attention import BACKENDS, AttentionCall, Route
from diffkern.ops import glu, layer_norm, rms_norm, rope
from diffkern.providers import OPS, explain, select

NAME = "npu"

backend_registration._setup_privateuseone_for_python_backend(NAME)


class Elsewhere(Tensor):
    """A tensor on the device, and the one on the CPU that it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=f"{NAME}:0", strides=held.stride()
        )
        wrapper.held = held
        return wrapper  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, *args, **(kwargs or {}))


def compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs an operator on what the tensors hold."""

    def inside(value: Any) -> Any:
        if isinstance(value, Elsewhere):
            return value.held
        return torch.device("cpu") if isinstance(value, torch.device) else value

    result = function(*pytree.tree_map(inside, args), **pytree.tree_map(inside, kwargs))
    return pytree.tree_map(lambda value: Elsewhere(value) if isinstance(value, Tensor) else value, result)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    held = [x.held if isinstance(x, Elsewhere) else x for x in (source, target)]
    held[1].copy_(held[0])
    return target


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty_strided", partial(compute, torch.ops.aten.empty_strided.default), "PrivateUse1")
_library.impl("empty.memory_format", partial(compute, torch.ops.aten.empty.memory_format), "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")


def moved(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.data.to(NAME), requires_grad=False)
    return model


def test_there_is_such_a_device() -> None:
    x = torch.randn(3, 4)
    assert x.to(NAME).device == torch.device(NAME, 0) and torch.equal(x.to(NAME).cpu().held, x)  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", OPS)
def test_plain_pytorch_serves_it_and_the_others_say_why_not(op: str) -> None:
    choice = select(op, torch.device(NAME, 0), (torch.float32,))
    assert choice.provider == "eager"
    for provider, reason in explain(op, torch.device(NAME, 0), (torch.float32,)).items():
        assert provider == "eager" or (reason and (NAME in reason or reason.startswith(("has no", "not asked for"))))


def test_ops_are_right_on_it() -> None:
    x, weight = torch.randn(2, 5, 8), torch.randn(8)
    cos, sin = torch.randn(2, 5, 8).unbind(0)
    for function, arguments in (
        (rms_norm, (x, weight)),
        (layer_norm, (x, weight, weight)),
        (glu, (x, x.flip(0), "silu")),
        (rope, (x, cos, sin)),
    ):
        there = [Elsewhere(value) if isinstance(value, Tensor) else value for value in arguments]
        y = function(*there)
        assert y.device == torch.device(NAME, 0)
        torch.testing.assert_close(y.held, function(*arguments, provider="eager"))


def test_a_model_on_it_is_injected_runs_and_is_restored() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.RMSNorm(16))
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
        moved(model)
        report = inject_optimized_kernels(model)
        assert not report.patched
        assert all("only plain PyTorch could serve it" in site.reason for site in report.skipped)
        assert all(f"for {NAME} (serves" in site.reason for site in report.skipped)
        report = inject_optimized_kernels(model, config={"layer_norm": "eager", "rms_norm": "eager"})
        assert [site.provider for site in report.patched] == ["eager", "eager"]
        assert torch.equal(model(Elsewhere(x)).held, expected)
        assert report.restore() == 2
        with pytest.raises(InjectionError, match=NAME):
            inject_optimized_kernels(model, strict=True)


def test_attention_on_it_runs_as_before() -> None:
    q = Elsewhere(torch.randn(1, 4, 2, 8))
    route = Route([backend for backend in BACKENDS.values() if backend.candidate], auto=True)
    call = AttentionCall(q, q, q)
    stock = BACKENDS["native"].compute
    assert torch.equal(route(call, stock).held, stock(call).held)  # type: ignore[attr-defined]
    assert dict(route.stock_calls) == {"a tensor is of a class of its own": 1}
    for name in ("flash", "_native_cudnn", "sage"):
        assert BACKENDS[name].refusal(call.signature()) == "runs on cuda only"
