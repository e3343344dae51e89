"""Liger's kernels as the injection sees them: instead of ours wherever gradients are wanted.

Its losses are of language models: from their logits, or from their hidden states without any logits.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import plain, untouched
from diffkern.injection.components import likely_device
from diffkern.injection.norm_fusion import NormFusion
from diffkern.injection.report import InjectionReport, Site
from diffkern.matching.forward import autocast_on
from diffkern.providers import Choice, liger
from diffkern.rewrite import FusedSite, Trained, Way
from diffkern.verify import gradients
from diffkern.verify.contract import ROWS
from diffkern.verify.fusion import Fusion
from diffkern.verify.gradients import with_gradients
from diffkern.verify.samples import bare, doubled


@dataclass(frozen=True)
class Liger:
    """What Liger computes in an injection."""

    flags: liger.Flags  # what it shall compute

    @classmethod
    def asked_for(cls, wish: Any, modules: Mapping[str, nn.Module], report: InjectionReport) -> Liger | None:
        """What a user asked for, if Liger runs where the models are; otherwise the report gets the reason.

        Raises:
            ValueError: as :meth:`diffkern.providers.liger.Flags.of`.
        """
        flags = liger.Flags.of(wish)
        if flags is None:
            return None
        reason = liger.unavailable_reason(likely_device(modules.values()))
        if reason is not None:
            report._rejected.append(Site("", report.target, liger.NAME, reason=reason))
            return None
        found = cls(flags)
        roots = modules.values() if flags.fused_linear_cross_entropy else ()
        if any(isinstance(found.loss(module), LossFusion) for root in roots for module in root.modules()):
            report.notes.append(
                "fused_linear_cross_entropy: in training with labels, the output has no logits; in half precision, its "
                f"gradients may have {liger.LINEAR_LOSS_GRADIENT_RATIO} times the error of stock's"
            )
        return found

    def norm(self, fusion: NormFusion) -> NormFusion:
        """How a norm is computed, with Liger's kernel where gradients are wanted if it has one for it."""
        if self.flags.rms_norm and LigerNormFusion.casting(fusion) is not None:
            return LigerNormFusion(fusion.semantics, fusion.replayed)
        return fusion

    def loss(self, module: nn.Module) -> LossFusion | str | None:
        """How the loss of a model of transformers is computed, or why not; None if it has no such loss."""
        flags = self.flags
        if not (flags.cross_entropy or flags.fused_linear_cross_entropy) or "transformers" not in sys.modules:
            return None
        cls = type(module)
        named = cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("ForCausalLM")
        if not named or module._modules.get("lm_head") is None:
            return None
        fusion = LossFusion(linear=flags.fused_linear_cross_entropy)
        return fusion.lacks(module) or fusion

    def trained_sites(self) -> dict[str, Trained]:
        """What computes the sites of rewritten forwards where gradients are wanted, by the name of the op."""
        sites: dict[str, tuple[bool, Trained]] = {
            "glu": (self.flags.swiglu, _gated),
            "rope": (self.flags.rope, _rotated),
            "gate_residual_norm_modulate": (self.flags.rms_norm, _normalised),
        }
        return {op: compute for op, (wanted, compute) in sites.items() if wanted}


@dataclass(frozen=True)
class LigerNormFusion(NormFusion):
    """An RMS norm that Liger computes where gradients are wanted."""

    @staticmethod
    def casting(fusion: NormFusion) -> str | None:
        """Liger's name for where a norm rounds, or None for a norm that it does not have."""
        semantics = fusion.semantics
        plain = semantics.weight is not None and semantics.bias is None and not semantics.clamp_eps
        if semantics.op != "rms_norm" or not plain or semantics.dim not in (-1, "normalized_shape"):
            return None
        return "gemma" if semantics.rounding == "once" else "llama"

    @override
    def compute(self, module: nn.Module, call: Tensor, provider: str | None, stock: tuple[str, ...]) -> Tensor:
        semantics = self.semantics
        weight = None if semantics.weight is None else module._parameters.get(semantics.weight)
        eps = getattr(module, semantics.eps) if isinstance(semantics.eps, str) else semantics.eps
        fits = weight is not None and weight.ndim == 1 and weight.dtype == call.dtype and eps is not None
        if not fits or not gradients.wanted(module, call):
            return super().compute(module, call, provider, stock)
        assert weight is not None
        return liger.rms_norm(call, weight, eps, semantics.weight_offset, self.casting(self) or "llama")

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return liger.NAME, super().kind(module)

    @override
    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
        return liger.named(super().choose(module, provider, device, dtype))


def _gated(site: FusedSite, module: nn.Module, operands: dict[str, Any], way: Way) -> Any:
    """Liger's gated units."""
    gate, value, activation = operands["gate"], operands["value"], way.options["activation"]
    return liger.glu(gate, value, activation) if activation in liger.GATED and gate.dtype == value.dtype else None


def _rotated(site: FusedSite, module: nn.Module, operands: dict[str, Any], way: Way) -> Any:
    """Liger's rotation of halves of whole heads ``[B, H, S, D]``."""
    q, k, cos, sin = (operands[name] for name in ("q", "k", "cos", "sin"))
    halves = way.options["pairing"] == "half" and way.options["unsqueeze_dim"] == 1
    whole = cos.shape[-1] == q.shape[-1] and q.ndim == 4 and cos.ndim == 3
    if not halves or not whole or not q.dtype == k.dtype == cos.dtype or cos.requires_grad or sin.requires_grad:
        return None
    return liger.rope(q, k, cos, sin)


def _normalised(site: FusedSite, module: nn.Module, operands: dict[str, Any], way: Way) -> Any:
    """The norm called as the module that it is, with Liger's patch on it."""
    return site.call_op(module, operands, replace(way, calls_norm="same"), site.provider)


# --- the loss of a language model -----------------------------------------------------------------------

#: What transformers gives to cross entropy for rows that do not count.
IGNORED = -100


@dataclass(frozen=True)
class Sample:
    """Rows, the weight of the head if that belongs to the loss, and targets: proofs need no model around them."""

    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class LossFusion(Fusion):
    """What stands between the last hidden states of a model with a head and its loss, or only after the logits.

    Liger has kernels for training alone: calls without labels, without gradients or in evaluation run stock. A call is
    the token ids and the arguments, or a :class:`Sample`.
    """

    linear: bool  # Whether the head belongs to it. There are no logits in the output then.

    @property
    @override
    def op(self) -> str:
        """The name of Liger's flag."""
        return "fused_linear_cross_entropy" if self.linear else "cross_entropy"

    def lacks(self, module: nn.Module) -> str | None:
        """Why the loss of a model cannot be computed so, or None."""
        tree = _tree(inspect.unwrap(type(module).forward))
        if len(_loss_calls(tree)) != 1:
            return "its forward does not ask its loss_function for the loss"
        if self.linear and not _only_for_the_loss(tree):
            return "its forward does more with its logits than to compute a loss: try cross_entropy instead"
        return None

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        return (ids, args, dict(kwargs)) if isinstance(ids, Tensor) else None

    @override
    def primary_input(self, call: Any) -> Tensor:
        x: Tensor = call.inputs[0] if isinstance(call, Sample) else call[0]
        return x

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        """That of the head decides, and not the primary input's: what such models are called with are integers."""
        weight = getattr(module._modules.get("lm_head"), "weight", None)
        return weight.dtype if isinstance(weight, Tensor) else None

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        if isinstance(call, Sample):
            return None
        if call is None:
            return "it is called without token ids or embeddings"
        model: Any = module
        kwargs = call[-1]
        labels = kwargs.get("labels")
        if labels is None:
            return "called without labels by name: there is no loss"
        if not (model.training and torch.is_grad_enabled()):
            return "not in training"
        if torch.compiler.is_compiling():
            return "being compiled: Liger's losses read numbers back from the GPU"
        if model.loss_function is not sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss:
            return "its loss function is not that of transformers for language models"
        if kwargs.get("return_dict", True) is False or getattr(model.config, "return_dict", True) is False:
            return "its output is a tuple, in which nothing can be left out"
        if not self.linear:
            return None
        head = model._modules.get("lm_head")
        if not untouched(head, nn.Linear):
            return "its head is not a plain linear layer: an adapter there would be lost"
        weight = head._parameters["weight"]
        if head._parameters["bias"] is not None or not plain(weight, weight.device):
            return "its head has a bias, or a weight that is no plain tensor"
        return autocast_on(weight.device)

    @override
    def allowed_in_strict(self, module: nn.Module, call: Any) -> bool:
        """Calls that have no loss, or want no gradients of it."""
        return not module.training or not torch.is_grad_enabled() or call is None or call[-1].get("labels") is None

    @override
    def compute(self, module: nn.Module, call: Any, provider: str | None, stock: tuple[str, ...]) -> Any:
        if isinstance(call, Sample):
            return self._loss(call.inputs)
        model: Any = module
        _, args, kwargs = call

        def loss_function(
            logits: Tensor,
            labels: Tensor,
            vocab_size: int,
            num_items_in_batch: Any = None,
            ignore_index: int = IGNORED,
            shift_labels: Tensor | None = None,
            **others: Any,
        ) -> Tensor:
            if shift_labels is None:
                shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            target = shift_labels.reshape(-1).to(logits.device)
            target = target.masked_fill(target == ignore_index, IGNORED)
            rows = logits.reshape(-1, logits.shape[-1])
            weight = (model.lm_head.weight,) if self.linear else ()
            if num_items_in_batch is None:
                return self._loss((rows, *weight, target))
            count = (target != IGNORED).sum()
            if isinstance(num_items_in_batch, Tensor):
                num_items_in_batch = num_items_in_batch.to(logits.device)
            total: Tensor = self._loss((rows, *weight, target)) * count / num_items_in_batch
            return total

        replaced: dict[str, Any] = {"loss_function": loss_function}
        if self.linear:
            replaced["lm_head"] = lambda x: x  # what its loss is computed from are the hidden states
        output = type(module).forward(_Otherwise(module, replaced), *args, **kwargs)
        if self.linear:
            output["logits"] = None
        return output

    def _loss(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The mean loss, by Liger where gradients are wanted: there is nothing to gain elsewhere."""
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            return self._stock(inputs)
        if self.linear:
            x, weight, target = inputs
            return liger.fused_linear_cross_entropy(x, weight, target, IGNORED)
        logits, target = inputs
        return liger.cross_entropy(logits, target, IGNORED)

    def _stock(self, inputs: tuple[Tensor, ...]) -> Tensor:
        *rows, target = inputs
        logits = F.linear(*rows) if self.linear else rows[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, target, ignore_index=IGNORED)

    # --- for proofs ------------------------------------------------------------------------------------

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return self, self.weight_dtype(module)

    @override
    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
        return Choice(liger.NAME, self._loss, ())

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        """That of token ids, which such models are called with."""
        return (torch.int64,)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """An empty module that knows the dtype of the head: proofs need no weights."""
        copy = bare(module)
        copy._modules, copy._parameters, copy._buffers = {}, {}, {}
        copy.__dict__["_sampled"] = self.weight_dtype(module)
        return copy

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Sample]:
        generator = torch.Generator("cpu").manual_seed(5)
        x = 2 * torch.randn(ROWS, 96, generator=generator, device="cpu")
        target = torch.randint(0, 96, (ROWS,), generator=generator, device="cpu")
        target[::7] = IGNORED
        weight = (torch.randn(96, 96, generator=generator, device="cpu") / 10,) if self.linear else ()
        rows = [tensor.to(device, module.__dict__["_sampled"] or dtype) for tensor in (x, *weight)]
        return [Sample((*rows, target.to(device)))]

    @override
    def stock(self, module: nn.Module, call: Sample) -> Tensor:
        return self._stock(call.inputs)

    @override
    def reference(self, module: nn.Module, call: Sample) -> Tensor:
        return self._stock(doubled(call.inputs))

    @override
    def grad_inputs(self, call: Sample) -> tuple[Tensor, ...]:
        return call.inputs[:-1]

    @override
    def exact_training(self, module: nn.Module, call: Sample) -> tuple[Tensor, ...]:
        inputs = doubled(call.inputs)
        return with_gradients(lambda: self._stock(inputs), inputs[:-1])

    @override
    def gradient_ratio(self, dtype: torch.dtype) -> float | None:
        return liger.LINEAR_LOSS_GRADIENT_RATIO if self.linear and dtype in (torch.float16, torch.bfloat16) else None


class _Otherwise:
    """A module seen by its own forward, with some of its attributes replaced."""

    def __init__(self, module: nn.Module, replaced: Mapping[str, Any]) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_replaced"] = replaced

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_module"])

    def __getattr__(self, name: str) -> Any:
        replaced = self.__dict__["_replaced"]
        return replaced[name] if name in replaced else getattr(self.__dict__["_module"], name)


def _tree(function: Callable[..., Any]) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _loss_calls(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function"]


def _only_for_the_loss(tree: ast.AST) -> bool:
    """Whether logits are made by one call of the head, and go nowhere but to the loss and into the output."""
    nodes = list(ast.walk(tree))
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and _is_logits(node.targets[0])]
    if len(assigned) != 1 or not ast.unparse(assigned[0].value).startswith("self.lm_head("):
        return False
    returned = [node.value for node in nodes if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)]
    calls = [*_loss_calls(tree), *returned]
    passed = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    reads = [node for node in nodes if _is_logits(node) and isinstance(node.ctx, ast.Load)]  # type: ignore[attr-defined]
    return len(reads) == sum(map(_is_logits, passed))


def _is_logits(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "logits"
