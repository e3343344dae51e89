"""Kernels of the package ``liger-kernel``, for training: each with a backward of its own.

They do not take part in the order of the providers: nothing here serves unless it is asked for, with the flags that
the package itself has. The kernels are called, and not patched in as the package's own ``apply_liger_kernel_to_*`` do
it, which replace classes and functions for every model of the process.

The kernels save memory by writing over what they were given: rotated over plain queries, gradients over activations
and logits. Here they are given copies, so that hooks, a returned ``logits`` and a second backward find what they
expect; where a copy would cost what the kernel is there to save, a second backward raises.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.base import mark_file_errors
from diffkern.providers.registry import Choice
from diffkern.providers.triton.availability import unavailable_reason as triton_unavailable_reason

NAME = "liger"
#: Activations of gated units, with the names that Liger has for these; it has none with the GELU of the error function.
GATED = {"silu": "swiglu", "gelu_tanh": "geglu"}

#: The contract of :func:`fused_linear_cross_entropy` for gradients in float16 and bfloat16: their error against float64
#: is at most this much of stock's. Without logits to go back to, they are finished in the forward, in the dtype of the
#: model, and what they are multiplied by on the way back (a share of several batches, a loss scale) costs one rounding
#: more than stock's: 1.2 to 1.35 times its error. Not multiplied, and in float32, they are as accurate as stock's.
LINEAR_LOSS_GRADIENT_RATIO = 1.5


@dataclass(frozen=True)
class Flags:
    """What Liger shall compute where gradients are wanted, with the names and the defaults that it has itself.

    Attributes:
        rope: Rotary embedding of queries and keys.
        swiglu: The inside of gated feed-forwards; the GELU ones too, as in Liger.
        cross_entropy: The loss of a language model, from its logits.
        fused_linear_cross_entropy: The loss of a language model, from its hidden states: there are no logits then.
        rms_norm: RMS norms.

    Raises:
        ValueError: both losses are asked for.
    """

    rope: bool = True
    swiglu: bool = True
    cross_entropy: bool = False
    fused_linear_cross_entropy: bool = True
    rms_norm: bool = True

    def __post_init__(self) -> None:
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise ValueError(
                "liger: cross_entropy and fused_linear_cross_entropy are two ways to one loss: switch one of them off"
            )

    @classmethod
    def of(cls, wish: Any) -> Flags | None:
        """Reads what a user says: True for the defaults, a dict of flags, or None or False for nothing.

        Raises:
            ValueError: it is none of these, or a flag does not exist.
        """
        if wish is None or wish is False:
            return None
        if wish is True:
            return cls()
        if isinstance(wish, cls):
            return wish
        names = [field.name for field in fields(cls)]
        if not isinstance(wish, dict) or not all(isinstance(value, bool) for value in wish.values()):
            raise ValueError(f"liger={wish!r}: pass True, or a dict of {', '.join(names)} to True or False")
        for name in wish:
            if name not in names:
                raise ValueError(f"liger has no flag {name!r}: its flags are {', '.join(names)}")
        return cls(**{"fused_linear_cross_entropy": not wish.get("cross_entropy", False), **wish})


def named(choice: Choice) -> Choice:
    """A choice of who computes something, where Liger does it if gradients are wanted."""
    return replace(choice, provider=f"{choice.provider}+{NAME}")


def unavailable_reason(device: torch.device) -> str | None:
    """Says why nothing of Liger runs on ``device``, and what to do, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed: pip install liger-kernel"
    reason = triton_unavailable_reason(device)
    if reason is not None:
        return reason
    try:
        _package()
    except Exception as error:  # an old, a broken or a future package may raise anything
        return f"the package liger-kernel cannot be used ({type(error).__name__}: {error}): update it"
    return None


@mark_file_errors
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    """RMS norm over the last dimension.

    Args:
        x: Input ``[..., D]``.
        weight: Multiplier ``[D]``, of the dtype of ``x``.
        eps: Added to the mean square.
        offset: Added to the weight.
        casting: ``"llama"`` rounds the normalised value to the dtype of ``x`` before it is multiplied, ``"gemma"``
            rounds the product alone.
    """
    in_place = False
    return _package().rms_norm.LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)  # type: ignore[no-any-return]


@mark_file_errors
def glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, for the activations of :data:`GATED`."""
    name = GATED[activation]
    kernels = getattr(_package(), name)
    forward, backward = getattr(kernels, f"{name}_forward"), getattr(kernels, f"{name}_backward")
    return _Gated.apply(gate, up, forward, backward)  # type: ignore[no-any-return]


@mark_file_errors
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates halves of queries and keys ``[B, H, S, D]``, by angles ``[B or 1, S, D]``."""
    return _Rotated.apply(q, k, cos, sin)  # type: ignore[no-any-return]


@mark_file_errors
def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Mean cross entropy of logits ``[N, V]`` in float32, to which they are copied; differentiable once.

    Args:
        logits: Logits.
        target: Classes ``[N]``.
        ignore_index: The class of rows that do not count.
    """
    wide = logits.to(torch.float32, copy=True)
    result = _package().cross_entropy.LigerCrossEntropyFunction.apply(wide, target, None, ignore_index)
    return _Once.apply(result[0])  # type: ignore[no-any-return]


@mark_file_errors
def fused_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Mean cross entropy of ``x @ weight.T``, some rows at a time, without the logits; differentiable once.

    Args:
        x: Hidden states ``[N, D]``.
        weight: ``[V, D]``.
        target: Classes ``[N]``.
        ignore_index: The class of rows that do not count.
    """
    bias = class_weight = softcap = None
    options = (0.0, 0.0, "mean", softcap, False, torch.float32)
    result = _package().fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction.apply(
        x, weight, target, bias, class_weight, ignore_index, *options
    )
    return _Once.apply(result[0])  # type: ignore[no-any-return]


@cache
def _package() -> ModuleType:
    """The package's ops, each in a module of its own."""
    for name in ("rms_norm", "swiglu", "geglu", "rope", "cross_entropy", "fused_linear_cross_entropy"):
        import_module(f"liger_kernel.ops.{name}")
    return import_module("liger_kernel.ops")


class _Gated(torch.autograd.Function):
    """A gated unit whose backward kernel writes the gradients over its inputs: over copies of them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, run: Callable[..., Any], back: Callable[..., Any]) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.back = back
        y: Tensor = run(gate, up)[-1]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return (*ctx.back(gate.clone(), up.clone(), grad.contiguous()), None, None)


class _Rotated(torch.autograd.Function):
    """A rotation whose kernels write over queries, keys and their gradients: over copies of them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k, *_ = _package().rope.rope_forward(_copy(q), _copy(k), cos, sin)
        return q, k

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad_q, grad_k = _package().rope.rope_backward(_copy(grad_q), _copy(grad_k), cos, sin)
        return grad_q, grad_k, None, None


class _Once(torch.autograd.Function):
    """A loss whose gradients are ready before the backward, which scales them where they are."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        ctx.done = False
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.done:
            raise RuntimeError(
                "the losses of liger-kernel are differentiable once: for a second backward over the same graph "
                "inject without cross_entropy and fused_linear_cross_entropy"
            )
        ctx.done = True
        return grad


def _copy(x: Tensor) -> Tensor:
    """A copy of ``[B, H, S, D]`` that is dense in the order B, S, H, D, as the kernels want it."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
