"""The patch on a module: the forward that runs it, and how it is put there and taken away."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern.blocks.pieces import EQUIVALENT_FORWARDS
from diffkern.cache import forget
from diffkern.cache.in_call import one_model_call, within_one_call
from diffkern.injection import hooks, notes
from diffkern.injection.state import ATTRIBUTE, PatchState
from diffkern.providers.base import KernelFileError
from diffkern.providers.dispatch_modes import is_exporting
from diffkern.providers.foreign import is_of_user, summary

if TYPE_CHECKING:
    from diffkern.verify.fusion import Fusion

# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs fused where the guards allow it, and the class's own forward everywhere else."""
    state: PatchState | None = self.__dict__.get(ATTRIBUTE)
    if state is None:  # restored, and a caller kept this method
        return type(self).forward(self, *args, **kwargs)
    kept = state.kept
    if kept is not None and not (_is_traced() or torch.is_grad_enabled() or torch._C._get_tracing_state() is not None):
        x = args[0] if args else next(iter(kwargs.values()), None)
        shape, dtype, device, dense, run, reason = kept
        if (
            type(x) is Tensor
            and x.shape == shape
            and x.dtype is dtype
            and x.device == device
            and x.is_contiguous() is dense
            and type(self).forward is state.stock
            and state.below is None
            and state.revoked is None
        ):
            if reason:
                state.add_stock(reason)
                return run(self, *args, **kwargs)
            try:
                return run(self, *args, **kwargs)
            except Exception as error:
                return _recovered(state, self, error, args, kwargs)
    direct = state.direct if state.below is None and type(self).forward is state.stock else None
    if direct is not None and not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
        state.add_fused()
        return direct(self, *args, **kwargs)
    if state.gains and state.below is None and not state.is_model:
        gain = state.gain_of(args, kwargs)
        if gain:
            run = type(self).forward
            if run is state.stock:
                run = state.fusion.without_gain or run
                state.keep(args, kwargs, run, gain)
            state.add_stock(gain)
            return run(self, *args, **kwargs)
        if gain is not None and state.is_straight and not (state.revoked or state.was_replaced(self)):
            function = state.fusion.function(self, state.rule.otherwise)
            if function is not None:
                state.keep(args, kwargs, function, "")
            return _compute(state, self, (args, kwargs), (), args, kwargs)
    if state.is_model and not torch.compiler.is_compiling():
        with one_model_call():
            return _run_patch(state, self, args, kwargs)
    return _run_patch(state, self, args, kwargs)


def _run_patch(state: PatchState, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if is_exporting() or torch._C._get_tracing_state() is not None:
        # What is exported is to be loaded where there is no diffkern, and on other devices.
        notes.exported_as_stock(state.report)
        return _run_below(state, module, args, kwargs)
    call = state.fusion.bind(args, kwargs)
    if torch.compiler.is_compiling():
        notes.traced(state.report)
        if call is not None and state.is_left_to_compiler(module, call):
            return _run_below(state, module, args, kwargs)
    stock = state.check_guards(module, call, forward)
    if stock is None:
        return _run_below(state, module, args, kwargs)
    return _compute(state, module, call, stock, args, kwargs)


def _compute(
    state: PatchState, module: nn.Module, call: Any, stock: tuple[str, ...], args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    provider = state.rule.otherwise
    if state.rule.situations:
        provider = state.rule.at(state.fusion.primary_input(call).device, module.training)
    try:
        return state.fusion.compute(module, call, provider, stock)
    except Exception as error:
        return _recovered(state, module, error, args, kwargs)


def _recovered(
    state: PatchState, module: nn.Module, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The result of a call that failed, without the patch, if that is to blame; raises the error otherwise."""
    if isinstance(error, KernelFileError):
        state.disable(module, f"a kernel could not be written or read: {error}", error)
        return _run_below(state, module, args, kwargs)
    if not state.fusion.is_layer or torch.compiler.is_compiling() or is_of_user(error):
        raise
    result = _run_below(state, module, args, kwargs)  # raises as well where the call is wrong, and not the layer
    state.disable(module, f"{state.fusion.op} failed: {summary(error)}", error)
    return result


def _run_below(state: PatchState, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if state.below is not None:
        return _run_patch(state.below, module, args, kwargs)
    run = type(module).forward
    if torch.compiler.is_compiling() and run is state.stock:
        # The same by another name: by this one torch.compile cannot trace it in classes that diffusers marks.
        run = state.stock
    return run(module, *args, **kwargs)


def run_below(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], fusion: Fusion | None = None) -> Any:
    """Runs a patched module as it would without the patch of ``fusion``, or the topmost one, and those over it."""
    state = next(patches(module), None) if fusion is None else patch_of(module, fusion)
    if state is None:  # restored by another thread
        return type(module).forward(module, *args, **kwargs)
    return _run_below(state, module, args, kwargs)


_forwards: dict[Callable[..., Any], FunctionType] = {}


def _forward_like(stock: Callable[..., Any]) -> FunctionType:
    """:func:`forward` with the signature of a stock forward, from which modular pipelines take what they may pass.

    Code that unwraps it finds one more function that runs the patches, and not the stock one:
    accelerate puts what it finds there in the place of the forward.
    """
    if stock not in _forwards:
        inner, outer = (FunctionType(forward.__code__, forward.__globals__, forward.__name__) for _ in range(2))
        inner.__dict__["__signature__"] = inspect.signature(stock)
        outer.__dict__["__wrapped__"] = inner
        EQUIVALENT_FORWARDS.update((inner, outer))
        _forwards[stock] = outer
    return _forwards[stock]


def _held_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The function by which a module runs its patches, below hooks or not, or None."""
    for slot in hooks.slots(module):
        held = slot.forward
        if isinstance(held, MethodType) and held.__self__ is module and held.__func__ in EQUIVALENT_FORWARDS:
            return held.__func__
    return None


def patch_state(module: nn.Module) -> PatchState | None:
    """Returns the state of a patched module, of the topmost patch if there are several; None if it is not patched."""
    state = module.__dict__.get(ATTRIBUTE)
    return state if isinstance(state, PatchState) and _held_forward(module) is not None else None


def patches(module: nn.Module) -> Iterator[PatchState]:
    """Yields the states of all patches of a module, the topmost first, under whatever forward there is now."""
    state = module.__dict__.get(ATTRIBUTE)
    while isinstance(state, PatchState):
        yield state
        state = state.below


def patch_of(module: nn.Module, fusion: Fusion) -> PatchState | None:
    """The patch of a fusion; None if another thread restored the module."""
    return next((state for state in patches(module) if state.fusion is fusion), None)


def is_in_place(module: nn.Module, state: object) -> bool:
    """Whether calls may reach a patch: ``module.forward = f`` and then ``del module.forward`` leave the class's own."""
    there = any(found is state for found in patches(module))
    return there and (_held_forward(module) is not None or hooks.foreign_forward(module) is not None)


def patch(module: nn.Module, state: PatchState) -> None:
    """Puts :func:`forward` under whatever hooks sit on ``module``, and over a patch that is there."""
    state.below = below = patch_state(module)
    state.stock = type(module).forward
    direct = None if state.rule.situations else state.fusion.direct
    state.is_model |= below is not None and below.is_model
    state.direct = within_one_call(direct) if direct is not None and state.is_model else direct
    state.had_instance_forward = "forward" in module.__dict__ if below is None else below.had_instance_forward
    object.__setattr__(module, ATTRIBUTE, state)
    if below is not None:
        return
    fused = MethodType(_forward_like(state.stock), module)
    if not state.had_instance_forward:
        object.__setattr__(module, "forward", fused)
    elif not hooks.replace(module, type(module).forward, fused):
        del module.__dict__[ATTRIBUTE]
        raise RuntimeError(f"cannot patch {type(module).__name__}: {hooks.foreign_forward(module)}")


def unpatch(module: nn.Module) -> int:
    """Takes :func:`forward` out from under all hooks; returns how many patches that computed something there were."""
    stack = list(patches(module))
    state = module.__dict__.get(ATTRIBUTE)
    held = _held_forward(module)
    found = held is not None and hooks.replace(module, held, MethodType(type(module).forward, module)) > 0
    plain = hooks.is_bound(module.__dict__.get("forward"), type(module).forward, module)
    if found and plain and not (isinstance(state, PatchState) and state.had_instance_forward):
        del module.__dict__["forward"]
    # Last: until here another thread may be on its way through the patch.
    module.__dict__.pop(ATTRIBUTE, None)
    for removed in stack:
        removed.restored = True
    forget(module)
    return sum([not (state.fusion.only_watches or (state.site is not None and state.site.waiting)) for state in stack])


def remove_patch(module: nn.Module, state: PatchState) -> bool:
    """Takes one patch away, from over or under another one; returns whether it was there."""
    stack = list(patches(module))
    if state not in stack:
        return False
    if len(stack) == 1:
        return unpatch(module) > 0
    place = stack.index(state)
    if place == 0:
        object.__setattr__(module, ATTRIBUTE, state.below)
    else:
        stack[place - 1].below = state.below
    state.restored = True
    forget(module)
    return True
