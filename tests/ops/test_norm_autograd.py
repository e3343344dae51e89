"""Gradients of rms_norm and layer_norm, and what autograd keeps alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern import ops
from tests.ops import reference
from tests.ops.layouts import make, make_parameter

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("rms_norm", {}),
    ("rms_norm", {"weight_offset": 1.0}),
    ("rms_norm", {"clamp_eps": True}),
    ("layer_norm", {}),
]


@pytest.mark.parametrize(("op", "options"), OPTIONS)
@pytest.mark.parametrize("layout", ["matrix", "transposed", "expanded"])
def test_first_and_second_derivatives_are_right_in_float64(
    op: str, options: dict[str, Any], layout: str, device: str
) -> None:
    x = make(layout, 1, 2, 5, torch.float64, device).detach()
    inputs = [x, *(make_parameter("plain", 5, torch.float64, device, seed=seed) for seed in (1, 2))]
    for given in ((True, True), (True, False), (False, True), (False, False)):
        tensors = [x, *(p if keep else None for p, keep in zip(inputs[1:], given, strict=True))]
        leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]

        def call(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            y: Tensor = getattr(ops, op)(x, weight, bias, 1e-3, provider="eager", **options)
            return y

        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize(("op", "options"), OPTIONS)
def test_gradients_agree_with_float64(op: str, options: dict[str, Any], provider: str, device: str) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        for layout in ("matrix", "heads_first", "channel_first"):
            x = make(layout, 2, 9, 40, dtype, device).detach().requires_grad_()
            weight, bias = (make_parameter("plain", 40, dtype, device, seed=seed) for seed in (1, 2))
            leaves = [x, weight.requires_grad_(), bias.requires_grad_()]  # type: ignore[union-attr]
            y = getattr(ops, op)(*leaves, 1e-6, provider=provider, **options)
            upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)
            grads = torch.autograd.grad(y, leaves, upstream)

            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            truth, _ = getattr(reference, op)(*wide, 1e-6, **options)
            for grad, leaf, expected in zip(
                grads, leaves, torch.autograd.grad(truth, wide, upstream.double()), strict=True
            ):
                assert (grad.dtype, grad.shape) == (leaf.dtype, leaf.shape)
                assert reference.relative_error(grad, expected) <= tolerance


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_frozen_weights_let_the_gradient_through_to_the_input(op: str, provider: str, device: str) -> None:
    adapter = torch.nn.Linear(16, 16, bias=False).to(device)
    weight = torch.ones(16, device=device)
    y = getattr(ops, op)(adapter(torch.randn(4, 16, device=device)), weight, provider=provider)
    y.square().sum().backward()
    assert adapter.weight.grad is not None
    assert adapter.weight.grad.isfinite().all()
    assert weight.grad is None


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_the_gradient_of_a_rounded_norm_is_that_of_the_unrounded_formula(op: str, provider: str, device: str) -> None:
    options = {"round_dtype": torch.bfloat16} if op == "rms_norm" else {}
    x = make("matrix", 1, 8, 64, torch.bfloat16, device).detach().requires_grad_()
    weight = torch.full((64,), 1.5, device=device, requires_grad=True)
    y = getattr(ops, op)(x, weight, out_dtype=torch.float32, provider=provider, **options)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(device)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), upstream)
    assert (grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)

    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    truth, _ = getattr(reference, op)(*wide, None, {"rms_norm": 1e-6, "layer_norm": 1e-5}[op])
    for grad, expected, bound in zip(
        (grad_x, grad_weight), torch.autograd.grad(truth, wide, upstream.double()), (8e-3, 1e-5), strict=True
    ):
        assert reference.relative_error(grad, expected) <= bound


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_nothing_outlives_a_call_without_grad(op: str, provider: str, device: str) -> None:
    weight = torch.ones(64, device=device, requires_grad=True)

    def one_call() -> list[weakref.ref[Tensor]]:
        x = torch.randn(3, 64, device=device)
        y = getattr(ops, op)(x, weight, provider=provider)
        assert y.grad_fn is None
        return [weakref.ref(x), weakref.ref(y)]

    with torch.inference_mode():
        assert all(ref() is None for ref in one_call())
    with torch.no_grad():
        one_call()
        gc.collect()
        tensors = _count_tensors()
        references = [ref for _ in range(50) for ref in one_call()]
        assert all(ref() is None for ref in references), "a tensor lives until the cycle collector comes"
        gc.collect()
        assert _count_tensors() <= tensors


def _count_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_with_grad_the_graph_is_all_that_keeps_the_input(op: str, provider: str, device: str) -> None:
    weight = torch.ones(64, device=device, requires_grad=True)
    x = torch.randn(3, 64, device=device)
    alive = weakref.ref(x)
    y = getattr(ops, op)(x, weight, provider=provider)
    del x
    assert alive() is not None
    y.sum().backward()
    del y
    gc.collect()
    assert alive() is None
