"""Routes in diffusers: a backend of its dispatcher for each model, named by the processors of that model alone.

``model.set_attention_backend`` also sets the backend of the whole process, and ``reset_attention_backend`` does not
take that back; here nothing but the processors is touched, and each gets back exactly what it had.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from diffkern.attention.call import AttentionCall
from diffkern.attention.route import Route

ATTRIBUTE = "_attention_backend"

#: Arguments of the dispatcher that a call has room for.
_KNOWN = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}

#: Routed backends and what was there before them, by the name of the member; copies of a model find theirs here.
_before: dict[str, Any] = {}
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


class Installation:
    """The processors of one model on a route: what :meth:`restore` takes back."""

    def __init__(self, model: nn.Module, route: Route) -> None:
        self.member: Any = None
        self.routed: list[Any] = []
        groups: dict[Any, list[Any]] = {}
        for _, _, processor in processors(model):
            if refusal(processor) is None:
                groups.setdefault(vars(processor).get(ATTRIBUTE, _MISSING), []).append(processor)
        for before, members in groups.items():
            member = _register(route, before)
            for processor in members:
                setattr(processor, ATTRIBUTE, member)
                self.routed.append(processor)

    def restore(self) -> int:
        """Gives the processors back what they had; returns 1 if any of them still had the route."""
        return restore(self.routed)


def restore(routed: Iterable[Any]) -> int:
    """Gives processors of one model back what they had; returns 1 if any of them had a route."""
    return int(any([_restore(processor) for processor in routed]))


def _restore(processor: Any) -> bool:
    """Gives one processor back what it had before it was routed; returns whether it was."""
    if not is_routed(processor):
        return False
    before = _before[vars(processor)[ATTRIBUTE].name]
    if before is _MISSING:
        delattr(processor, ATTRIBUTE)
    else:
        setattr(processor, ATTRIBUTE, before)
    return True


def _register(route: Route, before: Any) -> Any:
    """Adds a backend to diffusers' registry that asks ``route``, and returns its name as the dispatcher wants it.

    The dispatcher takes members of an enumeration only. Extending that is what makes copies of a model work, and
    ``torch.compile``, which sees a constant.
    """
    from diffusers.models import attention_dispatch as dispatch

    registry, names = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName
    every = set().union(*registry._supported_arg_names.values())

    def attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        name = registry._active_backend if before is _MISSING or before is None else names(before)
        function, known = registry._backends[name], registry._supported_arg_names[name]

        mask = wide = arguments.get("attn_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and tuple(mask.shape) == (query.shape[0], key.shape[1]):
            wide = mask[:, None, None]  # a row of keys for each sample
        dropout, causal = arguments.get("dropout_p", 0.0), arguments.get("is_causal", False)
        call = AttentionCall(query, key, value, wide, dropout, causal, arguments.get("scale"))

        def stock(call: AttentionCall) -> Tensor:
            ours = {
                "attn_mask": mask if call.mask is wide else call.mask,
                "dropout_p": call.dropout,
                "is_causal": call.causal,
                "scale": call.scale,
            }
            given = {key: value for key, value in {**arguments, **ours}.items() if key in known}
            result: Tensor = function(query=call.query, key=call.key, value=call.value, **given)
            return result

        foreign = next((key for key, value in arguments.items() if key not in _KNOWN and value), None)
        if foreign is not None:
            return route.decline(f"the call has a {foreign.strip('_')}", call, stock)
        return route(call, stock)

    value = f"diffkern_{len(_before)}"
    member = str.__new__(names, value)
    member._name_, member._value_ = value, value
    names._value2member_map_[value] = member
    registry.register(member)(attention)
    registry._supported_arg_names[member] = every
    _before[value] = before
    copyreg.pickle(names, _reduce)
    return member


def _reduce(member: Any) -> tuple[Any, ...]:
    """How copies and pickles write a name of diffusers' enumeration."""
    if member.name not in _before:
        return type(member), (member.value,)
    before = _before[member.name]
    return _resolve, (member.value, None if before is _MISSING else before)


def _resolve(value: str, before: Any) -> Any:
    """The route of that name; in another process there is none, and what was there before it comes back."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    return AttentionBackendName(value) if value in _before else before
