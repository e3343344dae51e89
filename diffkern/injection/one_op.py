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
from diffkern.providers.dispatch_modes import constant_in_graphs

#: What runs a module, and knows how to make a call of operands.
Run = Callable[[nn.Module, Sequence[Tensor | None]], Tensor]

_numbers = itertools.count()
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def module_handle(module: nn.Module) -> Tensor:
    """Returns a number by which the op finds a module; in a tensor, so that one graph serves all blocks."""
    own = next(_numbers)
    _modules[own] = module
    return torch.tensor(own, device="cpu")  # wherever tensors are made by default


@constant_in_graphs
def is_compile_root(name: str, forward: str) -> bool:
    """Whether ``torch.compile`` traces a module of a class by itself, and nothing around it.

    Not where a user put a forward of their own around that of the module: what they compute before and after would
    be in one graph with the op, where Inductor writes into its operands and its result.

    Args:
        name: Of the class.
        forward: The file of the forward with which such a graph begins.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        root = InstructionTranslator.current_tx().output.root_tx
        module, file = root.f_locals.get("self"), root.f_code.co_filename
    except AttributeError:  # another version of torch: then as part of whatever it is
        return False
    return type(module).__name__ == name and file == forward and not torch.compiler.is_exporting()


def op_that_runs(run: Run) -> Callable[[Tensor, Sequence[Tensor | None]], Tensor]:
    """Returns the op: it takes the handle of a module and its operands, and returns what ``run`` returns.

    The result is like the first operand.
    """

    @cache
    def eager_run() -> Run:
        return torch.compiler.disable(run)  # type: ignore[no-any-return]

    def kernel(handle: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        return eager_run()(_modules[int(handle)], operands).contiguous()

    def fake(handle: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        first: Any = operands[0]
        return first.new_empty(first.shape)  # type: ignore[no-any-return]

    # Weights and what is kept are no operands: a CUDA graph (mode="reduce-overhead") would replay those it was captured
    # with, and for whichever block.
    signature, unsafe = "(Tensor handle, Tensor?[] operands) -> Tensor", torch.Tag.cudagraph_unsafe
    return define("fused_block", signature, kernel, fake, unsafe)
