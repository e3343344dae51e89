"""Where a module's forward lives once accelerate or diffusers have put hooks around it.

Both libraries replace the instance's ``forward`` by a wrapper and keep the function they wrapped:
accelerate in ``module._old_forward``, diffusers in the ``HookFunctionReference`` objects of
``module._diffusers_hook``. A patch on ``module.forward`` over such a wrapper would bypass the hook, and
would be lost when the hook goes. So a patch goes into every place that holds the *innermost* function,
and comes out of every such place, wherever hooks were added or removed in between.

Nothing here imports accelerate or diffusers: their attributes are read where they are found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Slot:
    """One attribute that holds a forward: ``getattr(owner, name)``."""

    owner: Any
    name: str

    @property
    def forward(self) -> Forward | None:
        """The function held, or None."""
        found: Forward | None = self.owner.__dict__.get(self.name)
        return found

    def put(self, forward: Forward) -> None:
        """Replaces the function held."""
        # nn.Module.__setattr__ has nothing to add for a plain callable, so all owners are treated alike.
        object.__setattr__(self.owner, self.name, forward)


def slots(module: nn.Module) -> Iterator[Slot]:
    """Yields every place from which a forward of ``module`` is called, its class excepted."""
    candidates = [Slot(module, "forward"), Slot(module, "_old_forward")]
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        candidates += [Slot(reference, "forward"), Slot(reference, "original_forward")]
    yield from (slot for slot in candidates if slot.forward is not None)


def _wrapped(module: nn.Module) -> Iterator[Slot]:
    """Yields, the outermost first, what wrappers made with functools.update_wrapper say that they wrap.

    Nothing is called from there; it is what ``inspect`` shows. What the decorators of a class say of its own forward,
    which shows through the bound method, is none of it.
    """
    for slot in slots(module):
        forward = slot.forward
        while not isinstance(forward, MethodType) and "__wrapped__" in getattr(forward, "__dict__", {}):
            inner = Slot(forward, "__wrapped__")
            yield inner
            forward = inner.forward


def is_bound(forward: Forward | None, function: Forward, module: nn.Module) -> bool:
    """Whether ``forward`` is ``function`` as a method of ``module``."""
    return isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is function


def foreign_forward(module: nn.Module) -> str | None:
    """Says who replaced the forward of ``module``, or returns None if it still ends in the class's own."""
    if "forward" not in module.__dict__:
        return None
    if any(is_bound(slot.forward, type(module).forward, module) for slot in slots(module)):
        return None
    forward = module.__dict__["forward"]
    function = getattr(forward, "func", getattr(forward, "__func__", forward))
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    return f"its forward was replaced by {name}, which diffkern does not know"


def replace(module: nn.Module, old: Forward, new: MethodType) -> int:
    """Replaces function ``old``, bound to ``module``, in every slot that holds it; returns how many did."""
    holders = [slot for slot in slots(module) if is_bound(slot.forward, old, module)]
    for slot in holders:
        slot.put(new)
    if holders:
        for slot in _wrapped(module):
            if is_bound(slot.forward, old, module):
                slot.put(new)
        # Wrappers also carry name and module of what they wrap: tell them again, from the inside out.
        for slot in reversed(list(_wrapped(module))):
            if slot.forward is not None:
                functools.update_wrapper(slot.owner, slot.forward)
    return len(holders)
