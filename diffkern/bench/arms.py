"""The arms of a comparison: one pipeline, stock or compiled or injected or both, and stock again after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from diffkern import InjectionReport


@dataclass(frozen=True)
class Arm:
    """What is done to the pipeline before it runs."""

    name: str
    injected: bool = False
    compiled: bool = False


STOCK = Arm("stock")
COMPILED = Arm("compiled", compiled=True)
INJECTED = Arm("injected", injected=True)
INJECTED_COMPILED = Arm("injected + compiled", injected=True, compiled=True)

#: Every arm, the baseline first.
ARMS = (STOCK, COMPILED, INJECTED, INJECTED_COMPILED)


def arm_of(*, injected: bool, compiled: bool) -> Arm:
    """Returns the arm with these two properties."""
    return next(arm for arm in ARMS if (arm.injected, arm.compiled) == (injected, compiled))


@contextlib.contextmanager
def applied(arm: Arm, pipe: Any, denoiser: nn.Module, **injection: Any) -> Iterator[InjectionReport | None]:
    """Puts ``pipe`` into the state that ``arm`` names, and back into its own afterwards.

    Kernels go in before the compiler sees the model, and come out after its graphs are gone.

    Args:
        arm: What to apply.
        pipe: A diffusers pipeline, or a module.
        denoiser: The model in ``pipe`` that the compiled arms compile.
        injection: Keyword arguments of :func:`diffkern.inject_optimized_kernels`.

    Yields:
        The injection report, or None when the arm injects nothing.
    """
    with contextlib.ExitStack() as stack:
        report = None
        if arm.injected:
            from diffkern import inject_optimized_kernels

            report = inject_optimized_kernels(pipe, **injection)
            stack.callback(report.restore)
        if arm.compiled:
            stack.enter_context(compiled(denoiser))
        yield report


@contextlib.contextmanager
def compiled(model: nn.Module, **options: Any) -> Iterator[None]:
    """Compiles ``model`` in place with ``torch.compile`` and takes the compiled code off afterwards.

    A diffusers model that names its repeated blocks is compiled block by block, which takes seconds where
    the whole model takes minutes; any other model is compiled whole.

    Args:
        model: Model to compile. Its modules, names and weights stay as they are.
        options: Keyword arguments of :func:`torch.compile`.
    """
    before = {module: module.__dict__.get("_compiled_call_impl") for module in model.modules()}
    try:
        if getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(**options)  # type: ignore[operator]
        else:
            model.compile(**options)
        yield
    finally:
        for module, implementation in before.items():
            if implementation is None:
                module.__dict__.pop("_compiled_call_impl", None)
            else:
                module._compiled_call_impl = implementation
        torch._dynamo.reset()


def compiler_unavailable_reason(device: torch.device) -> str | None:
    """Returns why ``torch.compile`` cannot generate code for ``device`` here, or None."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # each torch release raises a class of its own for this
            return f"no C++ compiler ({type(error).__name__}): install g++ or clang++"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else f"no Triton for {device.type}: install the triton package of your torch"
