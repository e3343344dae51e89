"""Linear layers that are not plain, as quantisers and adapters make them: by tensor, by class and by wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

#: The layers that are exchanged, by the ends of their paths.
NAMES = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "linear_1")


class Int8Weight(Tensor):
    """A weight in int8 that claims another dtype, as torchao's do: products with it dequantise it."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Int8Weight:
        self: Int8Weight = Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)  # type: ignore[attr-defined]
        return self

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.values, self.scale = values, scale

    def plain(self) -> Tensor:
        """The weight as a plain tensor."""
        return (self.values.to(self.scale.dtype) * self.scale).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["values", "scale"], self.dtype

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.plain(), *bias, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if op in (aten.detach.default, aten.clone.default, aten.alias.default, aten._to_copy.default):
            old = args[0]
            new = Int8Weight(old.values.clone(), old.scale.clone(), kwargs.get("dtype") or old.dtype)
            return return_and_correct_aliasing(op, args, kwargs, new) if op is aten.detach.default else new
        raise NotImplementedError(f"{op} of a weight in int8")


class PackedParameter(nn.Parameter):
    """Bytes that only their layer can read, like those of bitsandbytes and GGUF."""

    scale: Tensor

    def __new__(cls, values: Tensor, scale: Tensor) -> PackedParameter:
        self: PackedParameter = Tensor._make_subclass(cls, values, False)  # type: ignore[attr-defined]
        self.scale = scale
        return self

    def __deepcopy__(self, memo: Any) -> PackedParameter:
        return PackedParameter(self.data.clone(), self.scale)


class PackedLinear(nn.Linear):
    """A layer with bytes for a weight, of another shape, that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        values = weight.data.view(torch.int8).view(self.out_features, self.in_features)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, values.to(x.dtype) * weight.scale.to(x.dtype), bias)


class ScaledLinear(nn.Linear):
    """A layer of a class that computes something else than a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 1.5


def exchange(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Puts what ``make`` makes of them in the place of the layers in :data:`NAMES`."""
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and path.endswith(NAMES):
            model.set_submodule(path, make(layer))


def _rounded(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def _by_tensor(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(Int8Weight(*_rounded(layer), layer.weight.dtype), requires_grad=False)
    return layer


def _by_parameter(layer: nn.Linear) -> nn.Module:
    new = PackedLinear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
    values, scale = _rounded(layer)
    new.weight, new.bias = PackedParameter(values.view(torch.uint8).view(-1, 1), scale), layer.bias
    return new.eval()


def _by_class(layer: nn.Linear) -> nn.Module:
    new = ScaledLinear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
    new.weight, new.bias = layer.weight, layer.bias
    return new.eval()


def _randomise(model: nn.Module, part: str) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.ndim == 1))


def _lora(model: Any) -> None:
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v", "net.0.proj", "net.2"]), adapter_name="one")
    _randomise(model, "lora_")


def _tuned_norms(model: nn.Module) -> None:
    peft.inject_adapter_in_model(peft.LNTuningConfig(target_modules=["norm_q", "norm_k"]), model)  # type: ignore[no-untyped-call]
    _randomise(model, "ln_tuning")


def _torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), lambda layer, path: type(layer) is nn.Linear and path.endswith(NAMES))


#: What is done to a model, by name.
KINDS: dict[str, Callable[[Any], None]] = {
    "a tensor subclass": lambda model: exchange(model, _by_tensor),
    "packed bytes": lambda model: exchange(model, _by_parameter),
    "another class": lambda model: exchange(model, _by_class),
    "LoRA": _lora,
    "tuned norms": _tuned_norms,
    "torchao": _torchao,
}
