"""What a patch and its proof need to know of the module that they are for, be that a norm or a whole block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.providers import Choice, select
from diffkern.verify.measures import Measurement

if TYPE_CHECKING:
    from diffkern.hub.rule import Rule


#: In the place of a first tensor where a call has none.
NO_TENSOR = torch.empty(0, device="cpu")


class Fusion(ABC):
    """How the forward of a module is computed fused, when it may be, and how that is proven.

    A *call* is what :meth:`bind` makes of the arguments of one call; only the fusion looks into it.
    """

    counts_itself: ClassVar[bool] = False  # whether it consists of parts, each of which counts its calls
    proves_itself: ClassVar[bool] = False  # whether it proves its parts itself, or only repeats what runs without it
    #: Whether a layer of another package runs in the place of the module, which may raise what it likes.
    is_layer: ClassVar[bool] = False
    takes_layers: ClassVar[bool] = False  # whether a layer of another package serves its op on modules of any class
    is_block: ClassVar[bool] = False  # whether it computes all that stands in the module
    #: Whether a call of it is one of the whole model, in which rotary tables are made once.
    is_model: ClassVar[bool] = False
    only_watches: ClassVar[bool] = False  # whether it computes nothing itself, and is not counted among the patches
    lays_out: ClassVar[bool] = False  # whether it decides by itself how the weights in the module lie in memory
    covers: ClassVar[frozenset[str]] = frozenset()  # ops of modules that are no sites of their own inside of it
    allowance: float = 0.0  # error against float64 that is granted beyond what the contract grants
    #: Whether steps may become CUDA graphs, which decides about calls without a gain; None times none.
    replayed: bool | None = None

    @property
    @abstractmethod
    def op(self) -> str:
        """The op, as reports and configurations name it."""

    @property
    def kernel_ops(self) -> tuple[str, ...]:
        """The ops between whose providers it can choose; none for what gains something without a kernel."""
        return ()

    @property
    def served_by(self) -> str:
        """What reports name as its provider where it has no such ops."""
        return self.op

    @property
    def is_left_to_compiler(self) -> bool:
        """Whether ``torch.compile`` gets the stock forward where the user names no provider.

        What the compiler fuses with its neighbours is faster than an op that it cannot look into.
        """
        return False

    def computes(self, path: str) -> bool:
        """Whether it computes the module at a path, as seen from its own, itself."""
        return self.is_block

    def configure(self, rule_of: Callable[[str], Rule | None], serve: Callable[[Rule], Rule]) -> Rule | None:
        """What a configuration says of the module: ``rule_of`` an op there; ``serve`` turns choices into providers."""
        return rule_of(self.op)

    def prepare(self, module: nn.Module, providers: Iterable[str | None]) -> None:
        """Prepares a module that was just patched for its first call, which one of ``providers`` will serve."""
        return

    # --- at every call ---------------------------------------------------------------------------------

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the call, here the arguments as they are; None for arguments that the fusion does not know."""
        return args, kwargs

    def primary_input(self, call: Any) -> Tensor:
        """The input whose device and dtype decide whether a call is proven, here the first tensor."""
        args, kwargs = call
        return next((part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), NO_TENSOR)

    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        """The dtype of the weights that, besides the primary input's, decides whether a call is proven; or None."""
        return None

    def variant(self, module: nn.Module, call: Any | None) -> Hashable:
        """What else of a module and a call decides whether a proof speaks for it; of a sample if there is no call."""
        return None

    def declines(self, module: nn.Module, call: Any) -> str | None:
        """Says why a call must run the stock forward, or None."""
        return None

    @property
    def is_timed(self) -> bool:
        """Whether calls run stock where they take no less time fused."""
        return self.replayed is not None

    @property
    def without_gain(self) -> Callable[..., Any] | None:
        """What computes calls that gain nothing in the place of the forward of the class; None if that does."""
        return None

    @property
    def direct(self) -> Callable[..., Any] | None:
        """A forward that computes the bits of stock whatever the call, so that no call is asked anything; or None."""
        return None

    def weigh(self, module: nn.Module, call: Any, patched: Callable[..., Any]) -> str | None:
        """Times a proven call: why it takes no less time fused, or "". None where it says too little by itself.

        ``patched`` is the forward that runs the patches of a module, guards and all.
        """
        return None

    def allowed_in_strict(self, module: nn.Module, call: Any) -> bool:
        """Whether a call that is declined is none that the user wanted fused, so that a strict injection lets it be."""
        return False

    def stock_pieces(self, module: nn.Module, call: Any) -> tuple[str, ...]:
        """Names the parts of the module that run stock inside a fused call."""
        return ()

    @abstractmethod
    def compute(self, module: nn.Module, call: Any, provider: str | None, stock: tuple[str, ...]) -> Any:
        """Computes the forward; ``stock`` comes from :meth:`stock_pieces`."""

    def function(self, module: nn.Module, provider: str | None) -> Callable[..., Any] | None:
        """What computes calls as they are, and counts them itself; None if nothing does both."""
        return None

    # --- for proofs ------------------------------------------------------------------------------------

    def prove_ahead(
        self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype
    ) -> list[Measurement]:
        """Proves what proves itself, on likely input; returns what was measured of the parts that are left."""
        return []

    def lacks_proof(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it proves parts itself, and none of them for calls of ``dtype`` on ``device``."""
        return False

    def refused(self) -> dict[str, str]:
        """Parts that no proof so far lets compute, with the reason."""
        return {}

    def kind(self, module: nn.Module) -> Hashable:
        """What modules must have in common to share a proof."""
        return None

    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
        """Says who will compute it, for calls of ``dtype`` on ``device``.

        The least preferred of the choices for its ops speaks for it, if it has ops.

        Raises:
            diffkern.providers.NoProviderError: no provider can, or the one asked for cannot.
        """
        choices = [select(op, device, (dtype,), provider) for op in self.kernel_ops]
        return max(choices, key=lambda choice: len(choice.declined), default=Choice(self.served_by, self.compute, ()))

    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        """Dtypes that calls will probably have in a model of dtype ``whole``, the likeliest first."""
        return (whole,)

    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Returns a copy to try things on with calls of ``dtype``, which shares nothing that a run could change."""
        return module

    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
        """Returns a copy with weights of ``dtype``, to prove ahead what a cast model will do; None if too large."""
        return None

    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Any]:
        """Random calls; large ones where a proof of bit identity needs them."""
        return ()

    def short_samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Sequence[Any]:
        """Random calls of few rows, which kernels may compute in another way; they decide, and do not count."""
        return ()

    def first_call_sample(self, call: Any) -> Any | None:
        """What of a real call is tried at first use besides the samples; None for nothing."""
        return None

    def check_semantics(self, module: nn.Module) -> str | None:
        """Says how the stock forward differs in float32 from what it is believed to compute, or None."""
        return None

    def stock(self, module: nn.Module, call: Any) -> Any:
        """Runs the stock forward, which returns a tensor or a tuple of tensors of one dtype."""
        args, kwargs = call
        return type(module).forward(module, *args, **kwargs)

    def reference(self, module: nn.Module, call: Any) -> Any:
        """Computes the result in float64."""
        return None

    def grad_inputs(self, call: Any) -> tuple[Tensor, ...]:
        """The inputs of a sample whose gradients are proven, besides those of the parameters."""
        return (self.primary_input(call),)

    def exact_training(self, module: nn.Module, call: Any) -> tuple[Tensor, ...] | None:
        """The result in float64, and the gradients of :meth:`grad_inputs` and of every parameter.

        None, as here, if gradients are not proven apart from the result.
        """
        return None

    def gradient_ratio(self, dtype: torch.dtype) -> float | None:
        """What errors of gradients of ``dtype`` may be of stock's, where the fusion has a contract of its own for them.

        None, as here, if they keep that of every proof.
        """
        return None


class OneTensorFusion(Fusion):
    """What a module computes of one tensor, which is the call."""

    @property
    def argument(self) -> str:
        """The name of that tensor in the signature of the stock forward."""
        return "input"

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if len(args) == 1 and not kwargs:
            return args[0]
        return kwargs.get(self.argument) if len(kwargs) == 1 and not args else None

    @override
    def primary_input(self, call: Tensor) -> Tensor:
        return call

    @override
    def stock(self, module: nn.Module, call: Tensor) -> Tensor:
        result: Tensor = type(module).forward(module, call)
        return result
