"""One fused site: the op if it is proven for such leaves, otherwise the expression of the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern import ops
from diffkern.blocks.fp8 import RowMaker, RowwiseFp8, announce
from diffkern.matching import NormSemantics, parameter_of
from diffkern.providers import NoProviderError, registry, select
from diffkern.providers.base import KernelFileError
from diffkern.providers.dispatch_modes import modes_active, proxies_trace, transforms_active
from diffkern.providers.registry import override
from diffkern.rewrite.calls import CALLS, WITH_ROWS
from diffkern.rewrite.facts import (
    GROUPS,
    LAST_DIM,
    child_of,
    frames_of,
    group_norm_path,
    norm_of,
    read_norm,
)
from diffkern.rewrite.rotation import columns_of, tensors_in
from diffkern.rewrite.signature import PLAIN, Signature, signature_of
from diffkern.rewrite.specialize import OTHER, Recorder, idle, specialized
from diffkern.rewrite.twins import with_cells
from diffkern.verify.gain import Cost
from diffkern.verify.measures import Measurement

if TYPE_CHECKING:
    from diffkern.rewrite.plan import SitePlan

# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling

#: Learns of each call of a site outside of ``torch.compile``: the module, and why the original ran, or None.
Observer = Callable[[nn.Module, str | None], None]
#: Computes a site for a module, its operands by name, and the way that its op is called.
Trained = Callable[["FusedSite", nn.Module, dict[str, Any], "Way"], Any]

#: How a norm is called, see :attr:`Way.calls_norm`.
BY_SUM = "by sum"
#: The operands by which a site is large or small.
_SIZED = ("x", "residual", "y", "q")

#: Kinds of leaves that a site may be specialised for: a language model may meet another one at every call.
_MOST_RECORDINGS = 128
#: And for one size of it: blocks of one class may get operands of other layouts by turns.
_MOST_BESIDE = 4
#: Functions in front of a site, each of which asks the next one; none where there would be more.
_MOST_QUICK = 8

_UNPROVEN = "not proven for such operands yet: run one call outside of graphs and transforms before"


class AllowedInStrict(str):
    """Why an expression ran as it is written where nothing failed, which a strict injection lets pass."""


@dataclass(frozen=True)
class Way:
    """How an op is called for leaves of one signature.

    Attributes:
        options: Arguments of the op beside the operands, the norm's and the provider.
        calls_norm: None if the op computes the norm; else the norm is called as the module it is, and this is the
            dtype that its argument is cast to (the argument's own with ``"same"``); with :data:`BY_SUM` torch computes
            the sum of an RMS norm without weight, whose order no kernel has, and an op what is elementwise.
        columns: As :func:`~diffkern.rewrite.rotation.columns_of` said when it was proven.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    calls_norm: torch.dtype | str | None = None
    columns: float = 0.0


class FusedSite:
    """A site of all modules of one kind. Calling it computes what its expression in the source computes.

    Attributes:
        plan: Where it is, and what was found there.
        original: The expression as a function of ``self`` and the leaves, with the globals of its file.
        ways: How to call the op, by signature; None where the original expression runs. What is not there has not been
            proven yet.
        reasons: Why the original expression runs, by signature.
        fused_calls: How often the op ran, outside of ``torch.compile``.
        original_calls: How often the original expression ran there.
        idle_calls: How often it did because the op gains nothing.
        on_new_signature: Called with the site, the module and the leaves when a signature is met for the first time;
            returns the way. None leaves such calls to the original expression.
        gradients: Why calls that a backward may follow run the original expression, by signature; "" where they are
            proven.
        on_gradients: The same as ``on_new_signature`` for such calls; returns the reason.
        proofs: What the proofs measured, by signature.
        tried: Devices and dtypes for which leaves were made up and proven ahead of calls.
        observer: Learns of each call, if there is one.
        room: The features that ``torch.cat`` last put in front of its result, which is made with room for them then.
        trained: Computes the site where gradients are wanted, unless it returns None; None if the op does.
        on_new_size: Called with the site, the module and the leaves at the first call of a size; returns why the op is
            not worth it, or "". None where times are not measured.
        gains: What it returned, by device, dtype, the power of two below the size, and whether that is contiguous.
        cost: What the op and the original expression took when they were timed last, where the op gains.
        maker: Whether layers read its results in fp8, in which case it writes both; None where it never does.
    """

    #: Whether sites of this class are proven ahead of calls; others compute what is written, on fewer bytes, or are
    #: proven on their first call.
    is_proven_ahead = True
    #: Whether its results lie otherwise in memory than stock's, or are of no use where no other's do.
    lies_otherwise = False
    #: Whether a site of this class calls the layer that it has a part in, which computes by itself.
    calls_layer = False
    #: What else is asked before a function in its place may run, as text; None if none may.
    not_quick: str | None = ""

    def __init__(
        self,
        plan: SitePlan,
        function: FunctionType,
        module: nn.Module,
        provider: str | None = None,
        trained: Trained | None = None,
        for_fp8: bool = False,
    ) -> None:
        self.plan = plan
        self.original = with_cells(plan.original, function)
        self.provider = provider
        self.trained = trained
        self.ways: dict[Signature, Way | None] = {}
        self.reasons: dict[Signature, str] = {}
        self.fused_calls = self.original_calls = self.idle_calls = 0
        self.on_new_signature: Any = None
        self.gradients: dict[Signature, str] = {}
        self.on_gradients: Any = None
        self.proofs: dict[Signature, Measurement] = {}
        self.tried: set[tuple[torch.device, torch.dtype]] = set()
        self.observer: Observer | None = None
        self.room = 0
        self.on_new_size: Any = None
        self.gains: dict[Any, str] = {}
        self.cost: tuple[Cost, Cost] | None = None
        #: The number of the leaf that the expression writes into, if there is one.
        self._written = plan.roles.index("residual") if "in_place" in plan.options else None
        self.sized = next((i for i, role in enumerate(plan.roles) if role in _SIZED), 0)
        self._operands = FunctionType(plan.operands, function.__globals__)
        self._call: Any = CALLS.get(plan.rule.op)  # others compute themselves
        #: The functions of :mod:`~diffkern.rewrite.specialize`, by the operand that says the size: as many as there are
        #: kinds of the other operands beside it, none for one that came once.
        self.specialized: dict[Any, list[Callable[..., Any]]] = {}
        self._recordings = self._resets = self._quick = 0
        #: What the forward calls for each of its sites by its number: this one, or a function for what came before.
        self.entries: list[Callable[..., Any]] | None = None
        in_two_passes = "gate_activation" in plan.options and plan.rule.op != "glu"  # see _announced
        self.maker = RowMaker() if for_fp8 and plan.rule.op in WITH_ROWS and not in_two_passes else None
        self._may_differ = trained is not None or (plan.rule.keeps and not plan.gives_residual)
        self._norm_path = plan.modules.get("norm")
        norm = None if self._norm_path is None else child_of(module, self._norm_path)
        found = None if norm is None else norm_of(norm)
        #: What the norm normalises over; the last dimension where there is none.
        self.over: str = LAST_DIM if found is None else found[0]
        self._semantics: NormSemantics | None = None if found is None else found[1]
        self._holder = None if norm is None else (*self._norm_path, *group_norm_path(norm))  # type: ignore[misc]
        #: Of the norms of queries and keys, of which a site has several.
        self.norms: dict[str, NormSemantics] = {}
        for name, path in plan.modules.items():
            child = child_of(module, path) if name[1:].startswith("_norm") else None
            semantics = None if child is None else norm_of(child)
            if semantics is not None:
                self.norms[name] = semantics[1]
        norms = [found for found in (self._semantics, *self.norms.values()) if found is not None]
        #: The norms whose parameters are read at every call.
        self.norms_read = [(plan.modules[name], semantics) for name, semantics in self.norms.items()]
        if self._semantics is not None:
            self.norms_read.append((self._holder, self._semantics))  # type: ignore[arg-type]
        #: Whether it rotates by tables, of which a proof holds for those with as many columns alone.
        self.rotates = plan.rule.op == "rope" or (plan.rule.op == "qk_norm_rope" and "k0" in plan.names)
        #: Whether it may compute something once for all blocks in a call of the model, such as tables of matrices.
        self.is_once_in_call = self.rotates
        reads = self.over != LAST_DIM or any(found.weight is not None for found in norms)
        self._reads_parameters = reads or self.rotates

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for a module and the leaves of its expression."""
        if not (_is_traced() or torch.is_grad_enabled()) and self.specialized:
            result = self._specialized_call(module, leaves)
            if result is not OTHER:
                return result
        size, compiling = None, torch.compiler.is_compiling()
        if compiling and self.plan.rule.is_left_to_compiler and self.provider is None:
            return self.original(module, *leaves)
        if self.on_new_size is not None and not compiling:
            x = leaves[self.sized]
            if type(x) in PLAIN:
                size = x.device, x.dtype, x.numel().bit_length(), x.is_contiguous()
                trains = torch.is_grad_enabled() and self._wants_gradients(module, leaves)
                if self.gains.get(size) and not trains:  # times of an inference say nothing of training
                    self.idle_calls += 1
                    self._quicken(lambda otherwise: idle(self, leaves, self.gains[size], otherwise))
                    return self.run_original(module, *leaves, reason=self.gains[size])
        signature = self.signature(module, leaves) if self._reads_parameters else signature_of(leaves)
        way, reason = self.ways.get(signature), ""
        if way is None and signature not in self.ways:
            way = self.way(module, leaves, signature)
        if way is None:
            reason = self.reasons.get(signature, _UNPROVEN)
        elif torch.is_grad_enabled() and self._wants_gradients(module, leaves):
            reason = self._no_gradients(module, leaves)
        if way is None or reason:
            return self.run_original(module, *leaves, reason=f"{self}: {reason}")
        if size is not None and size not in self.gains and not torch.is_grad_enabled() and _may_prove(leaves):
            self.gains[size] = ""  # while it is timed as it will be called
            reason = self.on_new_size(self, module, leaves)
            self.gains[size] = reason and f"{self}: {reason}"
            if reason:
                self._forget_specialized()
                self.idle_calls += 1
                return self.run_original(module, *leaves, reason=self.gains[size])
        if compiling:
            return self.compute(module, leaves, way, self.provider)
        try:
            if self.maker is not None and not torch.is_grad_enabled():
                result = self._announced(self.maker, module, leaves, way)
            elif self.room or torch.is_grad_enabled() or self._written is not None:
                result = self.compute(module, leaves, way, self.provider, self.room)
            else:
                result = self._recorded_call(module, leaves, way)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, (KernelFileError, torch.OutOfMemoryError)):
                raise
            if self._written is None:
                self.original(module, *leaves)  # raises as well where the call is wrong, in the words of stock
            return self.run_original(module, *leaves, reason=f"{self}: its op refused the operands: {error}")
        self.count_fused(module)
        return result

    @property
    def entry(self) -> Callable[..., Any]:
        """What a rewritten forward calls for the site at first: itself, or what asks less before it does."""
        return self

    @property
    def front(self) -> Callable[..., Any]:
        """What a rewritten forward calls for the site now."""
        return self if self.entries is None else self.entries[self.plan.index]

    def _specialized_call(self, module: nn.Module, leaves: tuple[Any, ...]) -> Any:
        """Computes the site by the function for such leaves, and counts that; :data:`OTHER` if there is none."""
        if self._resets != registry.resets:  # other providers may serve now
            self._forget_specialized()
            return OTHER
        if self.room or transforms_active() or override() is not None:
            return OTHER
        try:
            for compute in self.specialized.get(_kind_of(leaves[self.sized]), ()):  # nested tensors have no shape
                result = compute(module, *leaves)
                if result is not OTHER:
                    break
            else:
                return OTHER
        except (RuntimeError, KeyError):
            return OTHER  # the general path says what is wrong, or finds a parameter that is an attribute now
        self.count_fused(module)
        return result

    def _recorded_call(self, module: nn.Module, leaves: tuple[Any, ...], way: Way) -> Any:
        """Computes the site; at the second call for such leaves it makes the function for the next ones."""
        kind = _kind_of(leaves[self.sized])
        if self._recordings >= _MOST_RECORDINGS or modes_active() or transforms_active() or override() is not None:
            return self.compute(module, leaves, way, self.provider)
        self._recordings += 1
        if kind not in self.specialized:
            self._resets, self.specialized[kind] = registry.resets, []
            return self.compute(module, leaves, way, self.provider)
        with Recorder() as recorder:
            result = self.compute(module, leaves, way, self.provider)
        function = specialized(self, module, leaves, recorder, result)
        beside = self.specialized.get(kind, [])  # which another thread may have taken out meanwhile
        if function is None:
            self._recordings = _MOST_RECORDINGS  # nor is there one for other leaves
            if not beside:
                self.specialized.pop(kind, None)  # which calls need not look for
        else:
            self.specialized[kind] = [function.call, *beside[: _MOST_BESIDE - 1]]
            self._quicken(function.quick)
        return result

    def _quicken(self, quick: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Puts a function for the kind of this call in front of the site, and of those for other kinds."""
        if self.entries is not None and self.not_quick is not None and not torch.is_grad_enabled():
            self._quick += 1
            if self._quick <= _MOST_QUICK:
                self.entries[self.plan.index] = quick(self.front)
            else:  # so many kinds come that each call would ask them all
                self.entries[self.plan.index] = self.entry

    def _forget_specialized(self) -> None:
        self.specialized.clear()
        if self.entries is not None:
            self.entries[self.plan.index], self._quick = self.entry, 0

    def __str__(self) -> str:
        return f"{self.plan.rule.name} (line {self.plan.line})"

    def count_fused(self, module: nn.Module) -> None:
        """Counts a call that ran fused, of which the observer learns."""
        self.fused_calls += 1
        if self.observer is not None:
            self.observer(module, None)

    def run_original(self, module: nn.Module, *leaves: Any, reason: str = "") -> Any:
        """Evaluates the expression of the source, and counts that; the observer learns of it if there is a reason."""
        if not torch.compiler.is_compiling():
            self.original_calls += 1
            if reason and self.observer is not None:
                self.observer(module, reason)
        return self.original(module, *leaves)

    def unwritten(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """The leaves with a copy of the one that is written into, for calls that must leave it as it is."""
        return tuple([leaf.clone() if i == self._written else leaf for i, leaf in enumerate(leaves)])

    def way(self, module: nn.Module, leaves: tuple[Any, ...], signature: Signature) -> Way | None:
        """Returns how the op is called for such leaves; None for the original expression."""
        if signature in self.ways:
            return self.ways[signature]
        known = self._proven_for_others(module, leaves, signature) if self.rotates else None
        if known is not None or self.on_new_signature is None or not _may_prove(leaves):
            return known
        way: Way | None = self.on_new_signature(self, module, leaves)
        return way

    def _proven_for_others(self, module: nn.Module, leaves: tuple[Any, ...], signature: Signature) -> Way | None:
        """The way that is proven for leaves of other widths, whose tables have as many columns for each element."""
        for other, way in tuple(self.ways.items()):
            if way is None or other[:-1] != signature[:-1]:
                continue
            try:
                same = columns_of(self.operands(module, leaves), way.options) == way.columns
            except (RuntimeError, ValueError, TypeError, IndexError):  # of leaves that do not fit
                continue
            if same:
                self.ways[signature] = way
                if other in self.proofs:
                    self.proofs[signature] = self.proofs[other]
                return way
        return None

    def signature(self, module: nn.Module, leaves: tuple[Any, ...]) -> Signature:
        """What decides how the site computes for such leaves, and with the weight that the norm has now."""
        signature = signature_of(leaves)
        if self.over != LAST_DIM:  # parameters may be laid out for one number of dimensions
            signature += tuple([leaf.ndim for leaf in leaves if isinstance(leaf, Tensor)])
        for name, semantics in self.norms.items():
            if semantics.weight is not None and semantics.reader is None:
                parameter = parameter_of(child_of(module, self.plan.modules[name]), semantics.weight)
                signature = *signature, None if parameter is None else parameter.dtype
        if self._semantics is not None and self._semantics.weight is not None and self._semantics.reader is None:
            weight = parameter_of(child_of(module, self._holder), self._semantics.weight)  # type: ignore[arg-type]
            signature = *signature, None if weight is None else weight.dtype
        if self.rotates:  # how many dimensions tables have, which a helper may ask, and the widths, at the end
            tensors = [x for leaf in leaves for x in tensors_in(leaf)]
            signature = *signature, tuple([x.ndim for x in tensors]), tuple([x.shape[-1:] for x in tensors])
        return signature

    def _wants_gradients(self, module: nn.Module, leaves: tuple[Any, ...]) -> bool:
        if any([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]):
            return True
        children = [child_of(module, path) for path in self.plan.modules.values()]
        return any([p.requires_grad for child in children if child is not None for p in child.parameters()])

    def _no_gradients(self, module: nn.Module, leaves: tuple[Any, ...]) -> str:
        """Why a call that a backward may follow runs the original expression; "" if it need not."""
        signature = self.signature(module, leaves)
        if signature in self.gradients:
            return self.gradients[signature]
        if self.on_gradients is None or not _may_prove(leaves):
            return "its gradients are not proven yet"
        reason: str = self.on_gradients(self, module, leaves)
        return reason

    def compute(self, module: nn.Module, leaves: tuple[Any, ...], way: Way, provider: str | None, room: Any = 0) -> Any:
        """Computes the site with the op: the result, or the new residual and the result."""
        if room:
            way = replace(way, options={**way.options, "room": room})
        result = None
        if self.trained is not None and torch.is_grad_enabled() and self._wants_gradients(module, leaves):
            result = self.trained(self, module, self.operands(module, leaves), way)
        if result is None:
            result = self.call_op(module, self.operands(module, leaves), way, provider)
        if self.plan.rule.keeps and not self.plan.gives_residual:
            return result[1]
        return result

    def _announced(self, maker: RowMaker, module: nn.Module, leaves: tuple[Any, ...], way: Way) -> Any:
        """Computes the site for readers that may take fp8: with the rows, if those of the last result did."""
        x, rows = leaves[self.sized], None
        both = maker.wanted and _writes_rows(self.plan.rule.op, x.device, x.dtype, self.provider)
        op = WITH_ROWS[self.plan.rule.op] if both else None
        result = self._call(self, module, self._operands(module, *leaves), way, self.provider, op)
        if both:
            *results, values, scales = result
            result, rows = results[0] if len(results) == 1 else tuple(results), RowwiseFp8(values, scales)
        y = result[1] if self.plan.rule.keeps else result
        # Other dtypes, and residuals with activated gates, take kernels that read a row again for each step: two passes
        # are quicker.
        if y.dtype is torch.bfloat16 and (y is result or result[0].dtype is y.dtype):
            announce(y, rows, maker)
        return result if self.plan.gives_residual or not self.plan.rule.keeps else y

    def call_op(self, module: nn.Module, operands: dict[str, Any], way: Way, provider: str | None) -> Any:
        """Calls the op on its operands."""
        return CALLS[self.plan.rule.op](self, module, operands, way, provider)

    def operands(self, module: nn.Module, leaves: tuple[Any, ...]) -> dict[str, Any]:
        """The operands of the op by name: leaves, or views of them."""
        operands: dict[str, Any] = self._operands(module, *leaves)
        return operands

    def norm_arguments(self, module: nn.Module, x: Tensor) -> dict[str, Any] | None:
        """What the op needs to know of the norm, read from the module at every call; None if kernels cannot read it."""
        semantics = self._semantics
        if semantics is None:
            return {}
        norm: Any = child_of(module, self._holder)  # type: ignore[arg-type]
        arguments = read_norm(norm, semantics, x)
        if arguments is None:
            return None
        if self.over == GROUPS:
            arguments["num_groups"] = norm.num_groups
            arguments["frames"] = frames_of(child_of(module, self._norm_path))  # type: ignore[arg-type]
        elif self.over == LAST_DIM:
            arguments["norm"] = "rms" if semantics.op == "rms_norm" else "layer"
        else:
            arguments["eps_mode"] = "clamp" if semantics.clamp_eps else "add"
        return arguments

    def run_norm(self, module: nn.Module, x: Tensor, dtype: torch.dtype | str, provider: str | None) -> Tensor:
        """Calls the norm as the module that it is, or torch for its sum alone."""
        norm: Any = child_of(module, self._norm_path)  # type: ignore[arg-type]
        if dtype == BY_SUM:
            arguments = self.norm_arguments(module, x)
            if arguments is None or arguments.keys() & {"weight", "bias"} or arguments["norm"] != "rms":
                raise ValueError("it is no RMS norm without weight")
            factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + arguments["eps"])
            return ops.norm_modulate(
                x, factor, norm=None, scale_offset=0.0, rounding="once", out_dtype=x.dtype, provider=provider
            )
        y: Tensor = norm(x if isinstance(dtype, str) else x.to(dtype))
        return y


@cache
def _writes_rows(op: str, device: torch.device, dtype: torch.dtype, provider: str | None) -> bool:
    """Whether who computes an op computes it with rows of fp8 as well, to the same bits.

    Another provider might round otherwise; Triton has no such kernel, since it sums a row in an order that follows from
    what the kernel stores.
    """
    names = op, WITH_ROWS[op].__name__
    try:
        alone, both = (select(name, device, (dtype,), provider).provider for name in names)
    except NoProviderError:
        return False
    return alone == both


def _kind_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride()) if type(leaf) in PLAIN else None


def _may_prove(leaves: tuple[Any, ...]) -> bool:
    """Whether a proof can run now: graphs and transforms would take it for a part of the model."""
    if torch.compiler.is_compiling() or transforms_active() or proxies_trace():
        return False
    on_gpu = any([isinstance(leaf, Tensor) and leaf.device.type == "cuda" for leaf in leaves])
    return not (on_gpu and torch.cuda.is_current_stream_capturing())
