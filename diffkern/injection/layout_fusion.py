"""A convolutional model that computes in channels last inside, where that takes less time on the device at hand."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from diffkern.blocks import layout
from diffkern.cache import memory
from diffkern.graph.capture import replay_time
from diffkern.injection import notes
from diffkern.injection.patching import patch_of, run_below
from diffkern.injection.state import LOCK
from diffkern.ops.group_norm import following_layout
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.providers.foreign import preserved, summary
from diffkern.verify import choices, gradients
from diffkern.verify.contract import SANE
from diffkern.verify.fusion import NO_TENSOR, Fusion
from diffkern.verify.gain import Prepared, costs_of, finish, kept_costs, reason_without_gain
from diffkern.verify.isolation import Copy, tensors_of
from diffkern.verify.measures import relative_error

Call = tuple[tuple[Any, ...], dict[str, Any]]

OP = "channels_last"
#: What memory knows: "" where the model computes in channels last, else why it does not.
_DECIDED = "layout"
#: ... and how the results of stock are laid out.
_RESULT = "layout of results"
#: ... and that a call took too long to decide, as the first one may.
_WARM = "layout, once warm"
#: What a call may take, in seconds, to be repeated for its times; the first one proves and compiles, too.
_LONGEST = 1.0


@dataclass(frozen=True, eq=False)
class LayoutFusion(Fusion):
    """A model whose weights are laid out in channels last if its first call takes less time so."""

    numerics: str  # ``"exact"`` has it only with the bits of stock, on the input of the first call
    #: Whether only the time of the device counts, see :func:`diffkern.verify.gain.reason_without_gain`.
    device_counts: bool

    op = OP
    proves_itself = True

    @override
    def primary_input(self, call: Call) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
        return next((x for x in tensors if x.ndim in (4, 5) and x.is_floating_point()), NO_TENSOR)

    @override
    def declines(self, module: nn.Module, call: Call) -> str | None:
        """Why a call runs in the layout that the user has. What was decided before holds."""
        decided, x = memory(module).get(_DECIDED), self.primary_input(call)
        if decided:
            return str(decided)
        if _is_captured(x):  # as the calls before it ran: no layout may change in the memory of a graph
            return "a CUDA graph is being captured around it" if decided is None else None
        reason = _unfit_call(module, x, call)
        if decided == "" and reason is None:
            reason = layout.changed(module)
            if reason is not None:
                memory(module)[_DECIDED] = reason
        if decided == "" and reason is not None and not torch.compiler.is_compiling():
            layout.give_back(module)
        return reason

    @override
    def allowed_in_strict(self, module: nn.Module, call: Call) -> bool:
        """Always: no user asks for a layout."""
        return True

    @override
    def compute(self, module: nn.Module, call: Call, provider: str | None, stock: tuple[str, ...]) -> Any:
        if memory(module).get(_DECIDED) == "":
            return self._in_channels_last(module, call)
        with LOCK:
            return self._decide(module, call)

    def _in_channels_last(self, module: nn.Module, call: Call) -> Any:
        if not _is_captured(self.primary_input(call)):
            layout.convert(module)
        with following_layout():
            return layout.laid_out(self.stock(module, call), memory(module).get(_RESULT, ""))

    def _decide(self, module: nn.Module, call: Call) -> Any:
        """The result of the first call, after which the layout is decided, unless it took too long to tell."""
        reason = layout.unfit(module)
        x = self.primary_input(call)
        key = self._timed(module, x)
        known = costs_of(choices.recall(x.device, *key) or "")
        results = choices.recall(x.device, _RESULT, *key)
        if reason is None and known is not None and results is not None and self.numerics != "exact":
            memory(module)[_RESULT] = results
            reason = reason_without_gain(known[0], known[1], self.device_counts)
            self._tell(module, reason, reason or f"{known[0]} instead of {known[1]}")
            return self._in_channels_last(module, call) if not reason else self._as_it_is(module, call, reason)
        if reason is not None:
            self._tell(module, reason, reason)
            return self._as_it_is(module, call, reason)
        copy, began = Copy(call).call, time.perf_counter()
        result = self._as_it_is(module, call, "its layout is not decided yet")
        finish(x.device)
        memory(module)[_RESULT] = layout.layouts(result)
        choices.remember(x.device, memory(module)[_RESULT], _RESULT, *key)
        if time.perf_counter() - began > _LONGEST and _WARM not in memory(module):
            memory(module)[_WARM] = True  # most of it may have been proofs and compilers
            return result
        if time.perf_counter() - began > _LONGEST:
            reason = said = f"a call takes more than {_LONGEST:.0f} s, too long to be timed in both layouts"
        else:
            reason, said = self._weigh(module, copy, x.device, key)
        self._tell(module, reason, said)
        if reason:
            layout.give_back(module)
            return result
        with preserved(x.device):  # so the next call of a seed has the bits of this one
            again = Copy(copy).call
            result = self._in_channels_last(module, again)
        _hand_over(again, call)
        return result

    def _timed(self, module: nn.Module, x: Tensor) -> tuple[Hashable, ...]:
        """What is timed: a model, of whose class others are wider, on an input of about which size."""
        held = sum(weight.numel() for _, _, child in layout.convolutions(module) for weight in child.parameters())
        sizes = [f"2^{size.bit_length() - 1}" for size in (x.numel(), held)]
        name = type(module).__qualname__
        return "layout", name, self.numerics, x.ndim, str(x.dtype), f"{sizes[0]} numbers", f"{sizes[1]} weights"

    def _weigh(self, module: nn.Module, call: Call, device: torch.device, key: tuple[Hashable, ...]) -> tuple[str, str]:
        """Why a model does not compute in channels last, or ""; and what the report says of it."""
        graphed = self.device_counts and device.type == "cuda"
        # To lay weights out takes about as long as a step, and no step does it.
        ours, stock = (
            Prepared(partial(prepare, module), compute, partial(replay_time, compute, device) if graphed else None)
            for prepare, compute in (
                (layout.convert, lambda: self._in_channels_last(module, Copy(call).call)),
                (layout.give_back, lambda: self.stock(module, Copy(call).call)),
            )
        )
        try:
            with torch.no_grad(), preserved(device):
                results = []
                for compute in (ours, stock):
                    compute.prepare()
                    torch.manual_seed(0)
                    results.append(tensors_of(compute()))
                reason = self._difference(*results)
                del results
                found = None if reason else kept_costs((ours, stock), device, *key)
        except Exception as error:  # a model that asks for strides, or for more memory than there is
            return (reason := f"it does not run in channels last: {summary(error)}"), reason
        if found is None:
            return reason, reason
        reason = reason_without_gain(found[0], found[1], self.device_counts)
        return reason, reason or f"{found[0]} instead of {found[1]}"

    def _difference(self, ours: list[Tensor], stock: list[Tensor]) -> str:
        for one, other in zip(ours, stock, strict=True):
            if self.numerics == "exact" and not (torch.equal(one, other) and one.stride() == other.stride()):
                return "in channels last its result has other bits"
            if one.is_floating_point() and relative_error(one, other.double()) > SANE.get(one.dtype, 0.0):
                return "in channels last its result is another"
        return ""

    def _as_it_is(self, module: nn.Module, call: Call, reason: str) -> Any:
        state = patch_of(module, self)
        if state is not None:
            state.take_fused_back()
            state.add_stock(reason)
        return self.stock(module, call)

    @override
    def stock(self, module: nn.Module, call: Call) -> Any:
        return run_below(module, *call, self)

    def _tell(self, module: nn.Module, reason: str, said: str) -> None:
        """Keeps a decision, and puts it into the report."""
        memory(module)[_DECIDED] = reason
        state = patch_of(module, self)
        if state is not None and state.site is not None:
            state.site.waiting, state.site.reason = bool(reason), said
            what = "keeps its layout" if reason else "computes in channels last"
            notes.add(state.report, f"{state.site.path or type(module).__name__} {what}: {said}")


def is_undecided(module: nn.Module) -> bool:
    """Whether the next call decides about the layout: once it was captured, none would be asked any more."""
    return _WARM in memory(module) and _DECIDED not in memory(module)


def _hand_over(copy: Call, call: Call) -> None:
    """Gives a call what another one wrote into its lists and dicts: caches that the next call reads, as of Wan."""
    for ours, given in zip((*copy[0], *copy[1].values()), (*call[0], *call[1].values()), strict=True):
        if type(given) is list:
            given[:] = ours
        elif type(given) is dict:
            given.clear()
            given.update(ours)


def _unfit_call(module: nn.Module, x: Tensor, call: Call) -> str | None:
    """Why a call runs in the layout that the user has, whatever was decided; or None."""
    if torch.compiler.is_compiling():
        return "inside of torch.compile"
    if x.ndim not in (4, 5) or type(x) is not Tensor or x.is_meta:
        return "its input is no plain image or video"
    if layout.layouts(x) == "l":
        return "its input is in channels last already, which convolutions follow"
    if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves(call)):
        return "it draws numbers from a generator of the caller"
    if module.training:
        return "it is in training mode"
    if torch.is_grad_enabled() and gradients.wanted(module, x):
        return "gradients are wanted"
    if transforms_active() or modes_active():
        return "under a transform or a mode of torch"
    return None


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the device of a call."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
