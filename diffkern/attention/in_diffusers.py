"""Routes in diffusers: a backend of its dispatcher for each model, named by the processors of that model alone.

``model.set_attention_backend`` also sets the backend of the whole process, and ``reset_attention_backend`` does not
take that back; here nothing but the processors is touched, and each gets back exactly what it had.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from diffkern.attention.call import AttentionCall
from diffkern.attention.route import REPLACED, Route
from diffkern.providers.eager.attention_fp8 import Unrotated

ATTRIBUTE = "_attention_backend"

#: Arguments of the dispatcher that a call has room for.
_KNOWN = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}

#: What processors had before they were routed, by the value of the backend that they have now.
_before: dict[str, Any] = {}
_numbers = itertools.count()
#: Places in diffusers' registry that no route has any more, and what guards them; garbage is collected anywhere.
_free: list[str] = []
_lock = threading.RLock()
_MISSING = object()


def processors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields the path, the module and the processor of every attention of diffusers in ``model``."""
    for path, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is not None and type(module).__module__.startswith("diffusers."):
            yield path, module, processor


def refusal(processor: Any) -> str | None:
    """Says why a processor cannot be routed, or None."""
    if not hasattr(processor, ATTRIBUTE):
        return f"its {type(processor).__name__} calls PyTorch's attention itself, and asks no dispatcher"
    if getattr(type(processor), ATTRIBUTE, None) is not None:
        return f"its {type(processor).__name__} works with one backend only"
    if is_routed(processor):
        return "already patched by diffkern"
    return None


def is_routed(processor: Any) -> bool:
    """Whether a processor runs on a route."""
    return getattr(vars(processor).get(ATTRIBUTE), "name", None) in _before


def install(model: nn.Module, route: Route) -> Callable[[], int]:
    """Puts the processors of a model on a route; returns what gives them back what they had, see :func:`restore`."""
    routed: list[weakref.ref[Any]] = []
    groups: dict[Any, list[Any]] = {}
    for _, _, processor in processors(model):
        if refusal(processor) is None:
            groups.setdefault(vars(processor).get(ATTRIBUTE, _MISSING), []).append(processor)
    for before, members in groups.items():
        member = _register(route, before)
        for processor in members:
            setattr(processor, ATTRIBUTE, member)
            routed.append(weakref.ref(processor))
    return lambda: restore(processor for kept in routed if (processor := kept()) is not None)


def restore(routed: Iterable[Any]) -> int:
    """Gives processors of one model back what they had; returns 1 if any of them had a route."""
    restored = 0
    for processor in filter(is_routed, routed):
        before = _before[vars(processor)[ATTRIBUTE].name]
        if before is _MISSING:
            delattr(processor, ATTRIBUTE)
        else:
            setattr(processor, ATTRIBUTE, before)
        restored = 1
    return restored


def _register(route: Route, before: Any) -> Any:
    """Adds a backend to diffusers' registry that asks ``route``, and returns its name as the dispatcher wants it.

    The dispatcher takes members of an enumeration only; ``torch.compile`` sees a constant. The registry knows this one
    by its value, a string that is equal to it, and forgets its route with the last processor, or copy of one, that
    names it. Its place is kept for the next route: the guards of ``torch.compile`` count places.
    """
    from diffusers.models import attention_dispatch as dispatch

    registry, names = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName
    every = set().union(*registry._supported_arg_names.values())
    at_injection = {str(name.value): f for name, f in registry._backends.items() if isinstance(name, names)}

    def attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        name = registry._active_backend if before is _MISSING or before is None else names(before)
        function, known = registry._backends[name], registry._supported_arg_names[name]

        mask = per_key = arguments.get("attn_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and tuple(mask.shape) == (query.shape[0], key.shape[1]):
            per_key = mask[:, None, None]  # a row of keys for each sample
        dropout, causal = arguments.get("dropout_p", 0.0), arguments.get("is_causal", False)
        call = AttentionCall(query, key, value, per_key, dropout, causal, arguments.get("scale"))

        def stock(call: AttentionCall) -> Tensor:
            ours = {
                "attn_mask": mask if call.mask is per_key else call.mask,
                "dropout_p": call.dropout,
                "is_causal": call.causal,
                "scale": call.scale,
            }
            given = {key: value for key, value in {**arguments, **ours}.items() if key in known}
            result: Tensor = function(query=call.query, key=call.key, value=call.value, **given)
            return result

        if function is not at_injection.get(name.value):
            return route.decline(REPLACED, call, stock)
        foreign = next((key for key, value in arguments.items() if key not in _KNOWN and value), None)
        if foreign is not None:
            return route.decline(f"the call has a {foreign.strip('_')}", call, stock)
        return route(call, stock)

    def attend_unrotated(
        called: Any, x: Unrotated, value: Tensor, *masks: Any, backend: Any = None, scale: float | None = None,
        **arguments: Any,
    ) -> Tensor | None:  # fmt: skip
        """``called(query, key, value, *masks, ...)`` of what becomes both, if it is a plain call; or None."""
        name = registry._active_backend if before is _MISSING or before is None else names(before)
        same = registry._backends[name] is at_injection.get(name.value) and backend == member_name
        watched = getattr(called, "__globals__", None) is not vars(dispatch) or hasattr(called, "__wrapped__")
        given = [value for value in (*masks, *arguments.values()) if isinstance(value, Tensor) or value]
        return route.attend_unrotated(x, value, scale) if same and not watched and not given else None

    with _lock:
        value = _free.pop() if _free else f"diffkern_{next(_numbers)}"
    member = str.__new__(names, value)
    member._name_, member._value_ = value, value
    member_name, member.attend_unrotated = value, attend_unrotated
    kept = weakref.ref(member)
    member.__deepcopy__ = lambda memo: kept()  # not at all, so that copies of a model share its route
    member.__reduce_ex__ = _reduces_to(before)
    registry.register(value)(attention)
    registry._supported_arg_names[value] = every
    _before[value] = before
    weakref.finalize(member, _forget, value)
    return member


def _forget(value: str) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    with _lock:
        del _before[value]
        registry._backends[value] = None
        _free.append(value)


def _reduces_to(before: Any) -> Callable[[int], Any]:
    """How a member is pickled: as what was there before it, which any process knows, with diffkern or without."""
    if before is _MISSING or before is None:
        return lambda protocol: (type(None), ())
    return lambda protocol: (type(before), (getattr(before, "value", before),))
