"""Functions that forwards ask at every call for what stays the same, and their twins: the same answer, asked once.

Where a forward has nothing to fuse, these calls are what a host can save in it: Python needs 20 us for the signature of
a processor, and the frequencies of a timestep's embedding take six launches.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from diffkern.cache import memory
from diffkern.providers.dispatch_modes import functions_intercepted, modes_active, transforms_active
from diffkern.rewrite.layers import call_function, call_layer, call_module, call_processor
from diffkern.rewrite.source import LOCK, Source, recompile
from diffkern.rewrite.syntax import names_in, root_of

#: The names of twins in rewritten forwards.
_SIGNATURE, _EMBEDDING = "_signature", "_timestep_embedding"
_LAYER, _MODULE, _PROCESSOR, _FUNCTION = "_call_layer", "_call_module", "_call_processor", "_call_function"
_CALLS: Mapping[str, Callable[..., Any]] = {
    _LAYER: call_layer,
    _MODULE: call_module,
    _PROCESSOR: call_processor,
    _FUNCTION: call_function,
}
#: The name of diffusers' sinusoidal embedding of timesteps, of which several files have a copy.
_NAME = "get_timestep_embedding"

#: Signatures by function, with what they were made of.
_SIGNATURES: WeakKeyDictionary[FunctionType, tuple[tuple[Any, ...], inspect.Signature]] = WeakKeyDictionary()
_TWINS: WeakKeyDictionary[Callable[..., Any], FunctionType | None] = WeakKeyDictionary()
_SINUSOIDAL: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


def with_twins(forward: Callable[..., Any]) -> FunctionType | None:
    """The twin of a forward that asks for what stays the same; None if it does not."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or not {"signature", _NAME} & {*code.co_names}:
        return None
    twin = twin_of(forward)
    names = () if twin is None else inspect.unwrap(twin).__code__.co_freevars
    return twin if {_SIGNATURE, _EMBEDDING} & {*names} else None


def twin_of(function: Callable[..., Any]) -> FunctionType | None:
    """A function that computes the bits of ``function`` and calls twins; None if it calls nothing that has one."""
    with LOCK:
        if function not in _TWINS:
            _TWINS[function] = _made(function)
        return _TWINS[function]


def _made(function: Callable[..., Any]) -> FunctionType | None:
    source = Source.of(function)
    if isinstance(source, str) or not source.tree.args.args:
        return None
    names = put_twins(source.tree, source.function)
    changed = source.code(ast.fix_missing_locations(source.tree), names) if names else None
    return None if changed is None else recompile(source.decorated, changed, twins_in(source.function))


def twins_in(function: FunctionType) -> dict[str, Callable[..., Any]]:
    """What the names mean that :func:`put_twins` puts into a function."""
    return {**_CALLS, _SIGNATURE: signature, _EMBEDDING: TimestepEmbedding(function.__globals__)}


def with_cells(code: CodeType, function: FunctionType) -> FunctionType:
    """The function of a code that may call twins, with the globals of another one."""
    twins = twins_in(function)
    cells = tuple([CellType(twins[name]) for name in code.co_freevars])
    return FunctionType(code, function.__globals__, code.co_name, None, cells)


def put_twins(tree: ast.FunctionDef, function: FunctionType) -> set[str]:
    """Has the tree of a function call twins; returns their names."""
    namespace, arguments = function.__globals__, [argument.arg for argument in tree.args.args]
    receivers = arguments[: 2 if tree.name == "__call__" else 1]  # a processor is called with the module
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and names_in(node.iter) & {*receivers}]
    looped = names_in(*[loop.target for loop in loops])
    owner, twins = namespace.get(function.__qualname__.partition(".")[0]), set[str]()
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        called, name, first = ast.unparse(node.func), "", node.func
        if called == "inspect.signature" and namespace.get("inspect") is inspect:
            name = _SIGNATURE if len(node.args) == 1 and not node.keywords else ""
        elif called == _NAME and _is_sinusoidal(namespace.get(_NAME)):
            name, first = _EMBEDDING, ast.Name(receivers[0], ast.Load())
        elif called == f"{receivers[0]}.processor":
            name = _PROCESSOR
        elif isinstance(node.func, ast.Name) and node.func.id not in looped:
            value, given = namespace.get(called), node.args[:1]
            if isinstance(value, FunctionType) and value.__globals__ is namespace and given:
                name = _FUNCTION if isinstance(given[0], ast.Name) and given[0].id in receivers else ""
        elif _root(node.func) in {*receivers, *looped} and not hasattr(owner, called.partition(".")[2]):
            plain = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
            name = _LAYER if plain else _MODULE
        if name:
            twins.add(name)
            if name != _SIGNATURE:
                node.args.insert(0, ast.copy_location(first, node))
            node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
    return twins


def _root(node: ast.expr) -> str:
    """The variable of which an expression reads attributes and elements."""
    root = root_of(node)
    return root.id if isinstance(root, ast.Name) else ""


def signature(method: Any) -> inspect.Signature:
    """``inspect.signature(method)``, asked once for each function."""
    function = method.__func__ if type(method) is MethodType else None
    # What is in its dictionary, such as another signature or what it wraps, may change.
    if type(function) is not FunctionType or function.__dict__ or torch.compiler.is_compiling():
        return inspect.signature(method)
    parts = function.__code__, function.__defaults__, function.__kwdefaults__
    found = _SIGNATURES.get(function)
    if found is None or found[0] != parts:
        found = _SIGNATURES[function] = parts, inspect.signature(method)
    return found[1]


class TimestepEmbedding:
    """``get_timestep_embedding`` of a file, with the frequencies kept beside the module that asks.

    Args:
        namespace: The globals of the file, in which another function may have that name by the time of a call.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace, self._known = namespace, namespace.get(_NAME)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Computes what the function of that name computes."""
        function = self._namespace[_NAME]
        result = None
        if function is self._known and not (torch.compiler.is_compiling() or modes_active() or transforms_active()):
            result = None if functions_intercepted() else _embedding(module, *args, **kwargs)
        if result is None:
            result = function(*args, **kwargs)
        return result


def _embedding(
    module: nn.Module,
    timesteps: Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1,
    scale: float = 1,
    max_period: float = 10000,
) -> Tensor | None:
    r""":math:`[\sin(s\,t_i f_j), \cos(s\,t_i f_j)]` for timesteps :math:`t` and frequencies :math:`f_j = p^{-j/(h-d)}`.

    To the bits of diffusers, which orders the same operations otherwise. None where that is not sure.
    """
    numbers = embedding_dim, downscale_freq_shift, scale, max_period
    if type(timesteps) is not Tensor or timesteps.ndim != 1 or any([type(x) not in (int, float) for x in numbers]):
        return None
    if embedding_dim % 2 or timesteps.device.type not in ("cpu", "cuda"):
        return None
    if timesteps.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph may outlive what is kept
    kept = memory(module).setdefault("frequencies", {})
    key = timesteps.device, embedding_dim, downscale_freq_shift, max_period
    frequencies = kept.get(key)
    if frequencies is None:
        frequencies = kept[key] = _frequencies(*key)
    angles = timesteps.unsqueeze(1).float() * frequencies
    if scale != 1:
        angles = scale * angles
    parts = (angles.cos(), angles.sin()) if flip_sin_to_cos else (angles.sin(), angles.cos())
    return torch.cat(parts, dim=-1)


def _frequencies(device: torch.device, width: int, shift: float, period: float) -> Tensor:
    half = width // 2
    with torch.inference_mode(False), torch.no_grad():
        exponents = -math.log(period) * torch.arange(0, half, dtype=torch.float32, device=device)
        frequencies = torch.exp(exponents / (half - shift))
    if device.type == "cuda":  # another stream may read them next
        torch.cuda.current_stream(device).synchronize()
    return frequencies


#: Widths, orders, shifts and scales by which a function shows what it computes.
_PROBES = ((8, False, 1, 1), (8, True, 0, 1), (32, True, 1, 1000.0), (6, False, 0.5, 0.25))


def _is_sinusoidal(function: Any) -> bool:
    """Whether a function gives the bits of :func:`_embedding`: by its name, its arguments, and a few calls."""
    if not isinstance(function, FunctionType) or function.__closure__:
        return False
    if function not in _SINUSOIDAL:
        _SINUSOIDAL[function] = _probed(function)
    return _SINUSOIDAL[function]


def _probed(function: FunctionType) -> bool:
    arguments = inspect.signature(_embedding).parameters
    if list(inspect.signature(function).parameters) != list(arguments)[1:]:
        return False
    module = nn.Module()
    try:
        with torch.inference_mode(False), torch.no_grad():
            calls = [
                (torch.tensor(times), *probe) for times in ([0.0, 0.37, 999.0], [3, 500]) for probe in (*_PROBES, (16,))
            ]
            return all(torch.equal(function(*call), _embedding(module, *call)) for call in calls)  # type: ignore[arg-type]
    except Exception:  # of a function that takes something else
        return False
