"""Masks of attention that every layer makes from the same argument, and attention under a mask.

The former are made once in a call. Attention under one that hides nothing but the last keys reads the keys in front of
them, and has no mask. Texts are padded to one length, and a mask hides the padding. Any mask keeps attention from its
fastest kernels, and what it hides is computed all the same. How many keys it shows is asked once in a call of the
model, for which the host waits.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern.attention import accuracy
from diffkern.attention.call import AttentionCall
from diffkern.cache.in_call import current_call, once_in_call
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.rewrite.effects import METADATA, VIEWS
from diffkern.rewrite.expressions import is_number
from diffkern.rewrite.match import Match, Operand, Scope, through_definitions
from diffkern.rewrite.query_key import is_processor
from diffkern.rewrite.site import FusedSite
from diffkern.rewrite.template import Template
from diffkern.rewrite.unrotated import Deferred
from diffkern.verify.contract import RATIO, SLACK
from diffkern.verify.gain import reason_to_stay_stock
from diffkern.verify.isolation import uncounted

#: Methods that a mask is made with, beside views.
_METHODS = VIEWS | {"repeat", "bool"}
#: Functions that compute attention, and the dimension of tokens in what they are given.
_FUNCTIONS = {"dispatch_attention_fn": 1, "F.scaled_dot_product_attention": 2}
_PAIRS = Template("_mask & _mask.transpose(*_)")
#: The operands of such a match.
OPERANDS = ("query", "key", "value", "attn_mask")
#: Further arguments that change nothing about which keys are seen, and such that must be off.
_FREE = frozenset({"backend", "parallel_config", "enable_gqa", "scale"})
_OFF = {"dropout_p": 0.0, "is_causal": False}
#: Pairs of queries and keys below which the wait for the answer may take longer than it saves.
LEAST_PAIRS = 1 << 20
#: Answers that a site waits for beside the first one in a call of the model.
_MOST_WAITS = 8


@dataclass(frozen=True)
class PairMask:
    """``mask & mask.transpose(...)`` in a processor, of arguments and sizes alone: which tokens see which.

    Each argument is an operand, and so is each size.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not is_processor(scope) or not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.BitAnd):
            return
        if _PAIRS.fill(scope, node):
            found = _of_arguments(scope, node, match)
            if found is not None and found.operands:
                yield found


def _of_arguments(scope: Scope, node: ast.expr, match: Match) -> Match | None:
    """The match with what makes the value of an expression; None if that is more than arguments and sizes."""
    node, match = through_definitions(scope, node, match)
    if isinstance(node, ast.Constant):
        return match
    if isinstance(node, ast.Name):
        reaching = scope.flow.definitions.get(node, frozenset())
        if reaching != {scope.flow.parameters.get(node.id)} and not is_number(scope.flow, node):
            return None
        return replace(match, operands={**match.operands, f"of{len(match.operands)}": Operand(node)})
    parts: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        function = node.func
        if not isinstance(function, ast.Attribute):
            return None
        of_torch = isinstance(function.value, ast.Name) and not scope.flow.is_local(function.value)
        if not (ast.unparse(function) == "F.pad" if of_torch else function.attr in _METHODS):
            return None
        parts = [*([] if of_torch else [function.value]), *node.args, *[word.value for word in node.keywords]]
    elif isinstance(node, ast.Attribute):
        if node.attr not in METADATA:
            return None
    elif not isinstance(node, (ast.BinOp, ast.Subscript, ast.Tuple, ast.UnaryOp)):
        return None
    found: Match | None = match.step(node)
    for part in parts:
        if isinstance(part, ast.expr) and found is not None:
            found = _of_arguments(scope, part, found)
    return found


@dataclass(frozen=True)
class MaskedAttention:
    """``dispatch_attention_fn(query, key, value, attn_mask=mask)`` in a processor, or the same of torch.

    The operands have the names of its arguments.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not isinstance(node, ast.Call) or not is_processor(scope) or len(node.args) > 3:
            return
        tokens = _FUNCTIONS.get(ast.unparse(node.func))
        given = dict(zip(OPERANDS, node.args, strict=False))
        given |= {str(word.arg): word.value for word in node.keywords}
        if tokens is None or not all(isinstance(given.get(name), ast.Name) for name in OPERANDS):
            return
        for name, off in _OFF.items():
            value = given.pop(name, ast.Constant(off))
            if not isinstance(value, ast.Constant) or value.value != off:
                return
        if given.keys() <= _FREE | {*OPERANDS} and not isinstance(given.get("scale"), ast.Constant):
            operands = {name: Operand(value) for name, value in given.items() if not isinstance(value, ast.Constant)}
            yield replace(match.step(node), operands=operands, options={"tokens": tokens})


class MaskedAttentionSite(FusedSite):
    """Attention as it is written, of the keys that its mask shows if those are the first ones, and without the mask.

    The first such call of a kind is compared with float64 and timed, beside the one that is written.

    Attributes:
        shortens: Whether it may be computed so.
        on_kept: Learns, once for each reason, for which module and why the mask stays although it could go.
    """

    is_proven_ahead = False

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.shortens = self.is_once_in_call = True
        self.on_kept: Callable[[nn.Module, str], None] | None = None
        self._at = {role: i for i, role in enumerate(self.plan.roles) if role}
        self._tokens: int = self.plan.options["tokens"]  # type: ignore[assignment]
        #: Why calls of a kind keep their mask, or "".
        self._kinds: dict[Any, str] = {}
        #: How often it waited once more in one call of the model, and the call in which it has waited last.
        self._waits_again = 0
        self._last_wait: object = self

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        query, mask = leaves[self._at["query"]], leaves[self._at["attn_mask"]]
        shown = 0
        if type(mask) is Tensor and not (torch.compiler.is_compiling() or torch.is_grad_enabled()):
            shown = self._shown(module, leaves)
        if isinstance(query, Deferred):
            if mask is None or shown == leaves[self._at["value"]].shape[1]:
                y = self._unrotated(query, leaves)
                if y is not None:
                    return y
            leaves = self._with(leaves, **dict(zip(("query", "key"), query.run(), strict=True)))
        if self._splits_heads(leaves) and type(mask) is Tensor and not torch.compiler.is_compiling():
            leaves = self._with(leaves, attn_mask=once_in_call(_for_any_head, mask))
        result = self._of_shown_keys(module, leaves, shown) if shown else None
        if result is None:
            return self.original(module, *leaves)
        self.count_fused(module)
        return result

    def _splits_heads(self, leaves: tuple[Any, ...]) -> bool:
        """Whether GPUs share the heads, of which stock does not split those of a mask, and raises."""
        parallel = leaves[self._at["parallel_config"]] if "parallel_config" in self._at else None
        own = getattr(parallel, "context_parallel_config", None)
        return (getattr(own, "ulysses_degree", None) or 1) > 1

    def _with(self, leaves: tuple[Any, ...], **others: Any) -> tuple[Any, ...]:
        return tuple([others.get(role, leaf) for role, leaf in zip(self.plan.roles, leaves, strict=True)])

    def _unrotated(self, query: Deferred, leaves: tuple[Any, ...]) -> Tensor | None:
        """Attention that reads queries and keys before their rotation; None if it steps aside."""
        dispatch, value = self.original.__globals__["dispatch_attention_fn"], leaves[self._at["value"]]
        rest = {role: leaves[i] for role, i in self._at.items() if role not in OPERANDS}
        y = query.serve(dispatch, query.unrotated, value, **rest)
        if y is not None:
            query.served()
        return y

    def _shown(self, module: nn.Module, leaves: tuple[Any, ...]) -> int:
        """How many keys the mask shows, where that may be of use; 0 otherwise."""
        query, key, value, mask = [leaves[self._at[name]] for name in OPERANDS]
        shared = "parallel_config" in self._at and leaves[self._at["parallel_config"]] is not None  # among GPUs
        plain = type(value) is Tensor and all([type(x) in (Tensor, Deferred) and x.ndim == 4 for x in (query, key)])
        seen = shared or transforms_active() or modes_active()
        if seen or not (self.shortens and plain and mask.dtype is torch.bool):
            return 0
        # A trace would hold this mask's answer for any.
        if mask.is_meta or torch._C._get_tracing_state() is not None:
            return 0
        queries, keys = query.shape[self._tokens], key.shape[self._tokens]
        fits = mask.shape[1:] in ((keys,), (1, 1, keys)) or (mask.shape[1:] == (1, keys, keys) and queries == keys)
        if not fits or queries * keys < LEAST_PAIRS or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
            return 0
        before = _waits.count
        whole = mask if mask._base is None else mask._base  # each layer may take a view of its own
        shown: int = once_in_call(_ask, whole, mask.shape, mask.stride(), mask.storage_offset())
        if _waits.count > before:
            here = current_call()
            self._waits_again += here is self._last_wait
            self._last_wait = here
        if self._waits_again >= _MOST_WAITS:
            self.shortens, self._waits_again = False, 0
            self._keep(module, "each layer makes its own, and the host would wait in every one to look at it")
        return shown

    def _keep(self, module: nn.Module, reason: str) -> None:
        if self.on_kept is not None:
            name = type(getattr(module, "processor", module)).__name__
            self.on_kept(module, f"attention of {name} (line {self.plan.line}) keeps its mask: {reason}")

    def _of_shown_keys(self, module: nn.Module, leaves: tuple[Any, ...], shown: int) -> Tensor | None:
        query, key, value, mask = tensors = [leaves[self._at[name]] for name in OPERANDS]
        tokens, keys, of_pairs = self._tokens, key.shape[self._tokens], mask.ndim == 4 and mask.shape[2] > 1
        few = {"key": key.narrow(tokens, 0, shown), "value": value.narrow(tokens, 0, shown), "attn_mask": None}

        def compute() -> Tensor:
            y: Tensor = self.original(module, *self._with(leaves, **few))
            if of_pairs and shown < keys:  # a query that is hidden itself sees nothing
                y.narrow(tokens, shown, keys - shown).zero_()
            return y

        heads, size = query.shape[3 - tokens], query.shape[3]
        scale = leaves[self._at["scale"]] if "scale" in self._at else None
        if not isinstance(scale, (float, type(None))):
            return None
        kind = query.device, query.dtype, heads, size, of_pairs, shown < keys, keys.bit_length(), scale is None
        if kind not in self._kinds:
            stock = partial(self.original, module, *leaves)
            try:
                with uncounted():
                    wrong = self._wrong(stock, tensors, shown, scale)
                    self._kinds[kind] = wrong or self._without_gain(compute, stock, kind)
            except RuntimeError as error:  # no memory for the proof, or a wrong call: what is written says so itself
                self._kinds[kind] = f"the comparison with float64 raised {type(error).__name__}"
            if self._kinds[kind]:
                self._keep(module, self._kinds[kind])
        return None if self._kinds[kind] else compute()

    def _wrong(self, stock: Callable[[], Tensor], tensors: list[Tensor], shown: int, scale: float | None) -> str:
        """Why torch's attention of the shown keys is not as right as stock's, or ""; others answer for their own."""
        query, key, value = [x if self._tokens == 1 else x.transpose(1, 2) for x in tensors[:3]]
        mask = tensors[3] if tensors[3].ndim == 4 else tensors[3][:, None, None]
        call = AttentionCall(query, key, value, mask, scale=scale)
        rows = accuracy.spread(call)
        exact = accuracy.reference(call, rows)
        q, k, v = (x.transpose(1, 2) for x in (query, key[:, :shown], value[:, :shown]))
        y = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
        if mask.shape[2] > 1:
            y[:, shown:] = 0.0
        expected = stock()
        expected = expected if self._tokens == 1 else expected.transpose(1, 2)
        if y.shape != expected.shape or y.dtype is not expected.dtype:
            return "what computes it returns another shape or dtype than torch's attention"
        y, expected, unseen = y[:, rows], expected[:, rows], ~torch.isfinite(exact)
        error, stock_error = accuracy.distance(y, exact), accuracy.distance(expected, exact)
        if torch.equal(y[unseen], expected[unseen]) and error <= RATIO * stock_error + SLACK:
            return ""
        return f"without it the error is {error:.2g}, with it {stock_error:.2g}"

    def _without_gain(self, compute: Callable[[], Tensor], stock: Callable[[], Tensor], kind: Any) -> str:
        timed = self.on_new_size is not None
        return reason_to_stay_stock((compute, stock), kind[0], True, str(self), *map(str, kind)) if timed else ""


def _for_any_head(mask: Tensor) -> Tensor:
    """A mask that is written out for every head as one for all of them; others as they are."""
    first = mask[:, :1]
    return first if mask.ndim == 4 and torch.equal(first.expand_as(mask), mask) else mask


def _ask(whole: Tensor, shape: torch.Size, strides: tuple[int, ...], offset: int) -> int:
    """:func:`_shown_keys` of a view of a tensor."""
    _waits.count += 1
    return _shown_keys(whole.as_strided(shape, strides, offset))


class _Waits(local):
    """How often this thread has waited for the answer."""

    count = 0


_waits = _Waits()


def _shown_keys(mask: Tensor) -> int:
    """How many keys a mask shows, if those are the first ones for all queries of all samples, or none; 0 otherwise.

    A mask of pairs is read twice, and nothing of its size is written: each query that is shown sees so many keys, the
    others see none, and no key is seen that the first query does not see.
    """
    shown = mask[:, 0, 0] if mask.ndim == 4 else mask
    numbers = torch.arange(1, shown.shape[1] + 1, device=mask.device)
    counts, last = shown.sum(1), (shown * numbers).amax(1)
    fits = torch.ones_like(counts)
    if mask.ndim == 4 and mask.shape[2] > 1:
        pairs = mask[:, 0]
        fits = ((pairs.sum(2) == shown * counts[:, None]) & (pairs.any(1) == shown)).all().long()
    least, most, furthest, fit = torch.stack([counts.amin(), counts.amax(), last.amax(), fits.amin()]).tolist()
    return int(least) if fit and least == most == furthest else 0
