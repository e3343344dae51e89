"""A module whose forward is that of a layer of the Hub, as the user's configuration wants it."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from diffkern.blocks.pieces import untouched
from diffkern.hub.rule import Rule
from diffkern.matching import full_name
from diffkern.matching.forward import autocast_on
from diffkern.providers import KERNEL_DTYPES, Choice, NoProviderError
from diffkern.providers.foreign import identical, summary
from diffkern.providers.hub import is_kernel, layer_for, public_name
from diffkern.verify import gradients
from diffkern.verify.contract import SANE
from diffkern.verify.fusion import Fusion
from diffkern.verify.gradients import with_gradients
from diffkern.verify.isolation import Copy
from diffkern.verify.measures import as_one, relative_error
from diffkern.verify.samples import clone_tree, doubled, in_float64, is_ordinary, random_input

#: Rows of a random proof.
ROWS = 64

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class LayerFusion(Fusion):
    """A layer that runs on the module it replaces, as ``kernels.kernelize`` binds it. A call is its arguments.

    Nothing says what it should compute; its proof compares it with the stock forward, and both with a copy of the
    module in float64. Where no input can be guessed, that happens at the first real call.
    """

    rule: Rule  # the kernel and its layer, as a provider, by device and mode
    layer: str  # the name of the layer, for reports

    is_layer = True

    @property
    @override
    def op(self) -> str:
        return self.layer

    @override
    def primary_input(self, call: Call) -> Tensor:
        return next(value for value in pytree.tree_leaves(call) if isinstance(value, Tensor))

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        return next((parameter.dtype for parameter in module.parameters()), None)

    @override
    def variant(self, module: nn.Module, call: Call | None) -> Hashable:
        """Whether the module trains, and which arguments there are: a layer may ignore some of them."""
        args, kwargs = ((), {}) if call is None else call
        like_a_sample = not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim == 3
        return module.training, "a sample" if call is None or like_a_sample else _kinds(call)

    @override
    def declines(self, module: nn.Module, call: Call) -> str | None:
        opaque = _opaque(call)
        if opaque is not None:
            return f"an argument holds a {opaque}, which a proof cannot copy"
        tensors = [value for value in pytree.tree_leaves(call) if isinstance(value, Tensor)]
        if not tensors or any(type(x) is not Tensor or x.is_meta or x.layout is not torch.strided for x in tensors):
            return "its arguments are not plain tensors"
        x = tensors[0]
        if x.dtype not in KERNEL_DTYPES:
            return f"its input is {str(x.dtype).removeprefix('torch.')}; float32, float16 and bfloat16 are served"
        if (reason := autocast_on(x.device)) is not None:
            return reason
        try:
            layer = self._layer(module, x.device)
        except NoProviderError as error:
            return str(error)
        inside = (child for child in module.modules() if child is not module)
        if not all(untouched(child, type(child)) and is_ordinary(child) for child in inside):
            return "a layer inside of it has hooks, adapters or quantised weights, which the kernel may pass by"
        if gradients.wanted(module, x) and not getattr(layer, "has_backward", True):
            return f"{self.layer} has no backward"
        if torch.compiler.is_compiling() and not getattr(layer, "can_torch_compile", False):
            return f"{self.layer} cannot be compiled"
        return None

    @override
    def compute(self, module: nn.Module, call: Call, provider: str | None, stock: tuple[str, ...]) -> Any:
        args, kwargs = call
        return self._layer(module, self.primary_input(call).device).forward(module, *args, **kwargs)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        parameters = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
        modes = tuple(child.training for child in module.modules())
        return repr(self.rule), full_name(type(module)), repr(module), parameters, modes

    @override
    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
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
        return _in_modes_of(module, clone_tree(module, device, lambda tensor: tensor.dtype, dtype))

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
    def reference(self, module: nn.Module, call: Call) -> Any:
        """The stock forward of a copy in float64.

        Raises:
            NoProviderError: the stock forward is not that of the copy, so that nothing can be compared.
        """
        runs = [as_one(self.stock(module, Copy(call).call)) for _ in range(2)]
        if not identical(*runs):
            raise NoProviderError("its stock forward draws random numbers, and no result can be compared with another")
        result = self.stock(self._in_float64(module, call), doubled(call))
        error = relative_error(runs[0], as_one(result))
        if not error <= SANE.get(runs[0].dtype, 1e-3):
            raise NoProviderError(f"its stock forward is {error:.1e} away from the same in float64")
        return result

    @override
    def grad_inputs(self, call: Call) -> tuple[Tensor, ...]:
        tensors = {id(x): x for x in pytree.tree_leaves(call) if isinstance(x, Tensor) and x.is_floating_point()}
        return tuple(tensors.values())

    @override
    def exact_training(self, module: nn.Module, call: Call) -> tuple[Tensor, ...]:
        exact, doubles = self._in_float64(module, call), doubled(call)
        return with_gradients(lambda: self.stock(exact, doubles), (*self.grad_inputs(doubles), *exact.parameters()))

    def _in_float64(self, module: nn.Module, call: Call) -> nn.Module:
        return _in_modes_of(module, in_float64(module, self.primary_input(call).device))

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


def _in_modes_of(module: nn.Module, copy: nn.Module) -> nn.Module:
    """The copy, with every part of it in training or not as in the original."""
    parts = dict(copy.named_modules())
    for name, child in module.named_modules():
        if name in parts:
            parts[name].training = child.training
    return copy


#: What an argument may be besides a tensor, and a container of such.
_VALUES = (bool, int, float, str, torch.dtype, torch.device)


def _opaque(value: Any) -> str | None:
    """The class of a part of some arguments that is no value of its own, such as a cache of keys; or None."""
    if type(value) in (tuple, list):
        return next((name for item in value if (name := _opaque(item)) is not None), None)
    if type(value) is dict:
        return _opaque(list(value.values()))
    plain = value is None or isinstance(value, (Tensor, *_VALUES))
    return None if plain else type(value).__name__


def _kinds(value: Any) -> Hashable:
    """What of some arguments may decide what is computed; of numbers, whether they are 0 or 1."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.ndim
    if type(value) in (tuple, list):
        return tuple(_kinds(item) for item in value)
    if type(value) is dict:
        return tuple((key, _kinds(item)) for key, item in value.items())
    if type(value) in (int, float):
        return value if value in (0, 1) else "a number"
    return str(value)
