"""One random call of every public op, with operands by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.draw import STANDARD, Draw, Values

Operand = Tensor | list[Tensor] | None

FUNCTIONS = ("gelu", "gelu_tanh", "silu", "quick_gelu")


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        op: Name of a function of :mod:`diffkern.ops`.
        operands: Tensors, lists of them, or None, by the name of the argument; the first decides where it runs.
        options: All other arguments.
        rounds_between: Whether the op rounds to half precision before the end, or a product may be rounded otherwise.
    """

    op: str
    operands: Mapping[str, Operand]
    options: Mapping[str, Any]
    rounds_between: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name and place."""
        named: dict[str, Tensor] = {}
        for name, operand in self.operands.items():
            if isinstance(operand, Tensor):
                named[name] = operand
            elif operand is not None:
                named.update({f"{name}[{place}]": tensor for place, tensor in enumerate(operand)})
        return named

    def changed(self, change: Callable[[str, Tensor], Tensor], **options: Any) -> Case:
        """The same call with other tensors and options."""
        operands: dict[str, Operand] = {}
        for name, operand in self.operands.items():
            if isinstance(operand, list):
                operands[name] = [change(f"{name}[{place}]", tensor) for place, tensor in enumerate(operand)]
            else:
                operands[name] = operand if operand is None else change(name, operand)
        return Case(self.op, operands, {**self.options, **options}, self.rounds_between)


def _start(d: Draw) -> tuple[torch.dtype, Values]:
    return (torch.float64 if d.chance(0.04) else d.dtype()), d.values()


def _out_dtype(d: Draw, *dtypes: torch.dtype) -> torch.dtype | None:
    return None if torch.float64 in dtypes or d.chance(0.8) else d.dtype()


def _activation_input(d: Draw) -> tuple[Tensor, list[int]]:
    dtype, values = _start(d)
    last = d.size(least=0)
    shape = [*d.lead(last), last]
    return d.tensor(shape, dtype, values), shape


def gelu(d: Draw) -> Case:
    return Case("gelu", {"x": _activation_input(d)[0]}, {"approximate": d.one_of("none", "tanh")})


def silu(d: Draw) -> Case:
    return Case("silu", {"x": _activation_input(d)[0]}, {})


def quick_gelu(d: Draw) -> Case:
    return Case("quick_gelu", {"x": _activation_input(d)[0]}, {})


def glu(d: Draw) -> Case:
    value, shape = _activation_input(d)
    gate = d.tensor(shape, d.other(value.dtype), d.values())
    rounds = d.chance(0.3)
    options = {"activation": d.one_of(*FUNCTIONS), "round_activation": rounds}
    return Case("glu", {"value": value, "gate": gate}, options, rounds)


def _halved(d: Draw, op: str, **options: Any) -> Case:
    dtype, values = _start(d)
    shape = d.lead(2, dims=(1, 3))
    dim = d.one_of(*range(len(shape)))
    shape[dim] = 2 * d.size(least=0) if math.prod(shape) < 100 else 2 * shape[dim]
    rounds = d.chance(0.3)
    options |= {"dim": d.one_of(dim, dim - len(shape)), "gate_first": d.chance(0.5), "round_activation": rounds}
    return Case(op, {"x": d.tensor(shape, dtype, values)}, options, rounds)


def geglu(d: Draw) -> Case:
    return _halved(d, "geglu", approximate=d.one_of("none", "tanh"))


def swiglu(d: Draw) -> Case:
    return _halved(d, "swiglu")


def _norm(d: Draw, op: str, eps: float, options: dict[str, Any], weight_offset: float = 0.0) -> Case:
    dtype, values = _start(d)
    last = d.size(least=0)
    shape = [*d.lead(last), last]
    dim = d.one_of(*range(-len(shape), 0)) if d.chance(0.3) else -1
    own = shape[dim:][:1]
    if dim == -1 and len(shape) > 1 and d.chance(0.15):
        own = shape[-2:]
    weight, bias = (d.maybe(d.tensor(own, d.other(dtype), Values(0.5, 1.0 - weight_offset))) for _ in range(2))
    dtypes = [one.dtype for one in (weight, bias) if one is not None]
    options |= {
        "eps": eps, "dim": dim, "out_dtype": _out_dtype(d, dtype, *dtypes),
        "memory_format": d.one_of(torch.contiguous_format, torch.preserve_format),
    }  # fmt: skip
    return Case(op, {"x": d.tensor(shape, dtype, values), "weight": weight, "bias": bias}, options)


def rms_norm(d: Draw) -> Case:
    offset = d.one_of(0.0, 0.0, 1.0)
    case = _norm(d, "rms_norm", d.one_of(1e-6, 1e-3), {"clamp_eps": d.chance(0.2), "weight_offset": offset}, offset)
    x = case.operands["x"]
    assert isinstance(x, Tensor)
    rounds = None if x.dtype == torch.float64 or d.chance(0.7) else d.one_of(torch.float16, torch.bfloat16)
    return Case(case.op, case.operands, {**case.options, "round_dtype": rounds}, rounds is not None)


def layer_norm(d: Draw) -> Case:
    return _norm(d, "layer_norm", d.one_of(1e-5, 1e-6), {})


def _broadcast(d: Draw, shape: list[int], dtype: torch.dtype, values: Values = STANDARD, last: bool = False) -> Tensor:
    """A tensor that broadcasts to ``shape``; of its full last dimension if ``last``."""
    own = shape[d.one_of(*range(len(shape))) :]
    own = [size if (last and index == len(own) - 1) or d.chance(0.6) else 1 for index, size in enumerate(own)]
    return d.tensor(own, d.other(dtype), values)


def _row_parameters(d: Draw, size: int, dtype: torch.dtype, norm: str | None) -> list[Tensor | None]:
    made = [d.maybe(d.tensor([size], d.other(dtype), Values(0.5, 1.0))) for _ in range(2)]
    return [None, None] if norm is None else made


def norm_modulate(d: Draw) -> Case:
    dtype, values = _start(d)
    last = d.size()
    shape = [*d.lead(last), last]
    norm = d.one_of("rms", "layer", "rms", "layer") if d.chance(0.85) else None
    scale, shift = (d.maybe(_broadcast(d, shape, dtype)) for _ in range(2))
    weight, bias = _row_parameters(d, last, dtype, norm)
    x = d.tensor(shape, dtype, values)
    rounding = d.one_of("once", "once", "each")
    options = {"eps": 1e-6, "norm": norm, "scale_offset": d.one_of(1.0, 1.0, 0.0), "rounding": rounding,
               "out_dtype": _out_dtype(d, *(t.dtype for t in (x, scale, shift) if t is not None))}  # fmt: skip
    operands = {"x": x, "scale": scale, "shift": shift, "weight": weight, "bias": bias}
    return Case("norm_modulate", operands, options, rounding == "each")


def gate_residual(d: Draw) -> Case:
    dtype, values = _start(d)
    last = d.size(least=0)
    shape = [*d.lead(last), last]
    operands = {
        "residual": d.tensor(shape, dtype, values), "x": d.tensor(shape, d.other(dtype), d.values()),
        "gate": d.maybe(_broadcast(d, shape, dtype)),
    }  # fmt: skip
    rounding = d.one_of("once", "once", "each")
    options = {"gate_activation": d.one_of(None, "tanh", "sigmoid"), "rounding": rounding,
               "out_dtype": _out_dtype(d, *(t.dtype for t in operands.values() if t is not None))}  # fmt: skip
    return Case("gate_residual", operands, options, rounding == "each")


def gate_residual_norm_modulate(d: Draw) -> Case:
    dtype, values = _start(d)
    last = d.size()
    shape = [*d.lead(last), last]
    norm = d.one_of("rms", "layer", "rms", "layer") if d.chance(0.85) else None
    gate, scale, shift = (d.maybe(_broadcast(d, shape, dtype)) for _ in range(3))
    weight, bias = _row_parameters(d, last, dtype, norm)
    operands = {
        "residual": d.tensor(shape, dtype, values), "x": d.tensor(shape, d.other(dtype), d.values()), "gate": gate,
        "scale": scale, "shift": shift, "weight": weight, "bias": bias,
    }  # fmt: skip
    dtypes = [t.dtype for t in operands.values() if t is not None]
    options = {"eps": 1e-6, "norm": norm, "gate_activation": d.one_of(None, "tanh", "sigmoid"), "scale_offset": 1.0,
               "rounding": d.one_of("once", "each"), "residual_dtype": _out_dtype(d, *dtypes),
               "out_dtype": _out_dtype(d, *dtypes)}  # fmt: skip
    return Case("gate_residual_norm_modulate", operands, options, True)


def _image(d: Draw, channels: int, dims: tuple[int, ...] = (0, 1, 2, 2, 3, 3)) -> list[int]:
    return [d.one_of(1, 2, 3), channels, *[d.one_of(1, 2, 3, 5, 7, 8) for _ in range(d.one_of(*dims))]]


def _channel_parameters(d: Draw, channels: int, dtype: torch.dtype) -> list[Tensor | None]:
    return [d.maybe(d.tensor([channels], d.other(dtype), Values(0.5, 1.0))) for _ in range(2)]


def group_norm_silu(d: Draw) -> Case:
    dtype, values = _start(d)
    groups = d.one_of(1, 2, 4, 8, 32)
    channels = groups * d.one_of(1, 2, 3, 4, 8)
    shape = _image(d, channels)
    if math.prod(shape) == groups:
        shape[0] += 1
    if math.prod(shape[1:]) == groups:
        shape.append(2)
    weight, bias = _channel_parameters(d, channels, dtype)
    by_frame = len(shape) == 5 and channels * math.prod(shape[3:]) > groups
    options = {
        "num_groups": groups, "eps": d.one_of(1e-5, 1e-6), "activation": d.one_of("silu", None),
        "frames": d.one_of("joint", "each") if by_frame else "joint",
        "memory_format": d.one_of(None, torch.preserve_format, torch.contiguous_format),
    }  # fmt: skip
    tensors = {"x": d.tensor(shape, dtype, values), "weight": weight, "bias": bias}
    tensors["add"] = d.maybe(d.tensor([*shape[:2], *(1,) * (len(shape) - 2)], d.other(dtype)))
    return Case("group_norm_silu", tensors, options)


def channel_rms_norm_silu(d: Draw) -> Case:
    dtype, values = _start(d)
    channels = d.one_of(1, 3, 4, 8, 16, 24, 48, 96, 100, 192, 384)
    shape = _image(d, channels)
    weight, bias = _channel_parameters(d, channels, dtype)
    modulation = [*shape[:2], *(1,) * (len(shape) - 2)]
    scale, shift = (d.maybe(d.tensor(modulation, d.other(dtype))) for _ in range(2))
    rounds = None if dtype == torch.float64 or d.chance(0.7) else d.one_of(torch.float16, torch.bfloat16)
    options = {"eps": d.one_of(1e-6, 1e-12), "eps_mode": d.one_of("add", "clamp"),
               "activation": d.one_of("silu", None), "round_dtype": rounds}  # fmt: skip
    if options["eps_mode"] == "add":
        options["eps"] = 1e-6
    operands = {"x": d.tensor(shape, dtype, values), "weight": weight, "bias": bias, "scale": scale, "shift": shift}
    return Case("channel_rms_norm_silu", operands, options, rounds is not None)


def channel_glu(d: Draw) -> Case:
    dtype, values = _start(d)
    shape = _image(d, 2 * d.one_of(1, 3, 8, 20, 64, 1032), d.one_of((1,), (2,), (3,)))
    operands = {"x": d.tensor(shape, dtype, values), "bias": d.maybe(d.tensor([shape[1]], d.other(dtype)))}
    rounds = d.chance(0.3)
    return Case("channel_glu", operands, {"activation": d.one_of(*FUNCTIONS), "round_each": rounds}, rounds)


def add_norm_silu_pad(d: Draw) -> Case:
    dtype, values = _start(d)
    channels = d.one_of(1, 3, 8, 16, 24, 64, 96, 128)
    shape = _image(d, channels, (3,))
    operands: dict[str, Operand] = {"x": d.tensor(shape, dtype, values)}
    operands["bias"] = d.maybe(d.tensor([channels], d.other(dtype)))
    operands["residual"] = d.maybe(d.tensor(shape, d.other(dtype)))
    operands["scale"], operands["shift"] = (d.maybe(d.tensor(shape[:2], d.other(dtype))) for _ in range(2))
    options = {
        "eps": 1e-6, "norm": d.one_of("rms", None), "activation": d.one_of("silu", None),
        "pad": d.one_of((0, 0), (1, 0), (2, 1)),
        "memory_format": d.one_of(torch.contiguous_format, torch.channels_last_3d),
    }  # fmt: skip
    return Case("add_norm_silu_pad", operands, options)


def linear_attention(d: Draw) -> Case:
    dtype, values = d.dtype(), Values(d.one_of(0.3, 1.0))
    batch, tokens, seen, heads = d.one_of(1, 2), d.one_of(1, 3, 16, 33), d.one_of(1, 3, 16, 33), d.one_of(1, 3)
    size = d.one_of(1, 4, 12, 32, 40)
    q, k = [batch, tokens, heads, size], [batch, seen, heads, size]
    operands: dict[str, Operand] = {"q": d.tensor(q, dtype, values)}
    operands |= {name: d.tensor(k, d.other(dtype), values) for name in ("k", "v")}
    if d.everything or d.chance(0.4):
        operands |= {"q_rotated": d.tensor(q, d.other(dtype), values), "k_rotated": d.tensor(k, d.other(dtype), values)}
    return Case("linear_attention", operands, {"eps": 1.0})


def linear_gelu(d: Draw) -> Case:
    dtype, values = _start(d)
    depth, columns = d.one_of(0, 1, 3, 16, 24, 64), d.one_of(0, 1, 5, 16, 40)
    # torch's own product in bfloat16 on a CPU with AMX reads rows of an odd length in pairs of values: one that is no
    # number reaches the row before, also in stock models.
    special = values.special and depth % 2 == 0
    operands = {
        "x": d.tensor([*d.lead(depth), depth], dtype, Values(values.scale, 0.0, special)),
        "weight": d.tensor([columns, depth], dtype, Values(0.2)), "bias": d.maybe(d.tensor([columns], dtype)),
    }  # fmt: skip
    return Case("linear_gelu", operands, {"approximate": d.one_of("tanh", "none")}, True)


def _rotation_options(d: Draw, dtype: torch.dtype) -> tuple[dict[str, Any], bool]:
    arithmetic = d.one_of("float32", "float32", "float64", "input")
    return {"pairing": d.one_of("interleaved", "half"), "arithmetic": arithmetic}, arithmetic == "input"


def _heads(d: Draw) -> tuple[list[int], int, int]:
    """A shape [B, S, H, D] or [B, H, S, D], the dimension of the tokens, and the size of a head."""
    head = 2 * d.one_of(1, 2, 4, 5, 8, 12, 16, 32, 64)
    batch, tokens, heads = d.one_of(1, 2, 3), d.one_of(1, 2, 6, 12), d.one_of(1, 2, 3, 8)
    seq_dim = d.one_of(1, 2)
    shape = [batch, tokens, heads, head] if seq_dim == 1 else [batch, heads, tokens, head]
    return shape, seq_dim, head


def _rotary(d: Draw, head: int) -> int | None:
    return d.one_of(None, None, 2 * d.one_of(*range(1, head // 2 + 1)))


def _full_table(d: Draw, shape: list[int], seq_dim: int, count: int, columns: int, dtype: torch.dtype) -> Tensor:
    lead = [1] * (len(shape) - 1)
    lead[seq_dim] = count
    if d.chance(0.2):
        lead[0] = shape[0]
    if d.chance(0.15):
        lead = [*shape[:seq_dim], count, *shape[seq_dim + 1 : -1]]
    return d.tensor([*lead, columns], dtype)


def rope(d: Draw) -> Case:
    dtype, values = _start(d)
    shape, seq_dim, head = _heads(d)
    rotary = _rotary(d, head)
    options, rounds = _rotation_options(d, dtype)
    count, tokens = shape[seq_dim], None
    if d.chance(0.25):
        start = d.one_of(*range(count + 1))
        tokens = start, d.one_of(*range(count - start + 1))
        count = tokens[1]
    columns = d.one_of(1, 2) * (rotary or head) // 2
    table_dtype = (
        dtype if dtype == torch.float64 else d.one_of(torch.float32, torch.float32, *[dtype] * 2, torch.float64)
    )
    cos, sin = (_full_table(d, shape, seq_dim, count, columns, table_dtype) for _ in range(2))
    options |= {"rotary_dim": rotary, "tokens": tokens, "seq_dim": d.one_of(seq_dim, seq_dim - 4)}
    operands: dict[str, Operand] = {"x": d.tensor(shape, dtype, values), "cos": cos, "sin": sin}
    return Case("rope", operands, options, rounds)


def _axes(d: Draw, pairs: int, dtype: torch.dtype) -> tuple[dict[str, Any], list[int], list[Tensor], list[Tensor]]:
    """Options, the grid, and the tables of axes that hold ``pairs`` angles."""
    order = d.one_of("blocked", "alternating")
    axes = d.one_of(*range(1, min(pairs, 4) + 1))
    if order == "alternating":
        widths = [pairs // axes] * axes
    else:
        widths = [1] * axes
        for _ in range(d.one_of(*range(pairs - axes + 1))):
            widths[d.one_of(*range(axes))] += 1
    grid = [d.one_of(1, 2, 3, 4) for _ in range(axes)]
    tables = [[d.tensor([size + d.one_of(0, 0, 2), width], dtype) for size, width in zip(grid, widths, strict=True)]
              for _ in range(2)]  # fmt: skip
    tables[1] = [d.tensor(list(table.shape), dtype) for table in tables[0]]
    return {"order": order, "front_pad": pairs - sum(widths)}, grid, tables[0], tables[1]


def _positions(d: Draw, grid: list[int], tables: list[Tensor], batch: int) -> dict[str, Any]:
    """A grid, or coordinates of as many tokens."""
    if d.chance(0.5):
        return {"grid": tuple(grid), "coords": None}
    lead = [batch] if d.chance(0.4) else []
    columns = [torch.arange(math.prod([*lead, math.prod(grid)])) % table.shape[0] for table in tables]
    coords = torch.stack(columns, -1).view(*lead, math.prod(grid), len(grid))
    return {"grid": None, "coords": coords.to(d.one_of(torch.int32, torch.int64)).to(d.device)}


def rope_3d(d: Draw) -> Case:
    dtype, values = _start(d)
    shape, seq_dim, head = _heads(d)
    rotary = _rotary(d, head)
    options, rounds = _rotation_options(d, dtype)
    heads = shape[3 - seq_dim]
    pairs = (rotary or head) // 2
    if rotary is None and d.chance(0.3):
        pairs *= heads  # each head has its own share
    table_dtype = dtype if dtype == torch.float64 else d.one_of(torch.float32, dtype, torch.float64)
    axes, grid, cos, sin = _axes(d, pairs, table_dtype)
    count = math.prod(grid)
    before, after = (d.one_of(0, 1, 2), d.one_of(0, 3)) if d.chance(0.25) else (0, 0)
    shape[seq_dim] = before + count + after
    tokens = (before, count) if before or after else None
    positions = _positions(d, grid, cos, shape[0])
    options |= axes | {"rotary_dim": rotary, "tokens": tokens, "seq_dim": d.one_of(seq_dim, seq_dim - 4),
                       "grid": positions["grid"]}  # fmt: skip
    operands: dict[str, Operand] = {"x": d.tensor(shape, dtype, values), "cos_axes": cos, "sin_axes": sin,
                                    "coords": positions["coords"]}  # fmt: skip
    return Case("rope_3d", operands, options, rounds)


def expand_axes(d: Draw) -> Case:
    dtype = torch.float64 if d.chance(0.1) else d.dtype()
    axes, grid, cos, sin = _axes(d, d.one_of(1, 2, 6, 16), dtype)
    positions = _positions(d, grid, cos, 2)
    operands: dict[str, Operand] = {"cos_axes": cos, "sin_axes": sin, "coords": positions["coords"]}
    return Case("expand_axes", operands, {**axes, "grid": positions["grid"]})


def qk_norm_rope(d: Draw) -> Case:
    dtype, values = _start(d)
    shape, seq_dim, head = _heads(d)
    kind = d.one_of("axes", "tables", "none")
    options, rounds = _rotation_options(d, dtype)
    rotary = _rotary(d, head) if kind != "none" else None
    table_dtype = dtype if dtype == torch.float64 else d.one_of(torch.float32, torch.float32, dtype)
    operands: dict[str, Operand] = dict.fromkeys(
        ("q", "k", "q_weight", "k_weight", "q_bias", "k_bias", "cos", "sin", "cos_k", "sin_k", "coords")
    )
    options |= {"grid": None, "tokens": None, "seq_dim": seq_dim, "order": "blocked", "front_pad": 0}
    if kind == "axes":
        axes, grid, operands["cos"], operands["sin"] = _axes(d, (rotary or head) // 2, table_dtype)
        shape[seq_dim] = math.prod(grid)
        positions = _positions(d, grid, operands["cos"], shape[0])
        operands["coords"], options = positions["coords"], options | axes | {"grid": positions["grid"]}
    across = seq_dim == 1 and d.chance(0.4)
    k_shape = list(shape)
    k_shape[3 - seq_dim] = d.one_of(1, shape[3 - seq_dim], 2)
    if kind == "none":
        k_shape[seq_dim] = d.one_of(shape[seq_dim], 5)
    if kind == "tables":
        columns = d.one_of(1, 2) * (rotary or head) // 2
        lead = [1] * 3
        lead[seq_dim] = shape[seq_dim]
        for name in ("cos", "sin", "cos_k", "sin_k"):
            operands[name] = d.tensor([*lead, columns], table_dtype)
        if not d.maybe(True):
            operands["cos_k"] = operands["sin_k"] = None
        else:
            k_shape[seq_dim] = shape[seq_dim]
    norm = d.one_of("rms", "layer", None)
    for name, own in (("q", shape), ("k", k_shape)):
        flat = [*own[:2], own[2] * own[3]] if across else own
        operands[name] = d.tensor(flat, dtype, values)
        if norm is not None:
            operands[f"{name}_weight"], operands[f"{name}_bias"] = (
                d.maybe(d.tensor([flat[-1]], d.other(dtype), Values(0.5, 1.0))) for _ in range(2)
            )
    round_norm = d.chance(0.3)
    options |= {"rotary_dim": rotary, "eps": 1e-6, "norm": norm, "across_heads": shape[2] if across else None,
                "weight_offset": d.one_of(0.0, 1.0) if norm == "rms" else 0.0, "round_norm": round_norm,
                "round_dtype": None}  # fmt: skip
    return Case("qk_norm_rope", operands, options, rounds or round_norm)


def joint_qk_norm_rope(d: Draw) -> Case:
    dtype, values = _start(d)
    shape, dim, head = _heads(d)
    options, rounds = _rotation_options(d, dtype)
    norm, tokens = d.one_of("rms", "layer", None), (shape[dim], d.one_of(1, 3, 5))
    operands: dict[str, Operand] = {}

    def streams(heads: int) -> list[Tensor]:
        shapes = [list(shape) for _ in tokens]
        for own, count in zip(shapes, tokens, strict=True):
            own[dim], own[3 - dim] = count, heads
        return [d.tensor(own, dtype, values) for own in shapes]

    operands["queries"], operands["keys"] = streams(shape[3 - dim]), streams(d.one_of(1, 2))
    for name in ("q_weights", "k_weights", "q_biases", "k_biases") if norm is not None else ():
        if d.maybe(True):
            operands[name] = [d.tensor([head], d.other(dtype), Values(0.5, 1.0)) for _ in tokens]
    if d.maybe(True):
        table_dtype = dtype if dtype == torch.float64 else d.one_of(torch.float32, torch.float32, dtype)
        columns, any_heads = d.one_of(1, 2) * head // 2, list(shape)
        any_heads[3 - dim] = 1
        for name in ("cos", "sin"):
            operands[name] = [_full_table(d, any_heads, dim, count, columns, table_dtype) for count in tokens]
    options |= {"eps": 1e-6, "norm": norm, "dim": dim, "round_norm": d.chance(0.3)}
    return Case("joint_qk_norm_rope", operands, options, rounds or options["round_norm"])


def activation_fp8(d: Draw) -> Case:
    last = d.size()
    lead, dtype = d.lead(last), d.dtype()
    operands = {"x": d.tensor([*lead, last], dtype)}
    if d.maybe(True):
        operands["front"] = d.tensor([*lead, d.one_of(1, 8, 40)], dtype)
    return Case("activation_fp8", operands, {"function": d.one_of("identity", *FUNCTIONS)})


def norm_modulate_fp8(d: Draw) -> Case:
    return _as_fp8("norm_modulate_fp8", norm_modulate(d))


def gate_residual_norm_modulate_fp8(d: Draw) -> Case:
    return _as_fp8("gate_residual_norm_modulate_fp8", gate_residual_norm_modulate(d))


def norm_modulate_and_fp8(d: Draw) -> Case:
    return _as_fp8("norm_modulate_and_fp8", norm_modulate(d), set())


def gate_residual_norm_modulate_and_fp8(d: Draw) -> Case:
    return _as_fp8("gate_residual_norm_modulate_and_fp8", gate_residual_norm_modulate(d), set())


def _as_fp8(op: str, case: Case, kept: Collection[str] = ("eps", "norm")) -> Case:
    """The call of an op with rows of fp8 and the options ``kept``; with all of them if none is named."""
    wide = (torch.float64,)
    options = {
        name: None if value in wide else value for name, value in case.options.items() if name in kept or not kept
    }
    plain = {torch.float64: torch.float32}
    return Case(
        op,
        case.changed(lambda _, t: torch.nan_to_num(t.to(plain.get(t.dtype, t.dtype)), 0, 0, 0)).operands,
        options,
        True,
    )


def glu_and_fp8(d: Draw) -> Case:
    case = glu(d)
    while not any(case.operands["value"].shape[-1:]):  # a row needs elements
        case = glu(d)
    return _as_fp8("glu_and_fp8", case, set())


def linear_fp8(d: Draw) -> Case:
    depth, columns = d.one_of(16, 32, 64), d.one_of(16, 48)
    lead = d.lead(depth)
    operands = {
        "x": d.tensor([*lead, depth], torch.float32, plain=True).to(torch.float8_e4m3fn),
        "x_scale": d.tensor([*lead, 1], torch.float32, Values(0.1, 1.0), plain=True),
        "weight": d.tensor([columns, depth], torch.float32, plain=True).to(torch.float8_e4m3fn),
        "weight_scale": d.tensor([columns, 1], torch.float32, Values(0.1, 1.0), plain=True),
    }  # fmt: skip
    out_dtype = d.dtype()
    operands["bias"] = d.maybe(d.tensor([columns], out_dtype))
    return Case("linear_fp8", operands, {"out_dtype": out_dtype}, True)


GENERATORS: dict[str, Callable[[Draw], Case]] = {
    generator.__name__: generator
    for generator in (
        activation_fp8, add_norm_silu_pad, channel_glu, channel_rms_norm_silu, expand_axes, gate_residual,
        gate_residual_norm_modulate, gate_residual_norm_modulate_and_fp8, gate_residual_norm_modulate_fp8, geglu,
        gelu, glu, glu_and_fp8, group_norm_silu, joint_qk_norm_rope, layer_norm, linear_attention, linear_fp8,
        linear_gelu, norm_modulate, norm_modulate_and_fp8, norm_modulate_fp8,
        qk_norm_rope, quick_gelu, rms_norm, rope, rope_3d, silu, swiglu,
    )
}  # fmt: skip
