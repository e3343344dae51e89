"""The patch itself: the forward that replaces the stock one, and what it knows of its module."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern.hub.rule import Rule
from diffkern.injection import notes
from diffkern.injection.report import ONLY_EAGER, Site
from diffkern.providers import Choice, NoProviderError, hub, requested, select
from diffkern.providers.dispatch_modes import transforms_active
from diffkern.verify import gradients
from diffkern.verify.counts import CallCounts
from diffkern.verify.gain import sharing

if TYPE_CHECKING:
    from diffkern.verify.fusion import Fusion
    from diffkern.verify.proof import Verifier

#: The one attribute that a patched module has besides its forward. It holds no tensor of the model and no module.
ATTRIBUTE = "_diffkern"
#: In place of a provider: the module runs stock.
STOCK = ""
#: Held while modules are patched, restored, or proven at their first use, in whichever threads.
LOCK = threading.RLock()

_REPLACED = "what its class computes was replaced after the injection"

#: What a proof speaks for: device, input dtype, weight dtype, provider and variant.
_Proven = tuple[torch.device, torch.dtype, torch.dtype | None, str | None, Hashable]


class StrictModeError(RuntimeError):
    """Raised in place of a fall back to the stock forward when the injection was strict."""


@dataclass(eq=False, repr=False)
class PatchState(CallCounts):
    """What a patched module's forward needs to know, and what it counts."""

    fusion: Fusion  # what the module computes, and how
    rule: Rule  # who serves it, by device and mode: a provider, None to choose, or STOCK
    verifier: Verifier | None  # proves a device and dtype before its first use, unless that was turned off
    strict: bool  # whether a fall back to the stock forward raises
    numerics: str  # the contract that the patch keeps
    is_model: bool = False  # as Fusion.is_model
    had_instance_forward: bool = False
    below: PatchState | None = None  # what runs where this one runs stock: a graph is put over whatever is there
    #: The forward that the module's class had when it was patched: with another one the patch steps aside.
    stock: Callable[..., Any] | None = None
    direct: Callable[..., Any] | None = None  # as Fusion.direct, where it serves all calls
    site: Site | None = None  # its line in the report, which records proofs at first use; None in a copy of the module
    report: str = ""  # key of the report; a string, which torch.compile takes for a constant
    proven: set[_Proven] = field(default_factory=set)
    revoked: str | None = None  # why the module lost its proof at first use, and runs stock for good
    refused: dict[str | None, str] = field(default_factory=dict)  # why it does where the rule names this provider
    proven_gradients: set[_Proven] = field(default_factory=set)  # the same as proven, where a backward may follow
    no_gradients: dict[str | None, str] = field(default_factory=dict)  # why such calls run stock, by provider
    restored: bool = False  # whether the patch was taken away again
    #: Why calls of a size take no less time fused, or "", as far as that was timed.
    gains: dict[tuple[torch.device, torch.dtype, int, bool], str] = field(default_factory=dict)
    #: Shape, dtype, device and contiguity of the input of the last call without gradients whose size has one, what runs
    #: it, and why that is stock, or "".
    kept: tuple[torch.Size, torch.dtype, torch.device, bool, Callable[..., Any], str] | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self.is_model |= self.fusion.is_model
        #: Whether a call that gains is asked nothing else here: its sites ask.
        self.is_straight = self.fusion.counts_itself and not self.rule.situations

    def check_guards(self, module: nn.Module, call: Any, patched: Callable[..., Any]) -> tuple[str, ...] | None:
        """The parts of this call that run stock, or None if all of it does. Counts it, and proves it the first time."""
        fusion = self.fusion
        if torch.compiler.is_compiling():
            return self._check_while_traced(module, call)
        reason = _REPLACED if self.was_replaced(module) else self.revoked or fusion.declines(module, call)
        if reason is None and self.rule.situations:
            device = fusion.primary_input(call).device
            provider = self.rule.at(device, module.training)
            reason = self.refused.get(provider)
            if provider == STOCK:
                reason = f"left alone by config {_situation(module, device)}"
        if reason is None and not self._is_proven(module, call):
            reason = self._prove(module, call)
        if reason is None and torch.is_grad_enabled() and gradients.wanted(module, fusion.primary_input(call)):
            reason = self._prove_gradients(module, call)
        if reason is None and fusion.is_timed:
            reason = self._weigh(module, call, patched)
        if reason is not None:
            if self.strict and not fusion.allowed_in_strict(module, call):
                raise StrictModeError(f"{type(module).__name__} cannot run fused: {reason}")
            self.add_stock(reason)
            return None
        pieces = fusion.stock_pieces(module, call)
        if pieces:
            if self.strict:
                raise StrictModeError(f"{type(module).__name__} cannot run fused throughout: not {', '.join(pieces)}")
            self.add_pieces(pieces)
        if not fusion.counts_itself:
            self.add_fused()
        return pieces

    def _check_while_traced(self, module: nn.Module, call: Any) -> tuple[str, ...] | None:
        """The same without counters and proofs, which stay out of the graph; what is not proven yet is traced stock."""
        fusion = self.fusion
        if self.was_replaced(module):
            return None
        if self.rule.situations and self.rule.at(fusion.primary_input(call).device, module.training) == STOCK:
            return None
        if fusion.declines(module, call) is not None:
            return None
        x = fusion.primary_input(call)
        if not self._is_proven(module, call):
            if self.revoked is None:
                notes.traced_as_stock(self.report, type(module).__name__, x.device, x.dtype)
            return None
        if fusion.proves_itself:
            notes.traced_as_written(self.report, type(module).__name__, x.device, x.dtype)
        if self._no_gradients(module, x) and gradients.wanted(module, x):
            return None
        if fusion.allowance:
            notes.traced_as_fast(self.report, type(module).__name__)
        return fusion.stock_pieces(module, call)

    def is_left_to_compiler(self, module: nn.Module, call: Any) -> bool:
        """Whether a graph of ``torch.compile`` gets the stock forward of this call."""
        fusion = self.fusion
        return fusion.is_left_to_compiler and self.rule.at(fusion.primary_input(call).device, module.training) is None

    def was_replaced(self, module: nn.Module) -> bool:
        """Whether the class of the module has another forward than when it was patched."""
        return self.stock is not None and type(module).forward is not self.stock

    def trust(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Notes that inputs of ``dtype`` on ``device`` are proven for weights of the dtype ``module`` has."""
        self.proven.add(self._key(module, device, dtype, None))

    def _key(self, module: nn.Module, device: torch.device, dtype: torch.dtype, call: Any) -> _Proven:
        provider, variant = self.rule.at(device, module.training), self.fusion.variant(module, call)
        return device, dtype, self.fusion.weight_dtype(module), provider, variant

    def _key_of(self, module: nn.Module, call: Any) -> _Proven:
        x = self.fusion.primary_input(call)
        return self._key(module, x.device, x.dtype, call)

    def _no_gradients(self, module: nn.Module, x: Tensor) -> str | None:
        return self.no_gradients.get(self.rule.at(x.device, module.training)) if self.no_gradients else None

    def _is_proven(self, module: nn.Module, call: Any) -> bool:
        if self.verifier is None:
            return True
        return self.revoked is None and self._key_of(module, call) in self.proven

    def _prove(self, module: nn.Module, call: Any) -> str | None:
        """Proves a device and dtype that injection did not see, on real weights and, if it can be, the real input."""
        assert self.verifier is not None
        x = self.fusion.primary_input(call)
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "not proven yet, and a proof cannot run while a CUDA graph is captured: run one call before"
        if transforms_active():
            return "not proven yet, and a proof cannot run under a transform: run one call before"
        with LOCK:
            if self._is_proven(module, call):
                return None
            return self.revoked or self._prove_now(module, call, x)

    def _prove_now(self, module: nn.Module, call: Any, x: Tensor) -> str | None:
        assert self.verifier is not None
        provider = self.rule.at(x.device, module.training)
        with contextlib.suppress(NoProviderError):  # the proof says it
            choice = self.fusion.choose(module, provider, x.device, x.dtype)
            plain = only_eager(self.fusion, choice, provider, x.device, x.dtype)
            if plain is not None:
                return plain
        measurement = self.verifier.prove_call(module, self.fusion, provider, call)
        if measurement is None:
            return f"there is no sample to prove it with for {x.dtype} on {x.device}"
        if self.site is not None:
            self.site.measurements.append(measurement)
        if measurement.passed:
            self.proven.add(self._key_of(module, call))
            return None
        return self._try_next_provider(module, call, provider, f"lost its proof at first use: {measurement.reason}")

    def _try_next_provider(self, module: nn.Module, call: Any, provider: str | None, reason: str) -> str | None:
        """Gives a call without a proof to the next provider, as the injection would have done; or returns why not."""
        x = self.fusion.primary_input(call)
        another_may = not self.fusion.is_layer
        if another_may and provider and hub.is_kernel(provider) and not self.strict:
            self.kept = None
            self.rule = self.rule.map(lambda choice: None if choice == provider else choice)
            self._warn(module, reason, f"; the next provider serves {_situation(module, x.device)}")
            return None if self._is_proven(module, call) else self._prove(module, call)
        if set(self.rule.choices()) <= {provider, STOCK}:
            self._revoke(module, reason)
        else:
            self.refused[provider] = reason
            self._warn(module, reason, f"; it runs stock {_situation(module, x.device)}")
        return reason

    def disable(self, module: nn.Module, reason: str, error: Exception) -> None:
        """Leaves a module stock for good, because of an error of a kernel in a call that was counted as fused.

        Raises:
            StrictModeError: the injection was strict.
        """
        if self.strict:
            raise StrictModeError(f"{type(module).__name__} cannot run fused: {reason}") from error
        if not self.fusion.counts_itself:
            self.take_fused_back()
        self.add_stock(reason)
        self._revoke(module, reason)

    def _revoke(self, module: nn.Module, reason: str) -> None:
        self.revoked = reason
        self._warn(module, reason, "; it runs stock from now on")
        if self.site is not None:
            self.site.revoked = True

    def _warn(self, module: nn.Module, reason: str, consequence: str = "") -> None:
        if self.site is not None:
            self.site.reason = reason
        warnings.warn(f"diffkern: {type(module).__name__} {reason}{consequence}", stacklevel=6)

    def gain_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """What :attr:`gains` says of a call; None for a call that is asked all questions."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        if type(x) is not Tensor or torch._C._get_tracing_state() is not None:  # to which sizes are tensors
            return None
        # As _size: in a model, where other code comes between two calls, each function takes microseconds to call.
        reason = self.gains.get((x.device, x.dtype, x.numel().bit_length(), x.is_contiguous()))
        if reason is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None  # times of an inference say nothing of training, where others may compute
        return reason

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[..., Any], reason: str) -> None:
        """Notes what the next calls run that are like this one."""
        x = args[0] if args else next(iter(kwargs.values()))
        self.kept = x.shape, x.dtype, x.device, x.is_contiguous(), run, reason

    def _weigh(self, module: nn.Module, call: Any, patched: Callable[..., Any]) -> str | None:
        """Times calls of a size at the first one that can be; returns why they run stock from then on, or None."""
        x = self.fusion.primary_input(call)
        size = _size(x)
        if torch.is_grad_enabled() and gradients.wanted(module, x):
            return None
        if size in self.gains:
            return self.gains[size] or None
        if transforms_active() or requested(self.rule.at(x.device, module.training)):
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        self.gains[size] = ""  # while it is timed as it will be called
        with contextlib.nullcontext() if self.verifier is None else sharing(self.verifier.costs):
            reason = self.fusion.weigh(module, call, patched)
        if reason is None:
            del self.gains[size]
        else:
            self.gains[size] = reason
        return reason or None

    def _prove_gradients(self, module: nn.Module, call: Any) -> str | None:
        """Proves the gradients of a device and dtype the first time that they are wanted, be that by ``train()``."""
        x, key = self.fusion.primary_input(call), self._key_of(module, call)
        refused = self._no_gradients(module, x)
        if self.verifier is None or refused is not None or key in self.proven_gradients:
            return refused
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "gradients are not proven yet, and a proof cannot run while a CUDA graph is captured: run one call"
        if transforms_active():
            return None  # then the ops are plain PyTorch
        with LOCK, torch.no_grad():
            refused = self._no_gradients(module, x)
            if refused is not None or key in self.proven_gradients:
                return refused
            provider = self.rule.at(x.device, module.training)
            measurement = self.verifier.prove_gradients(module, self.fusion, provider, x.device, x.dtype, call)
            if measurement is not None and self.site is not None:
                self.site.measurements.append(measurement)
            if measurement is None or measurement.passed:
                self.proven_gradients.add(key)
                return None
            reason = self.no_gradients[provider] = f"runs stock wherever gradients are wanted: {measurement.reason}"
        self._warn(module, reason)
        return reason

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchState:
        """A copy of the module counts for itself, and shares the proofs."""
        copy = replace(self, below=deepcopy(self.below, memo), site=None, restored=False, kept=None)
        for name in ("proven", "refused", "proven_gradients", "no_gradients", "gains"):
            setattr(copy, name, shallow_copy(getattr(self, name)))
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled module comes back unpatched: pickle stores a bound ``forward`` by its name alone."""
        return type(None), ()


def only_eager(
    fusion: Fusion, choice: Choice, provider: str | None, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a fusion with this choice is not worth patching: all of it is ``eager``, which ``provider`` does not name."""
    name = requested(provider)
    if choice.gains or not fusion.kernel_ops or not (name is None or name.startswith(hub.WITH_HUB)):
        return None
    if any(select(op, device, (dtype,), provider).gains for op in fusion.kernel_ops[1:]):
        return None
    wanted = ("compiled",) if device.type == "cpu" else ("compiled", "triton")
    wanted = wanted if name is None else (*wanted, hub.NAME)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.declined if name in wanted)
    return f"{ONLY_EAGER} ({reasons})"


def _size(x: Tensor) -> tuple[torch.device, torch.dtype, int, bool]:
    """What decides whether a call takes less time fused: the power of two below the size of its input stands for it.

    A model is timed in two layouts, in one of which a call may gain alone.
    """
    return x.device, x.dtype, x.numel().bit_length(), x.is_contiguous()


def _situation(module: nn.Module, device: torch.device) -> str:
    return f"on {device.type} in {'training' if module.training else 'inference'}"
