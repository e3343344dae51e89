"""Whether a foreign kernel computes an op: measured at load, against the reference in float64.

The bound is that of every proof (:mod:`diffkern.verify.contract`). It is measured for each
*pattern* of arguments by itself (with a bias or without, rounding here or there, this activation or that), and a
kernel serves the patterns that it passed.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from diffkern.providers import eager
from diffkern.providers.base import Kernel
from diffkern.providers.eager.rope import ARITHMETICS
from diffkern.providers.foreign import MisconductError, is_of_user, summary
from diffkern.verify.contract import RATIO, SLACK
from diffkern.verify.isolation import call_twice
from diffkern.verify.measures import error_beside
from diffkern.verify.samples import Draws

#: Numbers that change what is computed; other numbers, such as eps, are only values in the formula.
_MEANINGFUL = frozenset({"weight_offset", "scale_offset", "norm", "gate_activation", "arithmetic"})
#: Arguments that change only how the result lies in memory, which the adapters see to.
_LAYOUT = frozenset({"preserve_strides"})


def pattern(op: str, args: Sequence[Any]) -> Hashable:
    """What of the arguments of ``op`` decides which formula is computed, and in which precisions."""
    x = next(arg for arg in args if isinstance(arg, Tensor))
    traits = tuple(
        _trait(name, arg, x.dtype) for name, arg in zip(_parameters(op), args, strict=True) if name not in _LAYOUT
    )
    # A rotary table of each sample's own is easily taken for one that they share.
    return traits if op != "rope" else (traits, args[1].ndim == x.ndim and args[1].shape[0] > 1)


def examine(
    op: str, kernel: Kernel, accepts: Callable[[Sequence[Any]], str | None], device: torch.device, dtype: torch.dtype
) -> dict[Hashable, str]:
    """Runs a kernel, which takes the arguments of an op in order, on the samples of this op that it accepts.

    Returns:
        For every pattern it accepts why it does not serve it, or "", if it passes all its samples.
    """
    reasons: dict[Hashable, str] = {}
    with torch.no_grad():
        for args in samples(op, device, dtype):
            if accepts(args) is not None:
                continue
            key = pattern(op, args)
            reasons[key] = _refuse(op, kernel, args) or reasons.get(key, "")
    return reasons


def _refuse(op: str, kernel: Kernel, args: Sequence[Any]) -> str:
    reference = _flat(eager.PROVIDER.kernel(op, torch.device("cpu"))(*map(_upcast, args)))
    stock = _flat(eager.PROVIDER.kernel(op, torch.device("cpu"))(*args))
    try:
        results = [_flat(result) for result in call_twice(kernel, *args)]
    except MisconductError as error:
        return str(error)
    except BaseException as error:  # whatever a foreign kernel comes up with is a reason, not a crash
        if is_of_user(error):
            raise
        return f"it raised {summary(error)}"
    for result in results:
        if len(result) != len(stock):
            return f"it returned {len(result)} results in place of {len(stock)}"
        for got, want in zip(result, stock, strict=True):
            if not isinstance(got, Tensor) or (got.dtype, got.shape) != (want.dtype, want.shape):
                kind = f"{got.dtype} {tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
                return f"it returned {kind} in place of {want.dtype} {tuple(want.shape)}"
    stock = tuple(y.cpu() for y in stock)
    first, second, stock_error = (
        max(error_beside(y.cpu(), one, exact) for y, one, exact in zip(ys, stock, reference, strict=True))
        for ys in (*results, stock)
    )
    kernel_error = max(first, second)
    passed = kernel_error <= RATIO * stock_error + SLACK
    return "" if passed else f"error {kernel_error:.1e} against {stock_error:.1e} of plain PyTorch"


def _flat(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _upcast(arg: Any) -> Any:
    """An argument of the reference: float64 on the CPU, where every device is compared; and nothing is rounded."""
    if isinstance(arg, Tensor):
        return arg.cpu().double() if arg.is_floating_point() else arg.cpu()
    if isinstance(arg, list):
        return [_upcast(item) for item in arg]
    return None if isinstance(arg, torch.dtype) else arg


def _trait(name: str, arg: Any, dtype: torch.dtype) -> Hashable:
    if isinstance(arg, Tensor):
        return None if arg.dtype == dtype else str(arg.dtype)
    if isinstance(arg, torch.dtype):
        return "as the input" if arg == dtype else str(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(_trait(name, item, dtype) for item in arg if isinstance(item, Tensor))
    if isinstance(arg, (bool, str)) or name in _MEANINGFUL:
        return arg  # type: ignore[no-any-return]
    return "absent" if arg is None else "a number"


@cache
def _parameters(op: str) -> tuple[str, ...]:
    return tuple(inspect.signature(eager.PROVIDER.kernel(op, torch.device("cpu"))).parameters)


# --- samples -----------------------------------------------------------------------------------------------


def samples(op: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Arguments of ``op``, one or more of each pattern that models use."""
    return _SAMPLES[op](Draws(device, dtype))


def _rows(random: Draws) -> Tensor:
    """Rows of very different length, so that a wrong eps shows."""
    return random(64, 192) * torch.logspace(-4, 1, 64, device=random.device).to(random.dtype)[:, None]


def _rms_norm(random: Draws) -> list[tuple[Any, ...]]:
    x, weight, bias = _rows(random), 1 + random(192, scale=0.3), random(192)
    upcast = weight.float()
    calls: list[tuple[Any, ...]] = []
    for rounding in dict.fromkeys((None, random.dtype)):
        for out in (None, random.dtype):
            calls += [
                (x, weight, None, 1e-6, 0.0, rounding, out, False, False),
                (x, None, None, 1e-6, 0.0, rounding, out, False, False),
                (x, upcast, None, 1e-6, 0.0, rounding, out, False, False),
                (x.view(4, 16, 192), weight, None, 1e-6, 0.0, rounding, out, False, True),
            ]
    return [
        *calls,
        (x, weight, None, 1e-6, 1.0, None, None, False, False),
        (x, weight, bias, 1e-6, 0.0, None, None, False, False),
        (x, weight, None, 1e-6, 0.0, None, None, True, False),
    ]


def _layer_norm(random: Draws) -> list[tuple[Any, ...]]:
    x, weight, bias = _rows(random) + 0.25, 1 + random(192, scale=0.3), random(192)
    return [
        (x, given, added, 1e-5, out, preserve)
        for out in (None, random.dtype)
        for preserve in (False, True)
        for given, added in ((weight, bias), (weight, None), (None, None), (weight.float(), bias.float()))
    ]


def _activation(random: Draws) -> list[tuple[Any, ...]]:
    return [(random(3, 31, 48, scale=3.0), name) for name in ("gelu", "gelu_tanh", "silu", "quick_gelu")]


def _glu(random: Draws) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    for name in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
        for rounds in (False, True):
            first, second = random(3, 31, 96, scale=2.0).chunk(2, dim=-1)
            calls += [(first, second, name, rounds), (second, first, name, rounds)]
            calls.append((random(5, 48, scale=2.0), random(5, 48, scale=2.0), name, rounds))
    return calls


def _table(random: Draws, *shape: int) -> tuple[Tensor, Tensor]:
    angles = random(*shape).float()
    return angles.cos().to(random.dtype), angles.sin().to(random.dtype)


def _rope(random: Draws) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    for half, batch, arithmetic in itertools.product((False, True), (1, 2), ARITHMETICS.values()):
        cos, sin = _table(random, batch, 17, 1, 32)
        calls.append((random(2, 17, 3, 64), cos, sin, half, arithmetic, 0, 1, 0, -1))
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)
        calls.append((random(2, 3, 17, 64), cos, sin, half, arithmetic, 0, 2, 0, -1))
    return calls


def _rope_3d(random: Draws) -> list[tuple[Any, ...]]:
    tables = [_table(random, 2, pairs) for pairs in (6, 5, 5)]
    cos, sin = [table[0] for table in tables], [table[1] for table in tables]
    return [(random(2, 8, 3, 32), cos, sin, None, [2, 2, 2], False, 0, half, 0, 0, 1, 0, -1) for half in (False, True)]


def _qk_norm_rope(random: Draws) -> list[tuple[Any, ...]]:
    cos, sin = _table(random, 1, 17, 1, 32)
    q, k, weight = random(2, 17, 3, 64), random(2, 17, 3, 64), 1 + random(64, scale=0.3)
    tail: tuple[Any, ...] = (None, [], False, 0)
    return [
        (q, k, weight, weight, None, None, [cos], [sin], [cos], [sin], *tail, norm, 1e-6, 0, 0.0, None, False, half,
         0, 0, 1, 0, -1)
        for norm in (0, 1, 2) for half in (False, True)
    ]  # fmt: skip


def _joint_qk_norm_rope(random: Draws) -> list[tuple[Any, ...]]:
    cos, sin = _table(random, 1, 17, 1, 32)
    text, image, weight = random(2, 5, 3, 64), random(2, 17, 3, 64), 1 + random(64, scale=0.3)
    parameters = (weight,) * 4 + (None,) * 4
    return [
        (text, text, image, image, *parameters, [], [], [cos], [sin], 1, norm, 1e-6, False, half, 0)
        for norm in (0, 1, 2)
        for half in (False, True)
    ]


def _norm_modulate(random: Draws) -> list[tuple[Any, ...]]:
    x, scale, shift = random(2, 33, 96), random(2, 1, 96), random(2, 33, 96)
    return [(x, scale, shift, None, None, 1e-6, norm, 1.0, False, None) for norm in (0, 1, 2)]


def _gate_residual(random: Draws) -> list[tuple[Any, ...]]:
    residual, x = random(2, 33, 96), random(2, 33, 96)
    return [(residual, x, gate, 0, False, None) for gate in (random(2, 1, 96), None)]


def _gate_residual_norm_modulate(random: Draws) -> list[tuple[Any, ...]]:
    residual, x, gate, scale, shift = (random(2, n, 96) for n in (33, 33, 1, 1, 1))
    return [(residual, x, gate, scale, shift, None, None, 1e-6, norm, 0, 1.0, False, None, None) for norm in (1, 2)]


def _group_norm_silu(random: Draws) -> list[tuple[Any, ...]]:
    x, weight, bias, add = random(2, 32, 5, 7), 1 + random(32, scale=0.3), random(32), random(2, 32)
    return [(x, 8, weight, bias, a, 1e-5, silu, False, False) for silu in (False, True) for a in (None, add)]


def _channel_rms_norm_silu(random: Draws) -> list[tuple[Any, ...]]:
    x, weight, bias = random(2, 16, 5, 7), 1 + random(16, scale=0.3), random(16)
    return [(x, weight, bias, None, None, 1e-6, clamp, silu, None) for clamp in (False, True) for silu in (False, True)]


def _add_norm_silu_pad(random: Draws) -> list[tuple[Any, ...]]:
    x, residual, bias = random(2, 16, 3, 5, 7), random(2, 16, 3, 5, 7), random(16)
    scale, shift = random(2, 16), random(2, 16)
    return [
        (x, bias, residual, *modulation, 1e-6, norm, norm, 2, 1, last)
        for norm, modulation in ((True, (scale, shift)), (True, (None, None)), (False, (None, None)))
        for last in (False, True)
    ]


_SAMPLES: Mapping[str, Callable[[Draws], list[tuple[Any, ...]]]] = {
    "activation": _activation,
    "add_norm_silu_pad": _add_norm_silu_pad,
    "channel_rms_norm_silu": _channel_rms_norm_silu,
    "gate_residual": _gate_residual,
    "gate_residual_norm_modulate": _gate_residual_norm_modulate,
    "glu": _glu,
    "group_norm_silu": _group_norm_silu,
    "joint_qk_norm_rope": _joint_qk_norm_rope,
    "layer_norm": _layer_norm,
    "norm_modulate": _norm_modulate,
    "qk_norm_rope": _qk_norm_rope,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "rope_3d": _rope_3d,
}

#: Ops that a foreign kernel can be examined for.
EXAMINED = tuple(_SAMPLES)
