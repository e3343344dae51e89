"""Gradients of modulated norms and gated residuals, what autograd keeps, and the registered ops."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diffkern import ops
from diffkern.ops import gate_residual, gate_residual_norm_modulate, norm_modulate
from tests.ops import modulation
from tests.ops.modulation import make_modulation
from tests.ops.reference import relative_error

NORMS = ["rms", "layer", None]
ACTIVATIONS = [None, "tanh", "sigmoid"]


def leaf(*shape: int, device: str, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device).requires_grad_()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("broadcast", ["sample", "token", "row"])
def test_derivatives_of_norm_modulate_are_right_in_float64(norm: str | None, broadcast: str, device: str) -> None:
    shape = {"sample": (2, 1, 4), "token": (2, 3, 4), "row": (4,)}[broadcast]
    x, scale, shift = leaf(2, 3, 4, device=device), leaf(*shape, device=device, seed=1), leaf(4, device=device, seed=2)
    weight, bias = (leaf(4, device=device, seed=seed) if norm else None for seed in (3, 4))

    def call(*tensors: Any, offset: float = 1.0) -> Tensor:
        return norm_modulate(*tensors, eps=1e-3, norm=norm, scale_offset=offset)  # type: ignore[arg-type]

    for inputs in ((x,), (x, scale), (x, None, shift), (x, None, None, weight), (x, scale, None, None, bias)):
        assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradcheck(functools.partial(call, offset=0.0), (x, scale, shift, weight, bias))
    assert torch.autograd.gradgradcheck(call, (x, scale, shift, weight, bias), fast_mode=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_of_gate_residual_are_right_in_float64(activation: str | None, device: str) -> None:
    residual, x = leaf(2, 3, 4, device=device), leaf(2, 3, 4, device=device, seed=1)
    for gate in (None, leaf(2, 1, 4, device=device, seed=2), leaf(4, device=device, seed=3)):

        def call(*tensors: Any) -> Tensor:
            return gate_residual(*tensors, gate_activation=activation)  # type: ignore[arg-type]

        assert torch.autograd.gradcheck(call, (residual, x, gate))
        assert torch.autograd.gradgradcheck(call, (residual, x, gate), fast_mode=True)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", [None, "tanh"])
def test_derivatives_of_both_in_one_are_right_in_float64(norm: str | None, activation: str | None, device: str) -> None:
    residual, x = leaf(2, 3, 4, device=device), leaf(1, 3, 4, device=device, seed=1)
    gate, scale, shift = (leaf(2, 1, 4, device=device, seed=seed) for seed in (2, 3, 4))
    weight = leaf(4, device=device, seed=5) if norm else None

    def call(*tensors: Any) -> tuple[Tensor, Tensor]:
        return gate_residual_norm_modulate(*tensors, eps=1e-3, norm=norm, gate_activation=activation)  # type: ignore[arg-type]

    for inputs in (
        (residual, x, gate, scale, shift, weight),
        (residual, x, None, scale, None, weight),
        (residual.detach(), x.detach(), gate.detach(), scale, shift, weight),
    ):
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_agree_with_float64(dtype: torch.dtype, provider: str, device: str) -> None:
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3
    x, residual = (torch.randn(2, 8, 64, device=device).to(dtype).requires_grad_() for _ in range(2))
    mods = [make_modulation("token_unbind", (2, 8, 64), dtype, device, seed=seed) for seed in (1, 2, 3)]
    leaves = [residual, x, *(mod.detach().clone().requires_grad_() for mod in mods if mod is not None)]
    new, y = gate_residual_norm_modulate(*leaves, provider=provider)
    upstream = [torch.randn(2, 8, 64, device=device).to(dtype) for _ in range(2)]
    grads = torch.autograd.grad((new, y), leaves, upstream)

    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    truth, _ = modulation.gate_residual(*wide[:3])
    modulated, _ = modulation.norm_modulate(truth, *wide[3:])
    expected = torch.autograd.grad((truth, modulated), wide, [grad.double() for grad in upstream])
    for grad, tensor, wanted in zip(grads, leaves, expected, strict=True):
        assert (grad.dtype, grad.shape) == (tensor.dtype, tensor.shape)
        assert relative_error(grad, wanted) <= tolerance


def saved_by(y: Tensor) -> list[Tensor]:
    """What the node that made ``y`` keeps for its backward."""
    assert y.grad_fn is not None
    return [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None]  # type: ignore[attr-defined]


def test_only_what_a_gradient_needs_is_kept(provider: str, device: str) -> None:
    x, scale, shift = (torch.randn(2, 3, 8, device=device) for _ in range(3))
    wants = {name: tensor.clone().requires_grad_() for name, tensor in (("x", x), ("scale", scale), ("shift", shift))}
    assert saved_by(norm_modulate(x, scale, wants["shift"], provider=provider)) == []
    kept = saved_by(norm_modulate(x, wants["scale"], shift, provider=provider))
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    kept = saved_by(norm_modulate(wants["x"], scale, shift, norm=None, provider=provider))
    assert [tensor.data_ptr() for tensor in kept] == [scale.data_ptr()]
    kept = saved_by(gate_residual(wants["x"], x, scale, provider=provider))
    assert kept == []
    kept = saved_by(gate_residual(x, wants["x"], scale, provider=provider))
    assert [tensor.data_ptr() for tensor in kept] == [scale.data_ptr()]


CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm_modulate": ("norm_modulate", ("x", "m", "m", "w", "w", 1e-5, 2, 1.0, False)),
    "norm_modulate_defaults": ("norm_modulate", ("x",)),
    "modulate": ("norm_modulate", ("x", "m", None, None, None, 1e-6, 0)),
    "gate_residual": ("gate_residual", ("x", "x", "m", 1, True)),
    "gate_residual_defaults": ("gate_residual", ("x", "x")),
    "both": ("gate_residual_norm_modulate", ("x", "x", "m", "m", "m", "w")),
    "both_defaults": ("gate_residual_norm_modulate", ("x", "x")),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_passes(name: str, provider: str, device: str) -> None:
    op, names = CALLS[name]
    for grad, dtype, other in ((True, torch.float32, torch.float32), (False, torch.bfloat16, torch.float32)):
        x = torch.randn(2, 8, 3, device=device).to(dtype).transpose(1, 2)
        modulation_row = torch.randn(2, 1, 6, 8, device=device).to(other).unbind(2)[1]
        weight = torch.randn(8, device=device).to(dtype)
        made = {"x": x, "m": modulation_row, "w": weight}
        arguments = tuple(
            made[argument].detach().clone().requires_grad_(grad) if isinstance(argument, str) else argument
            for argument in names
        )
        torch.library.opcheck(getattr(torch.ops.diffkern, op), arguments, {"provider": provider})


@pytest.mark.parametrize("name", CALLS)
def test_the_fake_result_is_like_the_real_one(name: str, provider: str, device: str) -> None:
    op, names = CALLS[name]
    made = {
        "x": torch.randn(2, 8, 3, device=device).bfloat16().transpose(1, 2),
        "m": torch.randn(2, 1, 8, device=device),
        "w": torch.randn(8, device=device),
    }
    arguments = [made[argument] if isinstance(argument, str) else argument for argument in names]
    real = getattr(torch.ops.diffkern, op)(*arguments, provider=provider)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments]
        fake = getattr(torch.ops.diffkern, op)(*fakes, provider=provider)
    pairs = zip(fake, real, strict=True) if isinstance(real, tuple) else [(fake, real)]
    for ours, theirs in pairs:
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert ours.stride() == theirs.stride()


def test_a_block_compiles_without_a_graph_break(provider: str, device: str) -> None:
    torch.compiler.reset()

    def block(x: Tensor, table: Tensor) -> Tensor:
        shift, scale, gate = table.unbind(-2)
        y = norm_modulate(x, scale, shift, eps=None, provider=provider)
        residual, y = gate_residual_norm_modulate(
            x, y * 2, gate, scale, shift, norm="layer", gate_activation="tanh", rounding="each", provider=provider
        )
        return ops.gate_residual(residual, y, provider=provider)

    x, table = torch.randn(2, 5, 16, device=device), torch.randn(2, 1, 3, 16, device=device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, table), block(x, table), rtol=0, atol=0)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, table)]
    grads = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    expected = torch.autograd.grad(block(*leaves).square().sum(), leaves)
    for grad, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


def test_compile_with_dynamic_shapes_compiles_once(provider: str, device: str) -> None:
    torch.compiler.reset()
    scale = torch.randn(2, 1, 16, device=device)
    compiled = torch.compile(
        lambda x: norm_modulate(x, scale, provider=provider), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 8, 33):
            x = torch.randn(2, rows, 16, device=device)
            torch.testing.assert_close(compiled(x), norm_modulate(x, scale, provider=provider), rtol=0, atol=0)
