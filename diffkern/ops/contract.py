"""The numerical contract: for every op and case, how it computes, where it rounds, and what is promised.

``docs/numerics.md`` shows the table; ``tests/ops/test_contract.py`` tests every row on every provider.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from itertools import chain

#: Modules of this package that hold rows, in the order of the documentation.
FAMILIES = (
    "norm",
    "modulate",
    "rope",
    "qk_norm_rope",
    "joint_qk_norm_rope",
    "activation",
    "linear",
    "linear_attention",
    "group_norm",
    "add_norm_silu_pad",
    "fp8",
)

#: What ``numerics="fast"`` promises unless a row says otherwise.
FAST_BOUND = "error against float64 <= 1.05 x that of the stock chain + 1e-6"

#: Where most ops round that have no option for the dtype of their result, and how variances are found.
TO_INPUT = "once, to the dtype of the input"
CENTRED = "float32, the variance from centred values"


@dataclass(frozen=True)
class ContractRow:
    """One promise.

    Attributes:
        op: Name of the op.
        case: Short name of the case; ``op`` and ``case`` together are unique.
        inputs: Which inputs it is about, in words.
        arithmetic: The precision of all arithmetic between reading and rounding.
        rounds: Where values are rounded to a narrower dtype.
        exact: The chain of plain PyTorch ops that the result equals bit for bit, or None where only
            ``bound`` is promised.
        bound: The promise of ``numerics="fast"``.
    """

    op: str
    case: str
    inputs: str = "float32, float16, bfloat16 in any mix"
    arithmetic: str = "float32"
    rounds: str = "once, to the output dtype"
    exact: str | None = None
    bound: str = FAST_BOUND


def table() -> tuple[ContractRow, ...]:
    """Returns all rows, in the order of the documentation."""
    # By name: in the package, functions cover the modules of the same name.
    rows = (import_module(f"diffkern.ops.{family}").CONTRACT for family in FAMILIES)
    return tuple(chain.from_iterable(rows))


def markdown(rows: Iterable[ContractRow]) -> str:
    """Returns the rows as a Markdown table."""
    lines = ["| op | case | inputs | arithmetic | rounds | exact | fast |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.op}`", row.case, row.inputs, row.arithmetic, row.rounds, row.exact or "-", row.bound)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
