"""What is known about the modules that a function calls: of one module for sure, of a class by the names alone."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from enum import Enum, auto
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn

from diffkern.blocks import recipe_for
from diffkern.blocks.pieces import calls_otherwise, untouched
from diffkern.matching import NormSemantics, full_name, match, parameter_of
from diffkern.rewrite.flow import Flow

Path = tuple[str, ...]
_Answer = TypeVar("_Answer")


class Known(Enum):
    """What is known of an attribute that is no plain value: nothing, or that a submodule or a parameter is there."""

    UNKNOWN = auto()
    PRESENT = auto()


UNKNOWN, PRESENT = Known.UNKNOWN, Known.PRESENT

#: Over what a norm takes its statistics: the last dimension; the channels of each position; groups of channels and all
#: positions. By its name alone a norm may be any of them.
LAST_DIM, CHANNELS, GROUPS, ANY_NORM = "last dim", "channels", "groups", "any"

#: Attributes that change between calls.
_CHANGING = frozenset({"training", "gradient_checkpointing"})

_NORM_NAME = re.compile(r"(^|_)(norm|ln|layernorm|rmsnorm)\d*(_|$)|norm\d*$|_norm|norm_")
_ACTIVATION_NAME = re.compile(
    r"^(act|act_fn|activation|activation_fn|nonlinearity|silu|gelu|act_mlp|gate_act|mlp_act)$"
)
_LINEAR_NAME = re.compile(r"proj|linear|fc\d?$|^w\d$|^to_|^(gate|up|down|wi_\d|gate_layer|up_layer)$")
#: What modules of activations compute, by exact class.
_ACTIVATION_CLASSES = {
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Tanh": "tanh",
    "diffusers.models.activations.FP32SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
}
GROUP_NORM = NormSemantics("group_norm", "input", bias="bias", dim=1, layout="contiguous", mixed_dtypes=False)
#: Where modules that are group norms hold the one of torch. Those that hold one normalise every frame by itself, unless
#: they say that they have more groups than one.
_GROUP_NORMS: dict[str, Path] = {
    "torch.nn.modules.normalization.GroupNorm": (),
    "diffusers.models.autoencoders.autoencoder_kl_cosmos.CosmosCausalGroupNorm": ("norm",),
    "diffusers.models.autoencoders.autoencoder_kl_mochi.MochiChunkedGroupNorm3D": ("norm_layer",),
}
#: Say what the norms of libraries compute that the tables do not know; None for any other module.
NORM_SOURCES: list[Callable[[nn.Module], NormSemantics | None]] = []

#: What makes the modulation of a norm from an embedding, beside views and sums.
_MODULATES = (nn.Linear, nn.SiLU, nn.Identity)


class Facts:
    """What the names in the source of a class suggest; good enough to count sites without a module."""

    def __init__(self, receiver: str, cls: type | None = None) -> None:
        self.receiver = receiver
        self.cls = cls
        #: Answers so far. A plan serves every module that gives the same ones.
        self.answers: dict[tuple[str, Path], object] = {}

    def path(self, flow: Flow, node: ast.expr) -> Path | None:
        """The attributes that lead from ``self`` to a callee, through single definitions; None for other callees."""
        definition = flow.single(node)
        if definition is not None and definition.value is not None:
            return self.path(flow, definition.value)
        if isinstance(node, ast.Attribute):
            base = self.path(flow, node.value)
            return None if base is None else (*base, node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            base = self.path(flow, node.value)
            return None if not base or type(node.slice.value) is not int else (*base, str(node.slice.value))
        if isinstance(node, ast.Name) and node.id == self.receiver:
            reaching = flow.definitions.get(node, frozenset())
            return () if reaching == {flow.parameters.get(node.id)} else None
        return None

    def norm(self, path: Path) -> str:
        """Over what the child normalises; "" for what is no norm that ops can compute."""
        return self._answer("norm", path, "")

    def is_linear(self, path: Path) -> bool:
        """Whether the child is a linear layer of torch's own class."""
        return self._answer("is_linear", path, False)

    def is_convolution(self, path: Path) -> bool:
        """Whether the child is a convolution over images or videos, of torch's own class and without hooks."""
        return self._answer("is_convolution", path, False)

    def is_patches(self, path: Path) -> bool:
        """Whether the child is such a convolution, and a product of patches that do not overlap."""
        return self._answer("is_patches", path, False)

    def pads(self, path: Path) -> bool:
        """Whether the child is such a convolution, and pads with pixels of the image or the video."""
        return self._answer("pads", path, False)

    def length(self, path: Path) -> int:
        """How many layers a sequence of torch's own class calls one after the other; 0 for what is no such sequence."""
        return self._answer("length", path, 0)

    def classes(self, path: Path) -> tuple[str, ...]:
        """The full names of the class of the child and of what it inherits from."""
        return self._answer("classes", path, ())

    def is_projection(self, path: Path) -> bool:
        """Whether a call of the child returns a new tensor, whatever its class: that of a linear layer, plain or not.

        An attention ends with one.
        """
        return self._answer("is_projection", path, False)

    def forward_of_norms(self, path: Path) -> FunctionType | None:
        """The forward of a submodule that holds norms and what makes their modulation; None for other submodules."""
        return self._answer("forward_of_norms", path, None)

    def modulates(self, path: Path) -> bool:
        """Whether such a submodule holds what makes a modulation, beside norms."""
        return self._answer("modulates", path, False)

    def forward_of_convolution(self, path: Path) -> FunctionType | None:
        """The forward of a submodule that holds a convolution over videos and nothing else; None for others.

        One with a form of its own is called, as are the blocks around it.
        """
        return self._answer("forward_of_convolution", path, None)

    def drops_nothing(self, path: Path) -> bool:
        """Whether the child is a dropout by the probability 0."""
        return self._answer("drops_nothing", path, False)

    def activation(self, path: Path) -> str | None:
        """The activation that the child computes, "any" for one that the proof has to find; None for others."""
        return self._answer("activation", path, None)

    def value(self, path: Path) -> object:
        """A plain attribute, None or PRESENT for a submodule; UNKNOWN for everything else."""
        return self._answer("value", path, UNKNOWN)

    def is_settled(self, path: Path) -> bool:
        """Whether a site may read an attribute, which its proof held fixed: a callee, or what guards ask for."""
        return True  # a name says nothing of the value

    @property
    def values(self) -> dict[str, object]:
        """The attributes that something was decided by."""
        answers = self.answers.items()
        return {path[0]: value for (kind, path), value in answers if kind == "value" and value is not UNKNOWN}

    def _answer(self, question: str, path: Path, nothing: _Answer) -> _Answer:
        """The answer to a question about a child; ``nothing`` of the module itself, and where a name says nothing."""
        if path and (question, path) not in self.answers:
            self.answers[question, path] = getattr(self, f"_{question}", lambda path: nothing)(path)
        return self.answers[question, path] if path else nothing  # type: ignore[return-value]

    def hold_for(self, module: nn.Module) -> bool:
        """Whether a module gives the same answers."""
        other = ModuleFacts(self.receiver, module)
        given = ((getattr(other, f"_{kind}")(path), answer) for (kind, path), answer in self.answers.items())
        return all(type(one) is type(answer) and one == answer for one, answer in given)  # 1 is not 1.0 to a guard

    def _norm(self, path: Path) -> str:
        return ANY_NORM if _NORM_NAME.search(_name_of(path)) else ""

    def _is_linear(self, path: Path) -> bool:
        return _LINEAR_NAME.search(_name_of(path)) is not None

    def _is_projection(self, path: Path) -> bool:
        return self._is_linear(path) or re.search(r"(^|_)attn\d*(_|$)", _name_of(path)) is not None

    def _value(self, path: Path) -> object:
        return UNKNOWN

    def _activation(self, path: Path) -> str | None:
        return "any" if _ACTIVATION_NAME.match(path[-1]) else None


class ModuleFacts(Facts):
    """What one module holds."""

    def __init__(self, receiver: str, module: nn.Module) -> None:
        super().__init__(receiver, type(module))
        self._module: nn.Module | None = module

    def forget_module(self) -> None:
        """Keeps the answers alone: a plan outlives the module that it was made for."""
        self._module, self.cls = None, None

    def is_settled(self, path: Path) -> bool:
        """Whether a site may read an attribute: a submodule, a method, or a plain value, which the plan is for then."""
        if child_of(self._module, path) is not None or (len(path) == 1 and callable(getattr(self.cls, path[0], None))):
            return True
        return len(path) == 1 and self.value(path) is not UNKNOWN

    def _norm(self, path: Path) -> str:
        child = child_of(self._module, path)
        found = None if child is None else norm_of(child)
        return "" if found is None else found[0]

    def _is_linear(self, path: Path) -> bool:
        return type(child_of(self._module, path)) is nn.Linear

    def _is_convolution(self, path: Path) -> bool:
        child = child_of(self._module, path)
        return child is not None and type(child) in (nn.Conv2d, nn.Conv3d) and untouched(child, type(child))

    def _is_patches(self, path: Path) -> bool:
        return self._is_convolution(path) and takes_patches(child_of(self._module, path))

    def _pads(self, path: Path) -> bool:
        return self._is_convolution(path) and getattr(child_of(self._module, path), "padding_mode", "") != "zeros"

    def _classes(self, path: Path) -> tuple[str, ...]:
        return tuple(map(full_name, type(child_of(self._module, path)).__mro__))

    def _length(self, path: Path) -> int:
        child = child_of(self._module, path)
        in_turn = type(child) is nn.Sequential and list(child._modules) == [str(i) for i in range(len(child._modules))]
        return len(child._modules) if child is not None and in_turn else 0

    def _value(self, path: Path) -> object:
        return plain_attribute(self._module, path[0])

    def _forward_of_norms(self, path: Path) -> FunctionType | None:
        child = child_of(self._module, path)
        if child is None or isinstance(child, nn.Sequential) or child._parameters or child._buffers:
            return None
        if norm_of(child) is not None or not untouched(child, type(child)) or calls_otherwise(type(child)):
            return None
        forward = type(child).forward
        others = [part for part in child._modules.values() if part is None or norm_of(part) is None]
        of_norms = len(others) < len(child._modules) and all(type(part) in _MODULATES for part in others)
        return forward if of_norms and isinstance(forward, FunctionType) else None

    def _modulates(self, path: Path) -> bool:
        child = child_of(self._module, path)
        return self._forward_of_norms(path) is not None and any(type(p) in _MODULATES for p in child._modules.values())  # type: ignore[union-attr]

    def _forward_of_convolution(self, path: Path) -> FunctionType | None:
        child = child_of(self._module, path)
        if child is None or child._parameters or child._buffers or len(child._modules) != 1:
            return None
        inside = (*path, *child._modules)
        if type(child_of(self._module, inside)) is not nn.Conv3d or not self._is_convolution(inside):
            return None
        forward = type(child).forward
        as_is = untouched(child, type(child)) and not calls_otherwise(type(child))
        as_is = as_is and recipe_for(full_name(type(child))) is None
        return forward if as_is and isinstance(forward, FunctionType) else None

    def _drops_nothing(self, path: Path) -> bool:
        child = child_of(self._module, path)
        return type(child) is nn.Dropout and untouched(child, nn.Dropout) and child.p == 0

    def _is_projection(self, path: Path) -> bool:
        child = child_of(self._module, path)
        return hasattr(child, "in_features") or hasattr(child, "to_out")

    def _activation(self, path: Path) -> str | None:
        child = child_of(self._module, path)
        if isinstance(child, nn.GELU) and type(child) is nn.GELU:
            return "gelu" if child.approximate == "none" else "gelu_tanh"
        if isinstance(child, nn.Module):
            return _ACTIVATION_CLASSES.get(full_name(type(child)))
        # A method of the class, such as GEGLU.gelu: the proof says which activation it is.
        method = getattr(type(self._module), path[0], None) if len(path) == 1 else None
        return "any" if callable(method) and _ACTIVATION_NAME.match(path[0]) else None


def takes_patches(conv: Any) -> bool:
    """Whether a convolution sums up patches that lie side by side, all channels in each."""
    plain = conv.groups == 1 and max(conv.dilation) == 1 and conv.padding in ((0,) * len(conv.kernel_size), "valid")
    return plain and conv.kernel_size == conv.stride and "_conv_forward" not in conv.__dict__


def plain_attribute(module: nn.Module | None, name: str) -> object:
    """What an attribute is as far as branches may be decided by it; the guard of a plan asks the same again."""
    if module is None or name in _CHANGING or isinstance(getattr(type(module), name, None), property):
        return UNKNOWN
    state = module.__dict__
    for registry in ("_modules", "_parameters", "_buffers"):
        if name in state[registry]:
            value = state[registry][name]
            # Of a container, truth is its length.
            return None if value is None else (PRESENT if not hasattr(type(value), "__len__") else UNKNOWN)
    value = state[name] if name in state else getattr(type(module), name, UNKNOWN)
    return value if value is None or type(value) in (bool, int, float, str) else UNKNOWN


def settings_of(module: nn.Module) -> dict[str, object]:
    """The plain attributes of a module, by which its methods may compute one thing or another."""
    values = {name: plain_attribute(module, name) for name in module.__dict__ if not name.startswith("_")}
    return {name: value for name, value in values.items() if value is not UNKNOWN}


def settings_test(module: nn.Module) -> str:
    """Whether a norm or a GELU computes what was found, as an expression of ``child``; "" where its class says all.

    What a site reads at every call is not asked for.
    """
    if type(module) is nn.GELU:
        return f"child.approximate == {module.approximate!r}"
    if type(module) is nn.Dropout:
        return "child.p == 0"
    found, tests = norm_of(module), []
    if found is None:
        return ""
    semantics = found[1]
    dim = getattr(module, semantics.dim) if isinstance(semantics.dim, str) else None
    if isinstance(dim, int):
        tests.append(f"child.{semantics.dim} == {dim}")
    if semantics.root is not None and hasattr(module, semantics.root):
        tests.append(f"child.{semantics.root} == child.{semantics.weight}.numel() ** 0.5")
    if semantics.bias is not None and semantics.bias in module.__dict__:  # a number, and 0
        held = f"(held := child.__dict__.get({semantics.bias!r}))"
        tests.append(f"(type({held}) not in (int, float) or not held)")
    return " and ".join(tests)


def functions_of(module: nn.Module) -> tuple[Any, ...]:
    """The functions that a module holds in attributes of its own, by which activations of transformers differ."""
    return tuple(
        [
            (name, value.func, value.args, tuple(value.keywords.items()))
            if isinstance(value, functools.partial)
            else (name, getattr(value, "__func__", value))
            for name, value in module.__dict__.items()
            if callable(value) and not name.startswith("_") and name != "forward"
        ]
    )


def child_of(module: nn.Module | None, path: Path) -> nn.Module | None:
    """The submodule at a path; None if there is none."""
    current: Any = module
    for name in path:
        current = current._modules.get(name) if isinstance(current, nn.Module) else None
    found: nn.Module | None = current
    return found


def read_norm(norm: Any, semantics: NormSemantics, x: Tensor) -> dict[str, Any] | None:
    """Weight, bias and eps of a norm for an input ``x``; None where kernels cannot read them."""
    sizes = getattr(norm, semantics.dim) if type(semantics.dim) is str else None
    if isinstance(sizes, tuple) and sizes != x.shape[-1:]:
        return None  # it takes other statistics than those of the last dimension
    eps = getattr(norm, semantics.eps) if type(semantics.eps) is str else semantics.eps
    arguments: dict[str, Any] = {"eps": eps}
    if semantics.reader is not None:
        parameters = semantics.reader(norm, x)
        if parameters is None:
            return None
        weight, bias = parameters
    else:
        weight, bias = parameter_of(norm, semantics.weight), parameter_of(norm, semantics.bias)
    # Wan's norms have the number 0 where they have no bias.
    if isinstance(weight, Tensor):
        arguments["weight"] = weight
    if isinstance(bias, Tensor):
        arguments["bias"] = bias
    return arguments


def norm_of(module: nn.Module) -> tuple[str, NormSemantics] | None:
    """Over what a norm normalises, and what it computes that the ops can compute; None for any other module."""
    if full_name(type(module)) in _GROUP_NORMS:
        held = child_of(module, group_norm_path(module))
        return (GROUPS, GROUP_NORM) if type(held) is nn.GroupNorm else None
    semantics = next(filter(None, (source(module) for source in NORM_SOURCES)), None)
    if semantics is None:
        found = match(module)
        semantics = None if found is None else found.semantics
    if semantics is None or semantics.layout == "channels_last" or semantics.weight_offset:
        return None
    if semantics.op == GROUP_NORM.op:
        return GROUPS, semantics
    dim = getattr(module, semantics.dim, None) if isinstance(semantics.dim, str) else semantics.dim
    if dim is True or (type(dim) is int and dim == 1):
        return (CHANNELS, semantics) if semantics.op == "rms_norm" else None
    if semantics.clamp_eps:
        return None
    return (LAST_DIM, semantics) if dim == -1 or dim is False or (isinstance(dim, tuple) and len(dim) == 1) else None


def group_norm_path(module: nn.Module) -> Path:
    """Where a module holds the GroupNorm that computes it; empty for GroupNorm itself, and for other norms."""
    return _GROUP_NORMS.get(full_name(type(module)), ())


def frames_of(module: nn.Module) -> str:
    """Whether a group norm takes its statistics over all frames, ``"joint"``, or of ``"each"``."""
    return "each" if group_norm_path(module) and getattr(module, "num_groups", 1) == 1 else "joint"


def _name_of(path: Path) -> str:
    return next((part for part in reversed(path) if not part.isdigit()), "")
