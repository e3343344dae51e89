"""The call of a site for operands of one kind, as straight-line code: views of the leaves, and the kernels.

To choose views, arguments and kernels takes the host three times as long as small kernels run. All of it follows from
the shapes, strides and dtypes of the leaves, and from what the norms of the site hold. So a call is recorded, and
written as a function that checks these and calls the kernels. A call that writes into a tensor, takes a number from
one, or reads what the function cannot check, has no such function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from diffkern.cache.in_call import once_in_call, recorded_by
from diffkern.providers import registry, select
from diffkern.rewrite.facts import LAST_DIM, child_of
from diffkern.rewrite.rotation import tensors_in
from diffkern.rewrite.signature import PLAIN

if TYPE_CHECKING:
    from diffkern.rewrite.site import FusedSite

#: What a specialised call returns for leaves that it is not for.
OTHER = object()
#: Ops that read nothing of a module but its norms.
_OPS = frozenset({"norm_modulate", "gate_residual", "gate_residual_norm_modulate", "glu", "qk_norm_rope"})
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype)


class Recorder(TorchDispatchMode):
    """Records the ops that run inside, with their arguments and results, and what is computed once in a model call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._recorded = recorded_by(self._once)

    @override
    def __enter__(self) -> Recorder:
        self._recorded.__enter__()
        super().__enter__()
        return self

    @override
    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._recorded.__exit__(*raised)

    def _once(self, *given: Any) -> Any:
        before = len(self.calls)
        with recorded_by(None):
            result = once_in_call(*given)
        self.calls[before:] = [(once_in_call, given, {}, result)]
        return result

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class _Unknown(Exception):
    """Something that cannot be checked or written."""


class Specialized(NamedTuple):
    """A recorded call.

    Attributes:
        call: A function of a module and leaves; returns :data:`OTHER` for those that it is not for.
        quick: Makes a function that stands in the place of the site: it counts, and calls what it is given for others.
    """

    call: Callable[..., Any]
    quick: Callable[[Callable[..., Any]], Callable[..., Any]]


#: What every quick function asks before it looks at its leaves.
_ASKED = "asked() or traced()"
_NAMES: dict[str, Any] = {
    "OTHER": OTHER,
    "PLAIN": PLAIN,
    "asked": torch.is_grad_enabled,
    "traced": torch.compiler.is_dynamo_compiling,
    "transformed": torch._C._are_functorch_transforms_active,
    "levels": forward_ad,
    "overridden": registry.override,
    "registry": registry,
}


def specialized(
    site: FusedSite, module: nn.Module, leaves: tuple[Any, ...], recorded: Recorder, result: Any
) -> Specialized | None:
    """Returns functions of a module and leaves that compute a recorded call of a site; None if there are none.

    They are not for leaves of other shapes, strides, dtypes or devices, nor for a module whose norms hold something
    else. What hooks and replaced modules change is for the guard to see.
    """
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if site.plan.rule.op not in _OPS or first is None or first.device.type not in ("cpu", "cuda"):
        return None
    kernel = select(site.plan.rule.op, first.device, (first.dtype,), site.provider).kernel
    if not isinstance(kernel, OpOverload):
        return None
    try:
        writer = _Writer(first, kernel.namespace)
        for i, leaf in enumerate(leaves):
            writer.leaf(f"x{i}", leaf)
        for i, (path, semantics) in enumerate(site.norms_read):
            if semantics.reader is not None or site.over != LAST_DIM:
                return None
            writer.norm(f"n{i}", module, path, semantics)
        for call in recorded.calls:
            writer.call(*call)
        function = writer.function(len(leaves), result)
        return Specialized(function, lambda otherwise: writer.quick(site, otherwise))
    except _Unknown:
        return None


def idle(site: FusedSite, leaves: tuple[Any, ...], reason: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that evaluates the expression of a site for leaves of a size at which its op gains nothing.

    It counts that, and calls ``otherwise`` for other leaves.
    """
    arguments, x, leaf = _arguments(len(leaves)), f"x{site.sized}", leaves[site.sized]
    values = {"shape": leaf.shape, "dtype": leaf.dtype, "device": leaf.device, "dense": leaf.is_contiguous()}
    values |= {"site": site, "original": site.original, "otherwise": otherwise, "reason": reason}
    kind = f"{x}.shape == shape and {x}.dtype is dtype and {x}.device == device and {x}.is_contiguous() is dense"
    lines = [
        *_for_others(f"{_ASKED} or not (type({x}) in PLAIN and {kind})", site, f"return otherwise({arguments})"),
        "site.idle_calls += 1",
        "site.original_calls += 1",
        "if site.observer is not None: site.observer(module, reason)",
        f"return original({arguments})",
    ]
    return _written_function("quick", arguments, lines, values)


def _for_others(test: str, site: FusedSite, other: str) -> list[str]:
    asked = f"{test} or {site.not_quick}" if site.not_quick else test
    return [f"try: others = {asked}", "except RuntimeError: others = True", f"if others: {other}"]  # of no shape


def _arguments(leaves: int) -> str:
    return ", ".join(["module", *[f"x{i}" for i in range(leaves)]])


def _written_function(name: str, arguments: str, lines: list[str], values: Mapping[str, Any]) -> Callable[..., Any]:
    text = f"def {name}({arguments}):\n    " + "\n    ".join(lines)
    namespace = {**values, **_NAMES}
    exec(compile(text, "<specialised call of a site>", "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


class _Writer:
    """Writes the function line by line. A tensor is known by its object: two leaves may share their memory."""

    def __init__(self, first: Tensor, namespace: str) -> None:
        self._device, self._namespace = first.device, namespace
        self._checks: list[str] = []
        self._reads: list[str] = []
        self._steps: list[str] = []
        self._values: dict[str, Any] = {}
        #: The variable of each tensor, and for a view the tensor that it is one of.
        self._names: dict[int, str] = {}
        self._roots: dict[int, Tensor] = {}

    def constant(self, value: Any) -> str:
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name

    def leaf(self, name: str, leaf: Any) -> None:
        if type(leaf) in (tuple, list):
            self._checks.append(f"type({name}) is {type(leaf).__name__} and len({name}) == {len(leaf)}")
            for i, part in enumerate(leaf):
                self.leaf(f"{name}[{i}]", part)
        elif id(leaf) in self._names:
            self._checks.append(f"{name} is {self._names[id(leaf)]}")
        elif type(leaf) in PLAIN:
            self._names[id(leaf)] = name
            self._check_kind(leaf, name, leaf.device)  # tables may be on the CPU
            self._checks.append(
                f"{name}.shape == {self.constant(leaf.shape)} and {name}.stride() == {self.constant(leaf.stride())}"
            )
        elif type(leaf) in _CONSTANTS:
            self._checks.append(f"type({name}) is {self.constant(type(leaf))} and {name} == {self.constant(leaf)}")
        else:
            raise _Unknown

    def norm(self, name: str, module: nn.Module, path: tuple[str, ...], semantics: Any) -> None:
        norm = child_of(module, path)
        if norm is None:
            raise _Unknown
        self._reads.append(f"{name} = module" + "".join([f"._modules[{part!r}]" for part in path]))
        if type(semantics.eps) is str:
            eps = getattr(norm, semantics.eps)
            self._reads.append(f"if {name}.{semantics.eps} != {self.constant(eps)}: return OTHER")
        if type(semantics.dim) is str:
            dim = self.constant(getattr(norm, semantics.dim))
            self._reads.append(f"if {name}.{semantics.dim} != {dim}: return OTHER")
        for which in filter(None, (semantics.weight, semantics.bias)):
            # Wan's norms have the number 0 where they have no bias.
            if which not in norm._parameters or which in norm.__dict__:
                if type(getattr(norm, which, None)) not in _CONSTANTS:
                    raise _Unknown
                held = self.constant(getattr(norm, which, OTHER))
                self._reads.append(f"if {name}.__dict__.get({which!r}, OTHER) != {held}: return OTHER")
                self._reads.append(f"if {which!r} in {name}._parameters: return OTHER")
                continue
            value, variable = norm._parameters[which], f"{name}_{which}"
            self._reads.append(f"if {which!r} in {name}.__dict__: return OTHER")  # which hides the parameter
            self._reads.append(f"{variable} = {name}._parameters[{which!r}]")
            if value is None:
                self._reads.append(f"if {variable} is not None: return OTHER")
                continue
            if id(value) in self._names:
                self._reads.append(f"if {variable} is not {self._names[id(value)]}: return OTHER")
                continue
            self._names[id(value)] = variable
            checks, self._checks = self._checks, []
            self._check_kind(value, variable, self._device)
            self._reads.append(f"if not ({' and '.join(self._checks)}): return OTHER")
            self._checks = checks

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if func is once_in_call:
            self._step(func, args, kwargs, result)
            return
        if func._schema.is_mutable or (func.namespace not in ("aten", "prims") and func.namespace != self._namespace):
            raise _Unknown
        of, results = tensors_in((args, tuple(kwargs.values()))), tensors_in(result)
        if not of and not results:
            return  # of dtypes and sizes
        if not results or len(results) != (1 if isinstance(result, Tensor) else len(result)):
            raise _Unknown  # a value of the data
        root = self._roots.get(id(of[0]), of[0]) if of else None
        # In inference mode reshape comes here as it is called: a view by its schema, at times a copy.
        if func.is_view and root is not None and all([_is_view(result, root) for result in results]):
            self._roots.update({id(view): root for view in results})
            return
        self._step(func._op, args, kwargs, result)

    def _step(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        results = tensors_in(result)
        arguments = [self._written(one) for one in args]
        arguments += [f"{name}={self._written(one)}" for name, one in kwargs.items()]
        names = [f"y{len(self._steps)}_{i}" for i in range(len(results))]
        self._names.update({id(tensor): name for name, tensor in zip(names, results, strict=True)})
        targets = names[0] if isinstance(result, Tensor) else f"({', '.join(names)},)"
        self._steps.append(f"{targets} = {self.constant(function)}({', '.join(arguments)})")

    def function(self, leaves: int, result: Any) -> Callable[..., Any]:
        self._arguments, self._result = _arguments(leaves), self._written(result)
        lines = [f"if not ({' and '.join(self._checks)}): return OTHER", *self._reads, *self._steps]
        return _written_function("call", self._arguments, [*lines, f"return {self._result}"], self._values)

    def quick(self, site: FusedSite, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """The same as what a forward calls, with all that a site asks before it: see :class:`Specialized`."""
        other, checks = f"return otherwise({self._arguments})", " and ".join(self._checks)
        asked = f"{_ASKED} or transformed() or levels._current_level >= 0 or overridden() is not None or site.room"
        lines = [
            *_for_others(f"{asked} or registry.resets != resets or not ({checks})", site, other),
            "try:",
            *[f" {line.replace('return OTHER', other)}" for line in (*self._reads, *self._steps)],
            f" result = {self._result}",
            f"except (RuntimeError, KeyError): {other}",  # which says what is wrong, or finds the parameter elsewhere
            "site.fused_calls += 1",
            "if site.observer is not None: site.observer(module, None)",
            "return result",
        ]
        values = {**self._values, "site": site, "otherwise": otherwise, "resets": registry.resets}
        return _written_function("quick", self._arguments, lines, values)

    def _check_kind(self, tensor: Tensor, name: str, device: torch.device) -> None:
        if tensor.device != device:
            raise _Unknown
        place = f"{name}.is_cpu" if device.type == "cpu" else f"{name}.device == {self.constant(device)}"
        self._checks.append(f"type({name}) in PLAIN and {place} and {name}.dtype is {self.constant(tensor.dtype)}")

    def _written(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            parts = "".join([f"{self._written(part)}, " for part in value])
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        return self.constant(value)

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        root = self._roots.get(id(tensor))
        if root is None:
            raise _Unknown
        name = self._written(root)
        shift = tensor.storage_offset() - root.storage_offset()
        if not shift and tensor.shape == root.shape and tensor.stride() == root.stride():
            return name
        if name[0] == "n":
            raise _Unknown  # the strides of parameters are not checked
        shape, stride = self.constant(tuple(tensor.shape)), self.constant(tensor.stride())
        variable = f"v{len(self._steps)}"
        # What a step returns may lie in the memory of a leaf as well: view_as_real, say.
        self._steps.append(f"{variable} = {name}.as_strided({shape}, {stride}, {name}.storage_offset() + {shift})")
        self._names[id(tensor)] = variable
        return variable


def _is_view(tensor: Tensor, root: Tensor) -> bool:
    same = tensor.untyped_storage()._cdata == root.untyped_storage()._cdata
    return same and tensor.dtype is root.dtype
