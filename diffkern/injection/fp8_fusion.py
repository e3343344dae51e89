"""Large linear layers whose products are computed in fp8, and the rules that say which layers these are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.fp8 import (
    MULTIPLE,
    STORE,
    RowwiseFp8,
    dequantized,
    parts_of_feed_forward,
    quantize_rowwise,
    replace_weight,
    shared_rows,
    stored_weight,
    unfit_weights,
    weight_of,
)
from diffkern.blocks.pieces import are_silent, runs_fused, unfit, untouched
from diffkern.cache import memory
from diffkern.hub import KernelConfig
from diffkern.hub.rule import Rule
from diffkern.injection.components import is_denoiser
from diffkern.injection.state import STOCK
from diffkern.matching import full_name
from diffkern.ops import activation_fp8
from diffkern.providers import Choice, select
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.verify import gradients
from diffkern.verify.contract import FP8_ALLOWANCE, FP8_ALLOWANCE_OF_TWO, ROWS
from diffkern.verify.fusion import OneTensorFusion
from diffkern.verify.gain import reason_to_stay_stock
from diffkern.verify.samples import bare, clone_leaf, clone_tree, in_float64, random_input

#: The names under which configurations and reports know such layers, and two of them with a GELU between.
OPS = OP, FEED_FORWARD_OP = "linear_fp8", "feed_forward_fp8"

#: Features of input and output from which on a product in fp8 can make up for the pass that quantises its input.
LEAST_FEATURES = 1024
#: Rows below which nothing can be gained: modulation and time embeddings have one for each sample.
LEAST_ROWS = 32
#: How a delicate layer is in fp8 all the same.
UNLESS_INCLUDED = ": in fp8 only if fp8_include names it"
#: Multiplications from which on a product in fp8 is certain to gain: such are not timed.
CERTAIN = 1 << 37
#: A part of a path that says: modulation, embedding, time, norm, router. What these compute is small, and scales or
#: shifts all that follows.
_DELICATE = re.compile(
    r"norm|ada_?ln|modulation|embed|guidance|router|adapter|lora_|(^|_)(mod|emb|temb|time|timestep|gate_logits)($|_|\d)",
    re.IGNORECASE,
)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fp8Layers:
    """Says which linear layers of the components of a pipeline are computed in fp8."""

    #: The modules by component name, as :func:`diffkern.injection.components.select_components` has them.
    components: Mapping[str, nn.Module]
    config: KernelConfig  # whose ``fp8_include`` and ``fp8_exclude`` come before the rules here
    #: Whether steps may become CUDA graphs, which decides about layers without a gain; None times none.
    replayed: bool | None = None
    repeated: frozenset[str] = field(init=False)  # paths of the blocks that a component repeats

    def __post_init__(self) -> None:
        denoisers = ((name, module) for name, module in self.components.items() if is_denoiser(name))
        object.__setattr__(self, "repeated", frozenset(path for pair in denoisers for path in _repeated(*pair)))

    def reason_of_place(self, path: str, module: nn.Module) -> str | None:
        """Why a layer stays in its dtype, by its size and by where it is; "" and None as for :meth:`reason`."""
        size, included = _size(module), any(fnmatchcase(path, pattern) for pattern in self.config.fp8_include)
        if size is None or (not included and min(size) < LEAST_FEATURES):
            return ""
        if not included and "" not in self.components and not is_denoiser(path.partition(".")[0]):
            return ""  # it runs once for an image, and not in every step
        if any(fnmatchcase(path, pattern) for pattern in self.config.fp8_exclude):
            return "left in its dtype by fp8_exclude"
        rule = self.config.rule(path, type(module).__name__, OP)
        if rule is not None and not any(rule.choices()):
            return "left in its dtype by config"
        if not included and (why := self._delicate(path)) is not None:
            return f"{why}{UNLESS_INCLUDED}"
        return None

    def reason(self, path: str, module: nn.Module) -> str | None:
        """Why a layer stays in its dtype; "" if it is no large layer, of which nothing is said; None if in fp8."""
        why = self.reason_of_place(path, module)
        if why is not None:
            return why
        size = _size(module)
        assert size is not None
        if "base_layer" in module._modules:  # an adapter, which calls the layer that it is of
            return ""
        if type(module) is not nn.Linear:
            return f"a {type(module).__name__} is left to the library that it is of"
        weight = module._parameters.get("weight")
        stored = stored_weight(weight)
        if weight is None or (stored is None and type(weight) not in (nn.Parameter, Tensor)):
            return f"its weight is a {type(weight).__name__}, which its own library computes with"
        if weight.dtype not in _HALF:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}; float16 and bfloat16 are quantised"
        if any(features % MULTIPLE for features in size):
            return f"tensor cores take sides that are multiples of {MULTIPLE}, and it has {size[0]} x {size[1]}"
        return None

    def why_none(self, layers: Mapping[str, nn.Module]) -> str:
        """Why none of these linear layers is in fp8: what holds for most of them."""
        small = f"no linear layer of a step has {LEAST_FEATURES} features or more on both sides"
        reasons = Counter(self.reason(path, module) for path, module in layers.items())
        return next((reason for reason, _ in reasons.most_common() if reason), small)

    def fusion(self, path: str) -> Fp8Fusion:
        """How the layer at a path is computed."""
        return Fp8Fusion(kind_of(path), self.replayed, self.config.fp8_weights == "replace")

    def feed_forward(self, path: str, module: nn.Module) -> Fp8FeedForward | None:
        """How a feed-forward is computed whose GELU stands between two layers in fp8; None if it is no such."""
        if full_name(type(module)) != "diffusers.models.attention.FeedForward" or _gelu_of(module) is None:
            return None
        layers, _ = parts_of_feed_forward(module)
        names = {id(child): name for name, child in module.named_modules(prefix=path)}
        if len(layers) != 2 or any(self.reason(names[id(layer)], layer) is not None for layer in layers):
            return None
        return Fp8FeedForward(kind_of(path), self.replayed, self.config.fp8_weights == "replace")

    def _delicate(self, path: str) -> str | None:
        if any(map(_DELICATE.search, path.split("."))):
            return "a layer of a modulation, an embedding or a norm"
        name = path.partition(".")[0] if "" not in self.components else ""
        own = [block for block in self.repeated if not name or block.startswith(f"{name}.")]
        if own and not path.startswith(tuple(f"{block}." for block in own)):
            return "a layer before or after the repeated blocks"
        return None

    def check(self, paths: Sequence[str]) -> None:
        """Makes sure that every pattern fits one of the linear layers that there are.

        Raises:
            ValueError: one does not.
        """
        for name in ("fp8_include", "fp8_exclude"):
            for pattern in getattr(self.config, name):
                if not any(fnmatchcase(path, pattern) for path in paths):
                    raise ValueError(
                        f"{name} has the pattern {pattern!r}, which fits no linear layer of this model; there are such "
                        f"as {', '.join(map(repr, paths[:3])) or 'none'}"
                    )


def _size(module: nn.Module) -> tuple[int, int] | None:
    """Features of the input and the output of whatever calls itself a linear layer."""
    size = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return size if all(type(features) is int for features in size) else None  # type: ignore[return-value]


def is_linear(module: nn.Module) -> bool:
    """Whether a module calls itself a linear layer."""
    return _size(module) is not None


def _repeated(name: str, root: nn.Module) -> Iterator[str]:
    """Yields the paths of modules that stand in a list of modules of one class, with parts of their own."""
    for path, module in root.named_modules(prefix=name):
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            items = list(module.named_children())
            if len({type(item) for _, item in items}) == 1 and all(item._modules for _, item in items):
                yield from (f"{path}.{key}".removeprefix(".") for key, _ in items)


def kind_of(path: str) -> str:
    """A path with a star for each index, which layers of one kind have in common."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


@dataclass(frozen=True)
class Fp8Fusion(OneTensorFusion):
    """A linear layer of torch whose product is in fp8. A call is its input."""

    layer: str  # Which kind of layer it is: its path, with a star for each index. Layers of one kind share a proof.
    replayed: bool | None = None  # as in :class:`Fp8Layers`
    #: Whether the copy in fp8 takes the place of the weight, which goes to the memory of the host.
    replaces: bool = False

    op = OP
    allowance = FP8_ALLOWANCE

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        weight = module._parameters.get("weight")
        return None if weight is None else weight.dtype

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        reason = self._unfit(module, call)
        weight = module._parameters.get("weight") if reason is not None and self.replaces else None
        if weight is not None and weight.device == STORE != call.device:
            raise RuntimeError(
                f"this call of {self.layer} cannot run in fp8, since {reason}; nor as it is written, since "
                "fp8_weights='replace' moved its weight to the memory of the host: restore() brings it back"
            )
        return reason

    def _unfit(self, module: nn.Module, x: Any) -> str | None:
        reason = unfit(x)
        if reason is not None:
            return reason
        if torch.compiler.is_compiling():
            if stored_weight(module._parameters.get("weight")) is not None:
                return "a graph of torch.compile holds the product of the library that its weight is of"
            # Its graph holds the product as it is written, see compute.
            return "a graph of torch.compile has no room for copies" if self.replaces else None
        if x.dtype not in _HALF:
            return "its input is float32; float16 and bfloat16 are quantised"
        width = x.shape[-1] if x.ndim else 0
        if width == 0 or (x.numel() < LEAST_ROWS * width and not self.replaces):
            return f"its input has fewer than {LEAST_ROWS} rows, where nothing is gained"
        if gradients.wanted(module, x):
            return "gradients are wanted, and rounding to fp8 has none"
        if modes_active() or transforms_active():
            return "a mode or a transform of torch watches its operations"
        weights = memory(module).get("fp8")
        if weights is not None and weights.moves:
            weights.drop()
            return "its weight is another one at every call, as offloading makes it: a copy in fp8 would be of no use"
        if "forward" in module.__dict__ and not runs_fused(module):
            return "a hook on it moves or casts its weight at every call: a copy in fp8 would stay on the GPU"
        return unfit_weights(module, x.device, x.dtype)

    @override
    def weigh(self, module: nn.Module, call: Tensor, patched: Callable[..., Any]) -> str | None:
        linear: Any = module
        weights = weight_of(module, call.device)

        def fused() -> Tensor:
            return weights.run(module, quantize_rowwise(call, None))

        reason = self._slower(call, linear.out_features, fused, lambda: self.stock(module, call))
        if reason:
            weights.drop()
        return reason

    def _slower(self, call: Tensor, features: int, fused: Callable[[], Tensor], stock: Callable[[], Tensor]) -> str:
        """Why the fused one is not worth it for an input, whose first product has so many features; or ""."""
        if call.numel() * features > CERTAIN or self.replaces:
            return ""
        provider, width = select("activation_fp8", call.device, (call.dtype,), None).provider, call.shape[-1]
        size = f"{width} features", f"2^{(call.numel() // width).bit_length() - 1} rows"
        key = self.op, features, provider, str(call.dtype), *size
        return reason_to_stay_stock((fused, stock), call.device, bool(self.replayed), *key)

    @override
    def prepare(self, module: nn.Module, providers: Iterable[str | None]) -> None:
        """Moves the weight away, if its copy shall take its place."""
        stored = stored_weight(module._parameters.get("weight"))
        if self.replaces and stored is None and STOCK not in providers:  # one that stays stock needs its weight
            replace_weight(module)

    @override
    def allowed_in_strict(self, module: nn.Module, call: Any) -> bool:
        return isinstance(call, Tensor) and call.ndim > 0 and call.numel() < LEAST_ROWS * call.shape[-1]

    @override
    def compute(self, module: nn.Module, call: Tensor, provider: str | None, stock: tuple[str, ...]) -> Tensor:
        if torch.compiler.is_compiling():  # nothing can be kept in a graph
            parameters: Any = module._parameters
            return F.linear(call, parameters["weight"], parameters["bias"])
        return weight_of(module, call.device).call(module, call, provider)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return self.layer, tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())

    @override
    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
        """Who quantises the input: the product is torch's."""
        return select("activation_fp8", device, (dtype,), provider)

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        return (self.weight_dtype(module) or whole,)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        stored = stored_weight(module._parameters.get("weight"))
        return clone_leaf(module, device) if stored is None else bare(module)

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Tensor]:
        linear: Any = module
        return [random_input(torch.Size((ROWS, linear.in_features)), device, dtype)]

    @override
    def reference(self, module: nn.Module, call: Tensor) -> Tensor:
        wide = dequantized(module, torch.float64) or clone_leaf(module, call.device, torch.float64)
        return self.stock(wide, call.double())


def _gelu_of(feed_forward: Any) -> str | None:
    """The function of the GELU that a feed-forward of diffusers begins with, or None."""
    first = next(iter(feed_forward._modules["net"]._modules.values()))
    if full_name(type(first)) != "diffusers.models.activations.GELU" or not untouched(first, type(first)):
        return None
    return {"tanh": "gelu_tanh", "none": "gelu"}.get(first.approximate)


@dataclass(frozen=True)
class Fp8FeedForward(Fp8Fusion):
    """Diffusers' ``FeedForward`` with a GELU, which writes its rows in fp8. A call is its input.

    Where it runs stock, its layers are in fp8 each by itself.
    """

    op = FEED_FORWARD_OP
    argument = "hidden_states"
    allowance = FP8_ALLOWANCE_OF_TWO

    @override
    def configure(self, rule_of: Callable[[str], Rule | None], serve: Callable[[Rule], Rule]) -> Rule | None:
        return rule_of(self.op) or rule_of(OP)

    @override
    def prepare(self, module: nn.Module, providers: Iterable[str | None]) -> None:
        """Leaves that to its layers."""

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        return next(module.parameters()).dtype

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        if torch.compiler.is_compiling():
            return "its graph holds no fp8"
        if _gelu_of(module) is None:
            return "its GELU has a hook, or is another module than it was"
        layers, dropouts = parts_of_feed_forward(module)
        if len(layers) != 2 or not all(untouched(layer, nn.Linear) for layer in layers) or not are_silent(dropouts):
            return "a layer inside of it has a hook or an adapter, or drops values"
        return next((why for layer in layers if (why := super(Fp8FeedForward, self).declines(layer, call))), None)

    @override
    def weigh(self, module: nn.Module, call: Tensor, patched: Callable[..., Any]) -> str | None:
        """Without a gain each of the layers is timed by itself."""
        first: Any = parts_of_feed_forward(module)[0][0]
        # As stock would: its layers have patches of their own.
        twin = cache(lambda: self.clone_for_verification(module, call.device, call.dtype))
        both = lambda: self.compute(module, call, None, ()), lambda: self.stock(twin(), call)
        return self._slower(call, first.out_features, *both)

    @override
    def allowed_in_strict(self, module: nn.Module, call: Any) -> bool:
        return True

    @override
    def compute(self, module: nn.Module, call: Tensor, provider: str | None, stock: tuple[str, ...]) -> Tensor:
        (first, last), _ = parts_of_feed_forward(module)
        function = _gelu_of(module)
        assert function is not None
        x = weight_of(first, call.device).run(first, shared_rows(call, module, provider))
        rows = RowwiseFp8(*activation_fp8(x, function, provider=provider))  # by the GELU itself
        return weight_of(last, call.device).run(last, rows)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return clone_tree(module, device, lambda tensor: tensor.dtype, dtype)

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Tensor]:
        return super().samples(parts_of_feed_forward(module)[0][0], device, dtype, exact)

    @override
    def reference(self, module: nn.Module, call: Tensor) -> Tensor:
        return self.stock(in_float64(module, call.device), call.double())
