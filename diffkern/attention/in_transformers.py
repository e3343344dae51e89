"""Routes in transformers: an attention implementation for each model, named by the configurations of that model."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from diffkern.attention.call import AttentionCall
from diffkern.attention.route import REPLACED, Route

#: The implementation whose masks and meaning of ``is_causal`` the routes share.
STOCK = "sdpa"
_PREFIX = "diffkern_"
_ATTRIBUTE = "_attn_implementation_internal"
_numbers = itertools.count()

#: Arguments of an attention implementation that need something else than softmax(QK)V.
_BEYOND = ("position_bias", "softcap", "s_aux", "output_attentions")

#: A model that asks what its attention is called takes another way for a name that it does not know.
_ASKS = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)")


def models(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields every model of transformers in ``root`` with a configuration of its own, and its path."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    seen: set[int] = set()
    for path, module in root.named_modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield path, module


def refusal(model: Any) -> str | None:
    """Says why a model cannot be routed, or None."""
    used = getattr(model.config, _ATTRIBUTE, None)
    if used is not None and used.startswith(_PREFIX):
        return "already patched by diffkern"
    if used != STOCK:
        return f"runs with attn_implementation={used!r}, whose masks are of another form: choose {STOCK!r} first"
    asks = getattr(type(model), "_can_set_attn_implementation", None)
    if asks is None or not asks():
        return "its class does not choose its attention by name"
    if importlib.util.find_spec("transformers.masking_utils") is None:
        return "this transformers chooses no masks by the name of an attention: update it"
    try:
        source = inspect.getsource(sys.modules[type(model).__module__])
    except (KeyError, OSError, TypeError):
        return "its code cannot be read, and may ask for its attention by name"
    if _ASKS.search(source):
        return "its code asks for its attention by name, and would not know this one"
    return None


class _Name(str):
    """The name of a route. Copies of a configuration share it; what is pickled names the stock attention."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Name:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return str, (STOCK,)


def install(model: Any, route: Route) -> Callable[[], int]:
    """Puts the configuration of a model on a route; returns what takes it off, and says how many still had it."""
    name = _register(route)
    kept, key = weakref.ref(model.config), str(name)
    setattr(model.config, _ATTRIBUTE, name)

    def undo() -> int:
        config = kept()
        return int(getattr(config, _ATTRIBUTE, None) == key and restore_config(config))

    return undo


def restore_config(config: Any) -> bool:
    """Gives a configuration back what it had before it was routed; returns whether it was."""
    used = getattr(config, _ATTRIBUTE, None)
    if used is None or not used.startswith(_PREFIX):
        return False
    setattr(config, _ATTRIBUTE, STOCK)
    return True


def _register(route: Route) -> str:
    """Adds an attention implementation that asks ``route``, and returns its name.

    transformers forgets it with the last configuration, or copy of one, that names it.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    at_injection = ALL_ATTENTION_FUNCTIONS[STOCK]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = attention_mask is None and causal and query.shape[2] > 1
        keys = query.shape[2] if causal and key.shape[2] > query.shape[2] else key.shape[2]
        call = AttentionCall(
            query.transpose(1, 2),
            key[:, :, :keys].transpose(1, 2),
            value[:, :, :keys].transpose(1, 2),
            attention_mask,
            dropout,
            causal,
            scaling,
        )

        sdpa = ALL_ATTENTION_FUNCTIONS[STOCK]

        def stock(call: AttentionCall) -> Tensor:
            tensors = [x.transpose(1, 2) for x in (call.query, call.key, call.value)]
            result: Tensor = sdpa(
                module, *tensors, call.mask, call.dropout, call.scale, is_causal=call.causal, **others
            )[0]
            return result

        if sdpa is not at_injection:
            return route.decline(REPLACED, call, stock), None
        beyond = next((name for name in _BEYOND if others.get(name) is not None and others[name] is not False), None)
        if beyond is not None:
            return route.decline(f"the call has a {beyond}", call, stock), None
        return route(call, stock).contiguous(), None

    def mask(*args: Any, **kwargs: Any) -> Any:
        return ALL_MASK_ATTENTION_FUNCTIONS[STOCK](*args, **kwargs)

    name = _Name(f"{_PREFIX}{next(_numbers)}")
    key = str(name)
    for interface, function in ((ALL_ATTENTION_FUNCTIONS, attention), (ALL_MASK_ATTENTION_FUNCTIONS, mask)):
        interface.register(key, function)
        weakref.finalize(name, interface._global_mapping.pop, key, None)
    return name
