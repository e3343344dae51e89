"""The public interfaces of Hub kernels, as our ops.

Each adapter says which arguments its interface has room for. Whether the kernel behind it computes the op is not
believed but measured (:mod:`diffkern.hub.contract`). The interfaces are those of

* diffkern's own kernels: all ops, by their own schema;
* layers, which ``kernels`` itself binds to modules: they take one tensor and read ``weight``, ``bias``, ``eps`` and
  ``variance_epsilon`` from the module they sit on. kernels-community's activation (CUDA, ROCm, Metal, CPU), layer-norm
  (CUDA), liger-kernels (CUDA, ROCm, XPU), mlx-rmsnorm (Metal) and rmsnorm (XPU, CPU) have such;
* ``apply_rms_norm(input, weight, eps)``, of rmsnorm;
* ``apply_rotary(x1, x2, cos, sin, out1, out2, conj)`` and ``apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim)``,
  as rotary (CUDA, XPU, CPU), aiter-rope (ROCm) and liger-kernels have them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from diffkern.providers import eager
from diffkern.providers.base import Kernel
from diffkern.providers.eager.precision import laid_out_like
from diffkern.providers.eager.rope import FLOAT32, FLOAT64, INPUT
from diffkern.providers.foreign import is_of_user, preserved, summary


@dataclass(frozen=True)
class Adapter:
    """One way to compute an op with a kernel.

    Attributes:
        op: The op.
        interface: The function or layer behind it, for messages.
        call: Takes the arguments of the op, in order.
        declines: Says why the interface has no room for certain arguments, or None.
        whole: Whether it is the op itself, so that passing all samples speaks for all arguments.
    """

    op: str
    interface: str
    call: Kernel
    declines: Callable[[Sequence[Any]], str | None]
    whole: bool = False


def adapters(module: ModuleType, namespace: str, name: str) -> tuple[list[Adapter], str]:
    """Lists the ways to compute our ops with a kernel, the preferred first, and what it raised meanwhile, or "".

    ``namespace`` is its ``id``, under which its torch ops are; ``name`` the one layer or function to use, empty for any
    function.
    """
    makers: list[Callable[[], list[Adapter]]] = [
        lambda: _own_ops(namespace),
        *(partial(make, module) for make in _INTERFACES),
        lambda: _named_layers(module),
    ]
    found: list[Adapter] = []
    raised: dict[str, None] = {}
    for make in [lambda: _of_name(module, name)] if name else makers:
        try:
            with preserved():
                found += make()
        except BaseException as error:  # a module may look its attributes up in any way
            if is_of_user(error):
                raise
            raised[summary(error)] = None
    return found, "; ".join(raised)


def layer_of(module: ModuleType, name: str) -> type[torch.nn.Module] | None:
    """The layer of a kernel that has this name, or None.

    Raises:
        Exception: whatever the kernel raises where it looks the name up.
    """
    layer = getattr(getattr(module, "layers", None), name, None)
    return layer if isinstance(layer, type) and issubclass(layer, torch.nn.Module) else None


def layer_names(module: ModuleType) -> list[str]:
    """The names of the layers of a kernel."""
    layers = getattr(module, "layers", None)
    return [name for name in sorted(getattr(layers, "__dict__", ())) if layer_of(module, name) is not None]


def _of_name(module: ModuleType, name: str) -> list[Adapter]:
    layer = layer_of(module, name)
    if layer is not None:
        return _layer(layer)
    if not callable(getattr(module, name, None)):
        return []
    alone = ModuleType(module.__name__)
    setattr(alone, name, getattr(module, name))
    return [adapter for make in _INTERFACES for adapter in make(alone)]


# --- our own kernels ---------------------------------------------------------------------------------------


def _own_ops(namespace: str) -> list[Adapter]:
    found = []
    for op in eager.PROVIDER.support:
        overload = getattr(getattr(getattr(torch.ops, namespace), op, None), "default", None)
        if overload is None:
            continue
        parameters = list(inspect.signature(eager.PROVIDER.kernel(op, torch.device("cpu"))).parameters)
        if [argument.name for argument in overload._schema.arguments] == parameters:
            found.append(Adapter(op, f"torch.ops.{namespace}.{op}", overload, lambda args: None, whole=True))
    return found


# --- norms -------------------------------------------------------------------------------------------------


def _apply_rms_norm(module: ModuleType) -> list[Adapter]:
    """``apply_rms_norm(x, weight, eps)``, which has no room for more."""
    function = getattr(module, "apply_rms_norm", None)
    if function is None:
        return []

    def call(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return _norm_result(function(x.contiguous(), weight.contiguous(), rest[1]), x, rest[-1])

    def declines(args: Sequence[Any]) -> str | None:
        return "it needs a weight" if args[1] is None else _declines_more_than_a_weight("it", args)

    return [Adapter("rms_norm", "apply_rms_norm", call, declines)]


def _declines_more_than_a_weight(who: str, args: Sequence[Any]) -> str | None:
    x, _, bias, _, offset, _, out_dtype, clamp_eps, _ = args
    if bias is not None or offset != 0.0 or clamp_eps:
        return f"{who} has no bias, no offset of the weight and no lower bound of the length"
    return _declines_out_dtype(x, out_dtype)


def _declines_out_dtype(x: Tensor, out_dtype: torch.dtype | None) -> str | None:
    return None if out_dtype in (None, x.dtype) else f"it returns {x.dtype} and not {out_dtype}"


def _norm_result(y: Tensor, x: Tensor, preserve_strides: bool) -> Tensor:
    """``y`` laid out as the op promises."""
    return laid_out_like(x, y) if preserve_strides else y.contiguous()


# --- rotary embedding --------------------------------------------------------------------------------------


def _apply_rotary(module: ModuleType) -> list[Adapter]:
    function = getattr(module, "apply_rotary", None)
    if not _takes(function, "x1", "x2", "cos", "sin", "out1", "out2", "conj"):
        return []

    def call(x: Tensor, cos: Tensor, sin: Tensor, half: bool, *rest: Any) -> Tensor:
        out = torch.empty_like(x)
        parts, outs = _pairs(x, half), _pairs(out, half)
        function(*parts, cos, sin, *outs, False)  # type: ignore[misc]
        return out

    return [Adapter("rope", "apply_rotary", call, _declines_rope)]


def _declines_rope(args: Sequence[Any]) -> str | None:
    x, cos, sin, _, arithmetic, rotary_dim, _, start, length = args
    if arithmetic != FLOAT32 and not (arithmetic == INPUT and x.dtype == torch.float32):
        return "it computes in float32, and this rotation in " + ("float64" if arithmetic == FLOAT64 else str(x.dtype))
    if rotary_dim not in (0, x.shape[-1]) or (start, length) not in ((0, -1),):
        return "it rotates whole heads of all tokens"
    if cos.shape[-1] * 2 != x.shape[-1] or sin.shape != cos.shape:
        return "it takes one angle for each pair of numbers, and these tables do not have that form"
    if cos.dtype != x.dtype or sin.dtype != x.dtype:
        return f"its tables have the dtype of the input, {x.dtype}"
    return None


def _takes(function: Any, *names: str) -> bool:
    """Whether a function begins with parameters of these names."""
    if not callable(function):
        return False
    try:
        parameters = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return parameters[: len(names)] == names


def _pairs(x: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    size = x.shape[-1] // 2
    return (x[..., :size], x[..., size:]) if half else (x[..., 0::2], x[..., 1::2])


def _rotary_transformers(module: ModuleType) -> list[Adapter]:
    names = ("apply_rotary_transformers", "liger_rotary_pos_emb")
    functions = ((name, getattr(module, name, None)) for name in names)
    return [_transformers_rope(name, f) for name, f in functions if f is not None and _takes(f, "q", "k", "cos", "sin")]


def _transformers_rope(interface: str, function: Callable[..., tuple[Tensor, Tensor]]) -> Adapter:
    """``function(q, k, cos, sin)`` on ``[batch, heads, tokens, head_dim]``; tables ``[batch, tokens, head_dim]``."""

    def call(x: Tensor, cos: Tensor, sin: Tensor, half: bool, *rest: Any) -> Tensor:
        heads = _heads_dim(x, cos)
        heads_first = x if heads == 1 else x.transpose(1, 2)
        # They may rotate in place: hand over copies, the second of which is there because the interface wants one.
        q, k = heads_first.clone(), heads_first[:, :1].clone()
        tables = (_by_token(table, heads_first, heads) for table in (cos, sin))  # type: ignore[arg-type]
        y = function(q, k, *tables)[0]
        return laid_out_like(x, y if heads == 1 else y.transpose(1, 2))

    def declines(args: Sequence[Any]) -> str | None:
        x, cos, _, half, *_ = args
        reason = _declines_rope(args)
        if reason is not None:
            return reason
        if not half or x.ndim != 4:
            return "it rotates halves of [batch, heads, tokens, head_dim]"
        return "its tables are the same for all heads" if _heads_dim(x, cos) is None else None

    return Adapter("rope", interface, call, declines)


def _heads_dim(x: Tensor, table: Tensor) -> int | None:
    """The dimension of ``x`` along which a table does not differ; None if it differs along both that there are."""
    shape = (*(1,) * (4 - table.ndim), *table.shape)
    return next((dim for dim in (1, 2) if shape[dim] == 1 and shape[3 - dim] in (1, x.shape[3 - dim])), None)


def _by_token(table: Tensor, heads_first: Tensor, heads: int) -> Tensor:
    """A table for each token and both halves, ``[batch, tokens, head_dim]``."""
    table = table[(None,) * (4 - table.ndim)].squeeze(heads).expand(-1, heads_first.shape[2], -1)
    return torch.cat((table, table), -1)


# --- layers ------------------------------------------------------------------------------------------------


def _layer(layer: type[torch.nn.Module]) -> list[Adapter]:
    """A layer that takes one tensor, as whatever op it turns out to compute."""
    parameters = list(inspect.signature(layer.forward).parameters.values())[1:]
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) >= 4 and [p.name for p in needed[:4]] == ["q", "k", "cos", "sin"]:
        return [_transformers_rope(layer.__name__, lambda *args: layer.forward(None, *args))]
    if len(needed) != 1:
        return []
    forward: Callable[[Any, Tensor], Tensor] = layer.forward
    gate_last = layer.__name__.startswith("Mul")
    # In half precision no measurement tells the forms of GELU apart.
    stated = _FUNCTIONS.get(layer.__name__.removesuffix("AndMul").removeprefix("MulAnd").lower())

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *rest: Any) -> Tensor:
        size = x.shape[-1]
        # Under the names that models have for it.
        holder = SimpleNamespace(
            weight=weight, bias=bias, eps=eps, variance_epsilon=eps, normalized_shape=(size,), hidden_size=size
        )
        return _norm_result(forward(holder, x.contiguous()), x, rest[-1])

    def activation(x: Tensor, function: str) -> Tensor:
        return laid_out_like(x, forward(SimpleNamespace(), x))

    def declines_function(args: Sequence[Any]) -> str | None:
        return None if stated in (None, args[-1]) else f"it computes {stated} and not {args[-1]}"

    def packed(value: Tensor, gate: Tensor) -> Tensor | None:
        return _packed(value, gate) if gate_last else _packed(gate, value)

    def glu(value: Tensor, gate: Tensor, function: str, round_activation: bool) -> Tensor:
        return laid_out_like(value, forward(SimpleNamespace(), packed(value, gate)))  # type: ignore[arg-type]

    def declines_glu(args: Sequence[Any]) -> str | None:
        if packed(*args[:2]) is None:
            return "value and gate are not the halves of one packed tensor"
        return declines_function(args[:3])

    return [
        Adapter("rms_norm", layer.__name__, norm, partial(_declines_more_than_a_weight, "a layer")),
        Adapter("layer_norm", layer.__name__, norm, lambda args: _declines_out_dtype(args[0], args[4])),
        Adapter("activation", layer.__name__, activation, declines_function),
        Adapter("glu", layer.__name__, glu, declines_glu),
    ]


def _named_layers(module: ModuleType) -> list[Adapter]:
    """The layers of a kernel whose names say what they compute; whether they do is measured."""
    found: list[Adapter] = []
    for name in layer_names(module):
        layer = layer_of(module, name)
        op = next((op for pattern, op in _NAMES if pattern.fullmatch(name)), None)
        if layer is not None and layer.__init__ is torch.nn.Module.__init__ and op is not None:
            found += [adapter for adapter in _layer(layer) if adapter.op == op]
    return found


def _packed(first: Tensor, second: Tensor) -> Tensor | None:
    """The contiguous tensor whose halves along the last dimension these are, or None."""
    size = first.shape[-1]
    if first.shape != second.shape or first.dtype != second.dtype or first.stride() != second.stride():
        return None
    if not first.numel() or second.data_ptr() - first.data_ptr() != size * first.element_size():
        return None
    shape = (*first.shape[:-1], 2 * size)
    strides = torch.empty(shape, device="meta").stride()
    if any(a != b for a, b, n in zip(first.stride(), strides, first.shape, strict=True) if n > 1):
        return None
    return first.as_strided(shape, strides)


#: What the names of layers say, in the words that kernels on the Hub have.
_NAMES = (
    (re.compile(r"\w*RMSNorm"), "rms_norm"),
    (re.compile(r"\w*LayerNorm"), "layer_norm"),
    (re.compile(r"(Silu|Gelu|GeluTanh)AndMul|MulAndSilu"), "glu"),
    (re.compile(r"Si[Ll][Uu]|Gelu|GeluTanh|QuickGELU"), "activation"),
)
_FUNCTIONS = {"silu": "silu", "gelu": "gelu", "gelutanh": "gelu_tanh", "quickgelu": "quick_gelu"}

_INTERFACES: tuple[Callable[[ModuleType], list[Adapter]], ...] = (_apply_rms_norm, _apply_rotary, _rotary_transformers)
