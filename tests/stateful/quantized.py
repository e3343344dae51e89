"""Linear layers with int8 weights: one whose weight is a tensor subclass, and one of its own class."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each row of a matrix to int8; returns the rows and their scales, in the dtype of ``weight``."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
    return (weight / scale).round().to(torch.int8), scale


class Int8Weight(Tensor):
    """A weight that is int8 in memory and looks like a float tensor, as those of torchao do."""

    @staticmethod
    def __new__(cls, rows: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, rows.shape, dtype=scale.dtype, device=rows.device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, rows: Tensor, scale: Tensor) -> None:
        self.rows, self.scale = rows, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Weight(shape={tuple(self.shape)}, dtype={self.dtype})"

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.rows.to(self.scale.dtype) * self.scale

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Int8Weight, (self.rows, self.scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Weight:
        return memo.setdefault(id(self), Int8Weight(self.rows.clone(), self.scale.clone()))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dequantize() if isinstance(weight, cls) else weight, *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].rows, args[0].scale)
        if func is aten.clone.default:
            return cls(args[0].rows.clone(), args[0].scale.clone())
        if func is aten._to_copy.default:
            return cls(args[0].rows.clone(), args[0].scale.to(kwargs.get("dtype") or args[0].dtype))
        raise NotImplementedError(f"Int8Weight has no {func}")


class Int8Linear(nn.Linear):
    """A linear layer of its own class that multiplies by int8 rows and scales them."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """A layer that computes about what ``linear`` computes."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None)
        rows, scale = quantize_rows(linear.weight.detach())
        del layer.weight
        layer.weight = nn.Parameter(rows, requires_grad=False)
        layer.register_buffer("scale", scale)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def quantize_weight(model: nn.Module, path: str) -> None:
    """Gives the linear layer at ``path`` an int8 weight that is a tensor subclass."""
    linear = model.get_submodule(path)
    rows, scale = quantize_rows(linear.weight.detach())  # type: ignore[operator,union-attr]
    linear.weight = nn.Parameter(Int8Weight(rows, scale), requires_grad=False)


def quantize_layer(model: nn.Module, path: str) -> None:
    """Puts a linear layer of another class at ``path``."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, Int8Linear.of(model.get_submodule(path)))  # type: ignore[arg-type]
