"""How ``qk_norm_rope`` is called for queries and keys of a site. What a helper computes is not parsed.

Tables have a few forms. A site takes the first with which the op computes, in float64 and on random tables, what its
expression computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern import ops
from diffkern.cache.in_call import once_in_call
from diffkern.cache.rotary import ANGLES, axis_tables, by_axis, in_float32, on_device, rotary_tables
from diffkern.rewrite.facts import child_of, read_norm
from diffkern.rewrite.layout import concatenate, order_of_rows, permuted, restored

if TYPE_CHECKING:
    from diffkern.rewrite.site import FusedSite, Way

Tables = tuple[Tensor, Tensor]


#: What tables are in models: name -> how they become cosines and sines.
TABLES: Mapping[str, Callable[..., Any]] = {
    "cosines and sines": lambda cos, sin: (cos, sin),
    "cosines at even places, sines at odd ones": lambda cos, sin: (cos[..., 0::2], sin[..., 1::2]),
    "complex numbers": lambda table: torch.view_as_real(table).unbind(-1),
    "2x2 matrices": lambda table: (table[..., 0, 0], table[..., 1, 0]),
}
#: Those that may have a column for each element that is rotated, of which a head may have more.
_FULL = ("cosines and sines", ANGLES)
#: The operands in front of what is rotated.
_FRONT = ("q0", "k0")
#: 2x2 matrices that need not rotate, whose tables are kept for the other sites of one call of the model.
ANY_MATRICES = "any 2x2 matrices"
#: Cosines and sines of each axis, and then which row of them a token has; a part of each head belongs to an axis.
AXES = "rows of axes"


@dataclass(frozen=True)
class Form:
    """One way of calling the op.

    Attributes:
        tables: One of :data:`TABLES`, :data:`ANY_MATRICES`, :data:`ANGLES` or :data:`AXES`; None for norms without a
            rotation.
        heads_dim: Where the tables lack the dimension of the heads, counted from the end; None if they do not.
        pairing: As in :func:`diffkern.ops.rope`.
        across_heads: Whether the norm is one over all heads.
        heads_first: Whether heads come before tokens, where that matters: in a norm over all of them.
        partial: Whether the columns of the tables say how many elements of a head are rotated, the first ones.
        heads_in_tables: Whether the heads of queries and keys are not taken apart, and tables have them before tokens,
            matrices behind them. The axes of :data:`AXES` are such heads.
    """

    tables: str | None = None
    heads_dim: int | None = None
    pairing: str = "interleaved"
    across_heads: bool = False
    heads_first: bool = False
    partial: bool = False
    heads_in_tables: bool = False

    def of(self, tables: list[Tensor]) -> Tables | tuple[None, None]:
        """Cosines and sines that broadcast against queries or keys."""
        if self.tables is None or not tables:
            return None, None
        if self.tables == AXES:
            cos, sin = axis_tables(tables)
        elif self.tables in (ANY_MATRICES, ANGLES):
            (table,) = tables
            cos, sin = rotary_tables(table, self.pairing if self.tables == ANY_MATRICES else ANGLES)
        else:
            cos, sin = TABLES[self.tables](*tables)
        if self.heads_dim is not None:
            cos, sin = cos.unsqueeze(self.heads_dim), sin.unsqueeze(self.heads_dim)
        return cos, sin


#: The forms that are tried, in this order.
FORMS = tuple(
    [
        Form(tables, heads_dim, pairing, *norm, partial)
        for norm in ((False, False), (True, False), (True, True))
        for tables in (*TABLES, ANY_MATRICES, ANGLES)
        for pairing in ("interleaved", "half")
        for heads_dim in (None, -2, -3)
        for partial in ((True, False) if tables in _FULL and not norm[0] else (False,))
    ]
    + [Form("cosines and sines", None, pairing, True, heads_in_tables=True) for pairing in ("interleaved", "half")]
    + [Form(ANY_MATRICES, None, pairing, True, heads_in_tables=True) for pairing in ("interleaved", "half")]
    + [Form(AXES, dim, pairing, heads_in_tables=True) for pairing in ("interleaved", "half") for dim in (-4, -3)]
)
NORMS = (Form(), Form(across_heads=True))
#: Rows that are one wide head are taken for heads of so many elements that are normalised together, which is quicker.
_WIDTH, _WIDE = 64, 1024
#: Tables that have all columns of what they rotate, of which those of each axis may be kept.
_WHOLE_ROWS = Form("cosines and sines", partial=True)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a leaf: itself, or those of a tuple or a list."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def streams_of(names: Iterable[str]) -> int:
    """How many streams there are among operands with these names."""
    return sum([1 for name in names if name[0] == "q" and name[1:].isdigit()])


def tables_of(operands: Mapping[str, Any], name: str) -> list[Tensor]:
    """The tables among the operands of a stream, such as ``"q0"``, or of all streams of one side, ``"q"``."""
    return tensors_in([value for key, value in operands.items() if key.startswith(f"{name}_table")])


def part_of(table: Tensor | None, like: Tensor, dim: int, start: int) -> Tensor | None:
    """The rows of a table that belong to one of several streams of tokens, which begins at ``start``."""
    if table is None:
        return None
    at = dim % like.ndim - like.ndim + table.ndim
    return table if at < 0 or table.shape[at] == 1 else table.narrow(at, start, like.shape[dim])


def has_wide_tables(operands: Mapping[str, Any]) -> bool:
    """Whether queries and keys are in half precision, and tables in float64."""
    tables = tensors_in([value for name, value in operands.items() if "_table" in name])
    tensors = [x for name, x in operands.items() if "_table" not in name and isinstance(x, Tensor)]
    half = [x.dtype in (torch.float16, torch.bfloat16) for x in tensors]
    return all(half) and any([table.dtype in (torch.float64, torch.complex128) for table in tables])


def columns_of(operands: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """How many columns of cosines there are for each element of a head; 0 without a rotation.

    A table with half of the columns has one for each pair, or turns half of a head: only the source knows.
    """
    if "form" not in options:
        cosines: float = operands["cos"].shape[-1] / operands["q"].shape[-1]
        return cosines
    form, of_all = options["form"], tables_of(operands, "q")
    for i in range(streams_of(operands)):  # of which the text may have none
        cos, _ = form.of([*of_all, *tables_of(operands, f"q{i}")])
        if cos is not None:
            heads = cos.shape[-3 if form.tables in _FULL else -2] if form.heads_in_tables else 1
            share: float = cos.shape[-1] * heads / operands[f"q{i}"].shape[-1]
            return share
    return 0.0


# --- the call ------------------------------------------------------------------------------------------


def call_qk_norm_rope(
    site: FusedSite, module: nn.Module, operands: dict[str, Any], way: Way, provider: str | None, op: Any = ops
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls the op of queries and keys, a member of ``op``: of two streams the one that joins them, where it can.

    Of streams that are joined as they are there is one result.
    """
    options = dict(way.options)
    form, dim, in_order = options.pop("form"), options.pop("stream_dim", None), options.pop("in_order", True)
    if "k0" not in operands:
        return concatenate(list(operands.values()), dim, in_order)
    options["pairing"], narrow = form.pairing, options.pop("tables_in_float32", False)
    if any([operands.get(f"{x}_length", operands[x].shape[dim or 0]) != operands[x].shape[dim or 0] for x in _FRONT]):
        raise ValueError("what is rotated does not begin behind the first stream")
    queries, keys, tables, start = [], [], [], 0
    norms: list[dict[str, Any]] = []
    of_q = [name for name in operands if name.startswith("q") and "_table" in name]
    shared = all([operands[name] is operands.get(f"k{name[1:]}") for name in of_q])
    sides = "q" if shared else "qk"
    for i in range(streams_of(operands)):
        q, k = operands[f"q{i}"], operands[f"k{i}"]
        given = [[*tables_of(operands, side), *tables_of(operands, f"{side}{i}")] for side in sides]
        given = [[in_float32(table) if narrow else table for table in of] for of in given]
        pairs = [form.of([on_device(table, q.device) for table in of]) for of in given]
        pairs = pairs if len(pairs) == 2 else 2 * pairs
        rotates = pairs[0][0]
        if rotates is not None and pairs[1][0] is None:  # queries alone; views of tables are others in each block
            pairs[1] = once_in_call(_no_rotation, given[0][0], rotates.shape[-1], rotates.dtype, q.device)
        if "q_table0" in operands and dim is not None:  # of all streams
            pairs = [(part_of(cos, q, dim, start), part_of(sin, q, dim, start)) for cos, sin in pairs]
            start += q.shape[dim]
        if form.heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if form.heads_first or (form.heads_in_tables and form.tables in _FULL):
            pairs = [(_tokens_first(cos), _tokens_first(sin)) for cos, sin in pairs]
        if form.heads_in_tables:
            if pairs[0][0] is None:
                raise ValueError("a stream without tables does not say how many heads it has")
            q, k = [x.unflatten(-1, (pairs[0][0].shape[-2], -1)) for x in (q, k)]
        cos = pairs[0][0]
        if form.partial and cos is not None and cos.shape[-1] != q.shape[-1]:
            options["rotary_dim"] = cos.shape[-1]
        tables.append(pairs)
        flat = [x.flatten(-2) if form.across_heads else x for x in (q, k)]
        has_norms = f"q_norm{i}" in site.plan.modules
        named = _norms_of(site, module, i, flat) if has_norms and not way.calls_norm else None
        if named is None and has_norms:
            called = [child_of(module, site.plan.modules[f"{side}_norm{i}"]) for side in "qk"]
            q, k = [norm(y).view_as(x) for norm, y, x in zip(called, flat, (q, k), strict=True)]  # type: ignore[misc]
        norms.append(named or {"norm": None})
        queries.append(q)
        keys.append(k)
    kinds = [{name: value for name, value in norm.items() if name in ("norm", "eps")} for norm in norms]
    heads = queries[0].shape[-2] if form.across_heads and norms[0]["norm"] else None
    if len(queries) == 2 and shared and heads is None and kinds[0] == kinds[1] and "rotary_dim" not in options:
        parameters: dict[str, Any] = {
            f"{side}_{plural}": tuple([norm.get(f"{side}_{name}") for norm in norms])
            for side in "qk"
            for name, plural in (("weight", "weights"), ("bias", "biases"))
        }
        cos, sin = ([pairs[0][which] for pairs in tables] for which in (0, 1))
        order = order_of_rows(queries) if in_order else None
        if order is not None:  # kernels write row-major results
            dim = order.index(dim % len(order))
            queries, keys, cos, sin = [
                [None if x is None else permuted(x, order) for x in both] for both in (queries, keys, cos, sin)
            ]
        joint = op.joint_qk_norm_rope(
            (queries[0], queries[1]), (keys[0], keys[1]), cos=(cos[0], cos[1]), sin=(sin[0], sin[1]), dim=dim,
            **kinds[0], **parameters, **options, provider=provider,
        )  # fmt: skip
        return joint if order is None else (restored(joint[0], order), restored(joint[1], order))
    whole = shared and form == _WHOLE_ROWS and len(queries) == 1 and "rotary_dim" not in options
    axes = by_axis(given[0], queries[0].shape[0]) if whole else None
    results = []
    for q, k, ((cos, sin), (cos_k, sin_k)), norm in zip(queries, keys, tables, norms, strict=True):
        of_all: Mapping[str, Any] = axes or {"cos": cos, "sin": sin}
        of_k: dict[str, Any] = {} if shared else {"cos_k": cos_k, "sin_k": sin_k}
        flat = [x.flatten(-2) if heads else x for x in (q, k)]
        wide = axes is not None or (norm["norm"] == "rms" and q.shape[-1] >= _WIDE and form == NORMS[0])
        parts = wide and q.shape[-1] % _WIDTH == 0 and q.shape[-1] == k.shape[-1]
        together = q.shape[-1] // _WIDTH if parts else heads
        both = op.qk_norm_rope(
            flat[0], flat[1], **of_all, **of_k, **norm, across_heads=together, **options, provider=provider
        )
        by_head = [y.view_as(x) for y, x in zip(both, (q, k), strict=True)]
        by_head = [y.flatten(-2) for y in by_head] if form.heads_in_tables else by_head
        results.append([y.transpose(1, 2) for y in by_head] if form.heads_first else by_head)
    of_both = zip(*results, strict=True)
    one, other = [parts[0] if dim is None else concatenate(parts, dim, in_order) for parts in of_both]
    return one, other


def _tokens_first(table: Tensor | None) -> Tensor | None:
    return None if table is None else permuted(table, (0, 2, 1, 3))


def _no_rotation(like: Tensor, columns: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """Cosines and sines for what stays as it is beside what other tables rotate."""
    return torch.ones(columns, dtype=dtype, device=device), torch.zeros(columns, dtype=dtype, device=device)


def _norms_of(site: FusedSite, module: nn.Module, stream: int, inputs: list[Tensor]) -> dict[str, Any] | None:
    """The norms of one stream as arguments of the op, read from the modules at every call; None if they cannot be.

    Raises:
        ValueError: that of the queries and that of the keys are of different kinds.
    """
    arguments: dict[str, Any] = {}
    kinds = []
    for side, x in zip("qk", inputs, strict=True):
        name = f"{side}_norm{stream}"
        read = read_norm(child_of(module, site.plan.modules[name]), site.norms[name], x)
        if read is None:
            return None
        kinds.append({"norm": "rms" if site.norms[name].op == "rms_norm" else "layer", "eps": read.pop("eps")})
        arguments.update({f"{side}_{parameter}": value for parameter, value in read.items()})
    if kinds[0] != kinds[1]:
        raise ValueError("the norms of queries and keys are of different kinds")
    return {**arguments, **kinds[0]}
