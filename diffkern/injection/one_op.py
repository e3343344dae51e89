"""A block that ``torch.compile`` compiles by itself: one op in its graph, which runs the fused forward as ever.

All of such a block is fused already, and outside of a graph it knows more than in one: what it keeps of a text, which
block comes next, and which algorithm is the fastest. So nothing is traced, nothing has to be compiled again for an
adapter, and compiled blocks are as fast as others. In the graph of a whole model the ops of the block stand one by one:
there Inductor writes into the memory of what a block was given without a sign, and nothing could be kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from diffkern.ops.registration import define

#: What runs a module, and knows how to make a call of operands.
Run = Callable[[nn.Module, Sequence[Tensor | None]], Tensor]

_numbers = itertools.count()
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def number(module: nn.Module) -> Tensor:
    """Returns a number under which the op finds a module; in a tensor, so that one graph serves all blocks."""
    own = next(_numbers)
    _modules[own] = module
    return torch.tensor(own)


def stands_alone(name: str) -> bool:
    """Whether ``torch.compile`` traces a module of a class by itself, and not what calls it.

    Dynamo runs this while it traces, and takes the result for a constant.

    Args:
        name: Of the class.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        root = InstructionTranslator.current_tx().output.root_tx.f_locals.get("self")
    except AttributeError:  # another version of torch: then as part of whatever it is
        return False
    return type(root).__name__ == name and not torch.compiler.is_exporting()


# What torch.compiler.assume_constant_result does, which imports all of torch._dynamo.
stands_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]


def op_that_runs(run: Run) -> Callable[[Tensor, Sequence[Tensor | None]], Tensor]:
    """Returns the op: it takes the number of a module and its operands, and gives what ``run`` gives.

    The result is like the first operand.
    """

    @cache
    def undisturbed() -> Run:
        return torch.compiler.disable(run)  # type: ignore[no-any-return]

    def kernel(own: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        return undisturbed()(_modules[int(own)], operands).contiguous()

    def fake(own: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        first: Any = operands[0]
        return first.new_empty(first.shape)  # type: ignore[no-any-return]

    return define("fused_block", "(Tensor number, Tensor?[] operands) -> Tensor", kernel, fake)
