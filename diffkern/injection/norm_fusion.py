"""Norm modules as the injection sees them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level
from typing_extensions import override

from diffkern.matching import NormSemantics, apply, declines, full_name, parameter_of
from diffkern.providers import KERNEL_DTYPES, Choice, select, use_provider
from diffkern.verify.contract import EXACT_ELEMENTS, ROWS, SEMANTIC_TOLERANCE
from diffkern.verify.fusion import OneTensorFusion
from diffkern.verify.gain import reason_to_stay_stock
from diffkern.verify.gradients import with_gradients
from diffkern.verify.measures import relative_error
from diffkern.verify.samples import clone_leaf, random_input, sample_shape


@dataclass(frozen=True)
class NormFusion(OneTensorFusion):
    """A norm of known semantics. A call is its one tensor."""

    semantics: NormSemantics  # what it computes
    replayed: bool | None = None  # as in :class:`~diffkern.verify.fusion.Fusion`

    takes_layers = True

    @property
    @override
    def op(self) -> str:
        return self.semantics.op

    @property
    @override
    def kernel_ops(self) -> tuple[str, ...]:
        return (self.op,)

    @property
    @override
    def is_left_to_compiler(self) -> bool:
        # Norms over rows: Inductor computes them together with the casts, the modulation and the sum around them.
        return self.op in ("layer_norm", "rms_norm")

    @property
    @override
    def argument(self) -> str:
        return self.semantics.argument

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        weight = parameter_of(module, self.semantics.weight)
        return weight.dtype if isinstance(weight, Tensor) else None

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        return declines(self.semantics, module, call)

    @override
    def weigh(self, module: nn.Module, call: Tensor, patched: Callable[..., Any]) -> str | None:
        provider = select(self.op, call.device, (call.dtype,), None).provider
        shape = sample_shape(self.semantics, module, 1)
        order = "" if call.is_contiguous() else "strided"  # a model is timed in two layouts
        key = "call of a norm", full_name(type(module)), provider, str(call.dtype), tuple(shape), order
        both = lambda: patched(module, call), lambda: type(module).forward(module, call)
        return reason_to_stay_stock(both, call.device, bool(self.replayed), *key, call.numel().bit_length())

    @override
    def compute(self, module: nn.Module, call: Tensor, provider: str | None, stock: tuple[str, ...]) -> Tensor:
        return apply(self.semantics, module, call, provider=provider)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        dtypes = tuple(None if p is None else p.dtype for p in module._parameters.values())
        return full_name(type(module)), self.semantics, sample_shape(self.semantics, module, ROWS), dtypes

    @override
    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
        parameters = (parameter.dtype for parameter in module.parameters() if parameter.dtype in KERNEL_DTYPES)
        return select(self.op, device, tuple(dict.fromkeys((dtype, *parameters))), provider)

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        """The weights', the model's, and float32, to which models upcast."""
        own = [parameter.dtype for parameter in module.parameters()]
        return tuple(dict.fromkeys(dtype for dtype in (*own, whole, torch.float32) if dtype in KERNEL_DTYPES))

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return clone_leaf(module, device)

    @override
    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        return clone_leaf(module, torch.device("cpu"), dtype)

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Tensor]:
        rows = ROWS
        if exact:
            rows = max(ROWS, EXACT_ELEMENTS // max(sample_shape(self.semantics, module, 1).numel(), 1))
        return [random_input(sample_shape(self.semantics, module, rows), device, dtype)]

    @override
    def short_samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Sequence[Tensor]:
        return [random_input(sample_shape(self.semantics, module, 1), device, dtype)]

    @override
    def first_call_sample(self, call: Tensor) -> Tensor:
        return call.detach()

    @override
    def check_semantics(self, module: nn.Module) -> str | None:
        module = clone_leaf(module, torch.device("cpu"), torch.float32)
        x = random_input(sample_shape(self.semantics, module, ROWS), torch.device("cpu"), torch.float32)
        error = relative_error(self.stock(module, x), self.reference(module, x))
        if error <= SEMANTIC_TOLERANCE:
            return None
        return f"the stock forward is {error:.1e} away from what its class is known to compute"

    @override
    def stock(self, module: nn.Module, call: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # torch warns where a mix of dtypes is slow; the user did not ask for this call.
            warnings.simplefilter("ignore")
            return super().stock(module, call)

    @override
    def exact_training(self, module: nn.Module, call: Tensor) -> tuple[Tensor, ...]:
        wide, x = clone_leaf(module, call.device, torch.float64), call.detach().double()
        # In forward mode the ops are plain PyTorch, which knows its own backward.
        with dual_level():
            return with_gradients(lambda: apply(self.semantics, wide, x), (x, *wide.parameters()))

    @override
    def reference(self, module: nn.Module, call: Tensor) -> Tensor:
        with use_provider("eager"):
            return apply(self.semantics, clone_leaf(module, call.device, torch.float64), call.double())
