"""A module whose forward is that of a layer of the Hub, as the user's configuration wants it."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from diffkern.hub.rule import Rule
from diffkern.injection.fusion import Fusion
from diffkern.matching import full_name
from diffkern.providers import KERNEL_DTYPES, Choice, NoProviderError
from diffkern.providers.foreign import summary
from diffkern.providers.hub import is_kernel, layer_for, public_name
from diffkern.verify import gradients
from diffkern.verify.samples import clone_tree, random_input

#: Rows of a random proof.
ROWS = 64

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LayerFusion(Fusion):
    """A layer that runs on the module it replaces, as ``kernels.kernelize`` binds it. A call is its arguments.

    What it should compute nobody says; its proof compares it with the stock forward, and both with a copy of the
    module in float64. Where no input can be guessed, that happens at the first real call.

    Attributes:
        rule: The kernel and its layer, as a provider, by device and mode.
        layer: The name of the layer, for reports.
    """

    rule: Rule
    layer: str

    @property
    @override
    def op(self) -> str:
        return self.layer

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return args, dict(kwargs)

    @override
    def primary_input(self, call: Call) -> Tensor:
        return next(value for value in pytree.tree_leaves(call) if isinstance(value, Tensor))

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        return next((parameter.dtype for parameter in module.parameters()), None)

    @override
    def declines(self, module: nn.Module, call: Call) -> str | None:
        tensors = [value for value in pytree.tree_leaves(call) if isinstance(value, Tensor)]
        if not tensors or any(type(x) is not Tensor or x.is_meta or x.layout is not torch.strided for x in tensors):
            return "its arguments are not plain tensors"
        x = tensors[0]
        if x.dtype not in KERNEL_DTYPES:
            return f"its input is {str(x.dtype).removeprefix('torch.')}; float32, float16 and bfloat16 are served"
        if torch.is_autocast_enabled(x.device.type):
            return f"autocast is on for {x.device.type}, and the stock forward follows its rules"
        try:
            layer = self._layer(module, x.device)
        except NoProviderError as error:
            return str(error)
        if gradients.wanted(module, x) and not getattr(layer, "has_backward", True):
            return f"{self.layer} has no backward"
        if torch.compiler.is_compiling() and not getattr(layer, "can_torch_compile", False):
            return f"{self.layer} cannot be compiled"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: Call) -> tuple[str, ...]:
        return ()

    @override
    def compute(self, module: nn.Module, call: Call, provider: str | None, stock: tuple[str, ...]) -> Any:
        args, kwargs = call
        return self._layer(module, self.primary_input(call).device).forward(module, *args, **kwargs)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        parameters = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
        return repr(self.rule), full_name(type(module)), repr(module), parameters

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        layer = self._layer(module, device)
        name = public_name(provider or "")
        reason = unlike(layer, type(module))
        if reason is not None:
            raise NoProviderError(f"{name}: {reason}")
        return Choice(name, layer.forward, ())

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        return (next((p.dtype for p in module.parameters() if p.dtype in KERNEL_DTYPES), whole),)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return clone_tree(module, device, lambda tensor: tensor.dtype, dtype)

    @override
    def cast(self, module: nn.Module, dtype: torch.dtype) -> None:
        return None

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Call]:
        """One input, of the size of the first weight that says one; none where the stock forward does not take it."""
        size = next((size for child in module.modules() if (size := _input_size(child)) is not None), None)
        if size is None:
            return ()
        call: Call = ((random_input(torch.Size((2, ROWS // 2 + 1, size)), device, dtype),), {})
        try:
            self.stock(module, call)
        except Exception:  # the guess was wrong; the first real call will do
            return ()
        return (call,)

    @override
    def first_call_sample(self, call: Call) -> Call:
        detached: Call = pytree.tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, call)
        return detached

    @override
    def check_semantics(self, module: nn.Module) -> str | None:
        """Never: nothing is believed, the reference is the stock forward itself."""
        return None

    @override
    def stock(self, module: nn.Module, call: Call) -> Any:
        args, kwargs = call
        return type(module).forward(module, *args, **kwargs)

    @override
    def reference(self, module: nn.Module, call: Call) -> Any:
        copy = clone_tree(module, self.primary_input(call).device, lambda tensor: torch.float64, torch.float64)
        return self.stock(copy, pytree.tree_map(_double, call))

    def _layer(self, module: nn.Module, device: torch.device) -> type[nn.Module]:
        """The layer for ``device`` and the mode that the module is in.

        Raises:
            NoProviderError: it is not to be had, or the configuration names none.
        """
        provider = self.rule.at(device, module.training)
        if not provider or not is_kernel(provider):
            raise NoProviderError(f"the configuration names no layer for {device.type}")
        return layer_for(provider, device)


def unlike(layer: type[nn.Module], module: type[nn.Module]) -> str | None:
    """Why a layer cannot stand in for a class, by the rules of ``kernels``: no state, and the same arguments."""
    if layer.__init__ is not nn.Module.__init__:
        return f"{layer.__name__} has a constructor, and a layer has no state of its own"
    try:
        ours, theirs = (list(inspect.signature(cls.forward).parameters.values()) for cls in (module, layer))
    except Exception as error:
        return f"what {layer.__name__} takes cannot be read ({summary(error)})"
    if [p.kind for p in ours] != [p.kind for p in theirs]:
        return f"{layer.__name__} takes other arguments than {module.__name__}"
    return None


def _input_size(module: nn.Module) -> int | None:
    """The size of the last dimension that a module with a weight takes."""
    size = getattr(module, "in_features", None)
    if isinstance(size, int):
        return size
    weight = module._parameters.get("weight")
    return None if weight is None or weight.ndim != 1 else weight.shape[0]


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
