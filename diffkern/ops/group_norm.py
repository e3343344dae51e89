r"""The norms of convolutional networks with the SiLU that follows them: over groups, and over channels.

Numerical contract (``docs/numerics.md`` has the table):

* input and parameters in float32, float16 or bfloat16, in any mix; float64 by the eager provider;
* statistics and all arithmetic in float32; the variance from centred values, combined pairwise, so that a mean far
  from zero or a group of 2^24 elements costs no accuracy;
* rounds once, to the dtype of the input; ``round_dtype`` as in :mod:`diffkern.ops.norm`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diffkern.ops.contract import CENTRED, TO_INPUT, ContractRow
from diffkern.ops.norm_gradients import Modulation, metas, modulation_grads, needs_grad
from diffkern.ops.registration import Op
from diffkern.providers.eager.activation import apply_backward
from diffkern.providers.eager.modulate import RMS
from diffkern.providers.eager.precision import compute_dtype, empty_output

CONTRACT = (
    ContractRow("group_norm_silu", "silu", arithmetic=CENTRED, rounds=TO_INPUT),
    ContractRow("group_norm_silu", "no activation", arithmetic=CENTRED, rounds=TO_INPUT),
    ContractRow("group_norm_silu", "frames each", arithmetic=CENTRED, rounds=TO_INPUT),
    ContractRow("group_norm_silu", "add", arithmetic=f"{CENTRED}; the sum, too", rounds=TO_INPUT),
    ContractRow("channel_rms_norm_silu", "add", rounds=TO_INPUT),
    ContractRow(
        "channel_rms_norm_silu",
        "clamp, round_dtype",
        "half round_dtype",
        rounds="the normalised value to round_dtype, its product with the weight before a bias is added, the result",
    ),
    ContractRow("channel_rms_norm_silu", "scale and shift", rounds=TO_INPUT),
)


class _Following(threading.local):
    """Whether results lie like inputs in this thread."""

    layout = False


_following = _Following()


@contextmanager
def following_layout() -> Iterator[None]:
    """Within, :func:`group_norm_silu` keeps channels last on every device, unless a call says how its result lies."""
    before, _following.layout = _following.layout, True
    try:
        yield
    finally:
        _following.layout = before


def follows_layout() -> bool:
    """Whether the caller is within :func:`following_layout`."""
    return _following.layout


def group_norm_silu(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    add: Tensor | None = None,
    activation: str | None = "silu",
    frames: str = "joint",
    memory_format: torch.memory_format | None = None,
    provider: str | None = None,
) -> Tensor:
    r"""Group normalisation, and SiLU of it.

    .. math:: y = \operatorname{silu}\left(\frac{z - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot w_c + b_c\right), \quad
        z = x + a_{bc}

    with mean and variance over the ``C / num_groups`` channels of a group and all positions.

    Args:
        x: Input of shape ``[B, C, ...]``, any strides; float32, float16, bfloat16 or float64.
        num_groups: Number of groups, a divisor of ``C``.
        weight: ``w`` of shape ``[C]``, or None.
        bias: ``b`` of shape ``[C]``, or None.
        eps: ``ε``, added to the variance.
        add: ``a``, of a shape that broadcasts to ``[B, C, 1, ...]``, such as the embedding of the time step in a
            residual block; or None. The sum is not rounded.
        activation: ``"silu"``, or None for the norm alone.
        frames: ``"joint"``; or ``"each"``, for ``[B, C, T, H, W]``: every frame has its own statistics, as in the
            models that fold time into the batch.
        memory_format: None lays the result out as ``F.group_norm`` does: on the CPU like an input that is in
            channels-last order, otherwise contiguously. ``torch.preserve_format`` keeps the order of ``x`` on every
            device, ``torch.contiguous_format`` does not.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor of the shape and dtype of ``x``. Differentiable in ``x``, ``weight``, ``bias`` and ``add``.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: shapes or devices do not fit together, a group would hold one element, or an option is unknown.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Wu and He, "Group Normalization", 2018.
    """
    if memory_format is None:
        follows = x.device.type == "cpu" or (not torch.compiler.is_compiling() and follows_layout())
        preserve = follows and is_channels_last(x)
    else:
        preserve = memory_format is torch.preserve_format
    add = None if add is None else _per_sample("add", add, x)
    operands = x, num_groups, weight, bias, add
    return _group_norm_silu.call(operands, (eps, activation, frames, preserve), provider)


def channel_rms_norm_silu(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    *,
    eps_mode: str = "add",
    activation: str | None = "silu",
    round_dtype: torch.dtype | None = None,
    provider: str | None = None,
) -> Tensor:
    r"""Root mean square normalisation over the channels of every position, modulation, and SiLU.

    .. math:: y = \operatorname{silu}\left((n \cdot w_c + b_c) \cdot (1 + s_{bc}) + t_{bc}\right), \quad
        n = \begin{cases}
            x \cdot \left(\tfrac1C \sum_c x_c^2 + \epsilon\right)^{-1/2} & \text{add} \\
            x \,/ \max(\lVert x \rVert_2, \epsilon) \cdot \sqrt C & \text{clamp}
        \end{cases}

    ``"clamp"`` with ``eps=1e-12`` and ``round_dtype`` that of ``x`` is ``WanRMS_norm`` of diffusers and its kin;
    ``"add"`` is ``PerChannelRMSNorm``, and with scale and shift the norm of LTX-Video's ``ResnetBlock3d``.

    Args:
        x: Input of shape ``[B, C, ...]``, any strides; float32, float16, bfloat16 or float64.
        weight: ``w``, anything with ``C`` elements, for example ``[C, 1, 1]``, or None.
        bias: ``b``, like ``weight``, or None.
        scale: ``s``, of a shape that broadcasts to ``[B, C, 1, ...]``, or None.
        shift: ``t``, like ``scale``, or None.
        eps: ``ε``.
        eps_mode: ``"add"`` or ``"clamp"``.
        activation: ``"silu"``, or None for the norm alone.
        round_dtype: Rounds ``n`` to this dtype before it is multiplied (and the product with ``w`` to the dtype of
            ``x`` before ``b`` is added); None rounds only the result.
        provider: As in :func:`group_norm_silu`.

    Returns:
        A new tensor of the shape and dtype of ``x``, with the strides that a pointwise op gives. Differentiable in
        all five.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: shapes or devices do not fit together, or an option is unknown.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Karras et al., "Progressive Growing of
    GANs", 2018, for the norm over channels.
    """
    if (weight is not None and weight.ndim != 1) or (bias is not None and bias.ndim != 1):
        weight = None if weight is None else weight.reshape(-1)
        bias = None if bias is None else bias.reshape(-1)
    if scale is not None or shift is not None:
        scale, shift = _per_sample("scale", scale, x), _per_sample("shift", shift, x)
    options = eps, eps_mode, activation, round_dtype
    return _channel_rms_norm_silu.call((x, weight, bias, scale, shift), options, provider)


# --- checks --------------------------------------------------------------------------------------------


def _check_input(x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"a norm needs a floating point input, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"a norm over channels needs an input of shape [B, C, ...], got {tuple(x.shape)}")


def _is_silu(activation: str | None) -> bool:
    if activation not in ("silu", None):
        raise ValueError(f"unknown activation {activation!r}: choose 'silu' or None")
    return activation is not None


def _is_each(frames: str, x: Tensor) -> bool:
    if frames not in ("joint", "each"):
        raise ValueError(f"unknown frames {frames!r}: choose 'joint' or 'each'")
    if frames == "each" and x.ndim != 5:
        raise ValueError(f"frames='each' needs an input of shape [B, C, T, H, W], got {tuple(x.shape)}")
    return frames == "each"


def _check_parameter(name: str, parameter: Tensor | None, x: Tensor) -> None:
    if parameter is None:
        return
    if parameter.ndim != 1 or parameter.shape[0] != x.shape[1]:
        raise ValueError(f"the {name} has shape {tuple(parameter.shape)}, but the input has {x.shape[1]} channels")


def _per_sample(name: str, modulation: Tensor | None, x: Tensor) -> Tensor | None:
    """The modulation as a view of shape ``[B, C]``."""
    if modulation is None:
        return None
    _check_input(x)
    spatial = x.ndim - 2
    shape = modulation.shape
    if shape == (x.shape[0], x.shape[1], *(1,) * spatial):  # as nearly always
        return modulation.view(x.shape[0], x.shape[1])
    fits = len(shape) <= x.ndim and all(size == 1 for size in shape[-spatial:] if spatial)
    leading = shape[: len(shape) - spatial] if len(shape) > spatial else ()
    if not fits or any(
        own not in (1, to) for own, to in zip(reversed(leading), (x.shape[1], x.shape[0]), strict=False)
    ):
        raise ValueError(
            f"the {name} of shape {tuple(shape)} does not broadcast to one value per sample and channel "
            f"of an input of shape {tuple(x.shape)}"
        )
    return modulation.reshape(leading).expand(x.shape[:2])


def is_channels_last(x: Tensor) -> bool:
    """Whether torch takes ``x``, dense or not, for a tensor in channels-last order."""
    strides = x.stride()
    if len(strides) not in (4, 5) or strides[1] == 0:
        return False
    shape, at_least = x.shape, 0
    for dim in (1, 4, 3, 2, 0) if len(strides) == 5 else (1, 3, 2, 0):
        size, stride = shape[dim], strides[dim]
        # Where nothing but the batch is larger than 1, every order is as good, and torch says no.
        if size == 0 or stride < at_least or (dim == 0 and at_least == strides[1]):
            return False
        at_least = stride * max(size, 1)
    return True


def _group_norm_silu_prepare(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    add: Tensor | None,
    eps: float,
    activation: str | None,
    frames: str,
    preserve_strides: bool,
) -> tuple[Any, ...]:
    _check_input(x)
    silu, per_frame = _is_silu(activation), _is_each(frames, x)
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"{channels} channels do not fall into {num_groups} groups of one size")
    if x.numel() == num_groups:
        raise ValueError(f"a group of an input of shape {tuple(x.shape)} has one element, and no variance")
    _check_parameter("weight", weight, x)
    _check_parameter("bias", bias, x)
    return x, num_groups, weight, bias, add, eps, silu, per_frame, preserve_strides


def _group_norm_silu_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.num_groups, weight, bias, add, ctx.eps, ctx.silu, ctx.per_frame, _, _ = inputs
    # Without SiLU the gradients do not depend on the bias.
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, bias if ctx.silu else None, add)


def _group_norm_silu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Backward of the unrounded formula; the statistics are computed again rather than kept."""
    x, weight, bias, add = ctx.saved_tensors
    dtype = compute_dtype(x)

    def grouped(tensor: Tensor) -> Tensor:
        """The same as ``[samples, groups, channels of a group, positions]``."""
        tensor = tensor.to(dtype)
        tensor = tensor.transpose(1, 2).flatten(0, 1) if ctx.per_frame else tensor
        return tensor.reshape(
            tensor.shape[0], ctx.num_groups, tensor.shape[1] // ctx.num_groups, math.prod(tensor.shape[2:])
        )

    def per_channel(parameter: Tensor) -> Tensor:
        return parameter.to(dtype).view(ctx.num_groups, -1, 1)

    def ungrouped(tensor: Tensor) -> Tensor:
        if not ctx.per_frame:
            return tensor.reshape(x.shape)
        batch, channels, frames, *size = x.shape
        return tensor.reshape(batch, frames, channels, *size).transpose(1, 2)

    added = x if add is None else x.to(dtype) + add.to(dtype).reshape(*add.shape, *(1,) * (x.ndim - 2))
    wide, grad = grouped(added), grouped(grad)
    centred = wide - wide.mean((2, 3), keepdim=True)
    centred = centred - centred.mean((2, 3), keepdim=True)  # what rounding left out of the mean, far from zero
    scale = torch.rsqrt(centred.square().mean((2, 3), keepdim=True) + ctx.eps)
    normed = centred * scale
    if ctx.silu:
        y = normed if weight is None else normed * per_channel(weight)
        y = y if bias is None else y + per_channel(bias)
        grad = apply_backward(grad, y, "silu")
    needs_x, _, needs_weight, needs_bias, needs_add = needs_grad(ctx, 5)
    grad_x = grad_weight = grad_bias = grad_add = None
    if needs_x or needs_add:
        weighted = grad if weight is None else grad * per_channel(weight)
        mean = weighted.mean((2, 3), keepdim=True)
        along = (weighted * normed).mean((2, 3), keepdim=True)
        wide_grad = ungrouped(scale * (weighted - mean - normed * along))
        grad_x = wide_grad.to(x.dtype) if needs_x else None
        if needs_add:
            spatial = tuple(range(2, x.ndim))
            grad_add = (wide_grad.sum(spatial) if spatial else wide_grad).to(add.dtype)
    if needs_weight:
        grad_weight = (grad * normed).sum((0, 3)).flatten().to(weight.dtype)
    if needs_bias:
        grad_bias = grad.sum((0, 3)).flatten().to(ctx.bias_dtype)
    return grad_x, None, grad_weight, grad_bias, grad_add


_group_norm_silu = Op(
    "group_norm_silu",
    _group_norm_silu_prepare,
    lambda x, preserve_strides, **_: empty_output(x, None, preserve_strides),
    _group_norm_silu_backward,
    setup_context=_group_norm_silu_setup_context,
)


def _channel_rms_norm_silu_prepare(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    eps_mode: str,
    activation: str | None,
    round_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    _check_input(x)
    if eps_mode not in ("add", "clamp"):
        raise ValueError(f"unknown eps_mode {eps_mode!r}: choose 'add' or 'clamp'")
    _check_parameter("weight", weight, x)
    _check_parameter("bias", bias, x)
    return x, weight, bias, scale, shift, eps, eps_mode == "clamp", _is_silu(activation), round_dtype


def _channel_rms_norm_silu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Backward of the unrounded formula, the channels of a position being a row; 1/rms is computed again."""
    x, weight, bias, *modulation = ctx.saved_tensors
    rows = x.movedim(1, -1)
    scale, shift = (None if m is None else m.view(len(m), *(1,) * (x.ndim - 2), -1) for m in modulation)
    layout = metas(rows, scale, shift, weight, bias)
    options = Modulation(ctx.eps, RMS, 1.0, layout, clamp_eps=ctx.clamp_eps, silu=ctx.silu)
    needs_x, needs_weight, needs_bias, *needs_modulation = needs_grad(ctx, 5)
    needs = needs_x, *needs_modulation, needs_weight, needs_bias
    grads = modulation_grads(options, needs, grad.movedim(1, -1), rows, scale, weight, bias, shift)
    grad_x = None if grads[0] is None else grads[0].movedim(-1, 1).to(x.dtype)
    grad_modulation = [None if y is None else y.reshape(len(y), -1) for y in grads[1:3]]
    return (grad_x, *grads[3:], *grad_modulation)


_channel_rms_norm_silu = Op(
    "channel_rms_norm_silu",
    _channel_rms_norm_silu_prepare,
    lambda x, **_: torch.empty_like(x),
    _channel_rms_norm_silu_backward,
)
