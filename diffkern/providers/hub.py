"""Kernels of the Hub: for platforms that nothing else serves, and wherever the user names one.

A provider here is one kernel, ``"org/repo@v1:Layer"``; the name ``"hub"`` stands for the ones that
:mod:`diffkern.hub.defaults` lists, for each device and op one. An injection adds a tag to the name, for what its
configuration allows; then a call for which the kernel has no room runs in plain PyTorch, and is counted, where a
provider that is named in a call raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffkern.providers import eager
from diffkern.providers.base import KERNEL_DTYPES, Kernel, KernelFileError, Request, Support
from diffkern.providers.foreign import is_of_user, preserved, summary

if TYPE_CHECKING:
    from diffkern.hub.adapters import Adapter
    from diffkern.hub.loader import LoadedKernel
    from diffkern.hub.policy import Policy

NAME = "hub"
#: The name that, with a tag, stands for the usual order with the Hub in it.
WITH_HUB = "auto+hub"
#: Between the name of a provider and its tag: what no path can have in it.
_TAG = "\0"

#: Why the Hub does not serve unasked.
NOT_ASKED = "not asked for: pass config={'rms_norm': 'org/repo:Layer'}, say, or config=KernelConfig(hub='auto')"

_refusals_raise: contextvars.ContextVar[bool] = contextvars.ContextVar("diffkern_refusals_raise", default=False)


@contextlib.contextmanager
def refusals_raise() -> Iterator[None]:
    """Within, a call that a kernel has no room for raises: a proof is to speak of the kernel and of nothing else."""
    token = _refusals_raise.set(True)
    try:
        yield
    finally:
        _refusals_raise.reset(token)


class _Op:
    """One op of a loaded kernel on one device: who computes which pattern of arguments."""

    def __init__(self, op: str, adapters: Sequence[Adapter], device: torch.device) -> None:
        self.op = op
        self._adapters = adapters
        self._device = device
        self._reasons: dict[tuple[int, torch.dtype], Mapping[Hashable, str]] = {}
        self._given_up: dict[str, str] = {}

    def give_up(self, adapter: Adapter, reason: str) -> None:
        """Keeps an adapter from all further calls."""
        self._given_up[adapter.interface] = reason

    def refusal(self, dtypes: frozenset[torch.dtype]) -> str | None:
        """Why none of the dtypes is served in any pattern, with the measured errors, or None."""
        reasons = []
        for dtype in sorted(dtypes & KERNEL_DTYPES, key=str):
            for index, adapter in enumerate(self._adapters):
                found = self._examined(index, dtype).values()
                if self._passes(adapter, found):
                    return None
                bad = next(filter(None, found), "it takes none of its arguments")
                reasons.append(f"{adapter.interface} in {str(dtype).removeprefix('torch.')}: {bad}")
        return "; ".join(dict.fromkeys(reasons))

    def choose(self, args: Sequence[Any]) -> tuple[Adapter | None, str]:
        """The adapter that computes a call, or None and why there is none."""
        from diffkern.hub.contract import pattern

        key = None
        dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
        reason = f"the kernel has no {self.op} of this kind"
        for index, adapter in enumerate(self._adapters):
            if adapter.interface in self._given_up:
                reason = self._given_up[adapter.interface]
                continue
            refused = adapter.declines(args)
            if refused is not None:
                reason = f"{adapter.interface}: {refused}"
                continue
            reasons = self._examined(index, dtype)
            if adapter.whole and self._passes(adapter, reasons.values()):
                return adapter, ""
            key = pattern(self.op, args) if key is None else key
            bad = reasons.get(key, "never compared with such arguments")
            if not bad:
                return adapter, ""
            reason = f"{adapter.interface}: {bad}"
        return None, reason

    def _examined(self, index: int, dtype: torch.dtype) -> Mapping[Hashable, str]:
        from diffkern.hub.contract import examine

        if (index, dtype) not in self._reasons:
            adapter = self._adapters[index]
            self._reasons[index, dtype] = examine(self.op, adapter.call, adapter.declines, self._device, dtype)
        return self._reasons[index, dtype]

    @staticmethod
    def _passes(adapter: Adapter, reasons: Collection[str]) -> bool:
        return bool(reasons) and not (any if adapter.whole else all)(reasons)


@dataclass(frozen=True)
class _Loaded:
    kernel: LoadedKernel
    ops: Mapping[str, _Op]
    raised: str


class KernelProvider:
    """One kernel of the Hub or of this machine, loaded when it is first asked for something."""

    def __init__(self, name: str, reference: str, policy: Policy, falls_through: bool) -> None:
        from diffkern.hub.reference import KernelReference

        self.name = name
        self.reference = KernelReference.parse(reference)
        self.refused_calls: Counter[str] = Counter()
        self._policy = policy
        self._falls_through = falls_through
        self._lock = threading.RLock()
        self._outcomes: dict[torch.device, _Loaded | str] = {}
        support = Support(None, KERNEL_DTYPES, self._refusal)
        self.support: Mapping[str, Support] = {op: support for op in eager.PROVIDER.support}

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Returns why the kernel is not to be had for ``device``, or None. Loads it, from the Hub if need be."""
        outcome = self._outcome(device)
        return outcome if isinstance(outcome, str) else None

    def kernel(self, op: str, device: torch.device) -> Kernel:
        """Returns a callable that takes the arguments of the op, in order.

        Raises:
            RuntimeError: the kernel is not to be had, or does not serve the op.
        """
        outcome = self._outcome(device)
        if isinstance(outcome, str):
            raise RuntimeError(f"{self.reference} does not run on {device}: {outcome}")
        served, plain = outcome.ops[op], eager.PROVIDER.kernel(op, device)

        def call(*args: Any) -> Any:
            adapter, reason = served.choose(args)
            plainly = self._falls_through and not _refusals_raise.get()
            if adapter is not None:
                try:
                    return adapter.call(*args)
                except OSError as error:  # a kernel that is compiled at its first use
                    raise KernelFileError(str(error)) from error
                except Exception as error:
                    if not plainly or is_of_user(error):
                        raise
                    reason = f"{adapter.interface} failed: {summary(error)}"
            elif not plainly:
                from diffkern.providers.registry import NoProviderError

                raise NoProviderError(f"{self.reference}: {reason}")
            result = plain(*args)  # raises as well where the call is wrong, and not the kernel
            if adapter is not None:
                served.give_up(adapter, reason)
            self.refused_calls[reason] += 1
            if self.refused_calls[reason] == 1:
                warnings.warn(f"diffkern: {self.reference}: {reason}; such calls run in plain PyTorch", stacklevel=2)
            return result

        return call

    def loaded(self, device: torch.device) -> LoadedKernel | str:
        """The kernel for ``device``, or why it is not to be had."""
        outcome = self._outcome(device)
        return outcome if isinstance(outcome, str) else outcome.kernel

    def kernels(self) -> list[LoadedKernel]:
        """What was loaded, for whichever devices, each build once."""
        found = {o.kernel.directory: o.kernel for o in self._outcomes.values() if isinstance(o, _Loaded)}
        return list(found.values())

    def forget_failures(self) -> bool:
        """Makes the next question ask again where the answer was no; returns whether there was such an answer."""
        with self._lock:
            failed = [device for device, outcome in self._outcomes.items() if isinstance(outcome, str)]
            for device in failed:
                del self._outcomes[device]
            return bool(failed)

    def _refusal(self, request: Request) -> str | None:
        outcome = self._outcome(request.device)
        if isinstance(outcome, str):
            return None  # unavailable_reason says it
        served = outcome.ops.get(request.op)
        if served is None:
            raised = f" ({outcome.raised})" if outcome.raised else ""
            return f"it has no {request.op} that diffkern knows how to call{raised}"
        refused = served.refusal(request.dtypes)
        return None if refused is None else f"it is no {request.op}: {refused}"

    def _outcome(self, device: torch.device) -> _Loaded | str:
        outcome = self._outcomes.get(device)
        if outcome is None:
            with self._lock:
                outcome = self._outcomes.get(device)
                if outcome is None:
                    outcome = self._outcomes[device] = self._load(device)
        return outcome

    def _load(self, device: torch.device) -> _Loaded | str:
        from diffkern.hub.adapters import adapters
        from diffkern.hub.contract import EXAMINED
        from diffkern.hub.loader import load
        from diffkern.hub.policy import HubError

        try:
            kernel = load(self.reference, self._policy, device)
        except HubError as error:
            if self._falls_through:
                warnings.warn(f"diffkern: {error}; the next provider serves", stacklevel=2)
            return str(error)
        found, raised = adapters(kernel.module, kernel.metadata.id, self.reference.name)
        by_op = {op: [adapter for adapter in found if adapter.op == op] for op in EXAMINED}
        return _Loaded(kernel, {op: _Op(op, ways, device) for op, ways in by_op.items() if ways}, raised)


_providers: dict[str, KernelProvider] = {}
_policies: dict[str, Policy] = {}
_layers: dict[str, type[torch.nn.Module]] = {}
_register = threading.RLock()


def is_kernel(name: str) -> bool:
    """Whether the name of a provider stands for the Hub or for one kernel."""
    return is_ours_to_choose(name) or "/" in name or name.startswith("~")


def is_ours_to_choose(name: str) -> bool:
    """Whether a name, with or without a tag, leaves it to diffkern which kernels of the Hub serve."""
    return public_name(name) in (NAME, WITH_HUB)


def public_name(name: str) -> str:
    """The name of a provider without the tag."""
    return name.partition(_TAG)[0]


def listed(name: str, op: str, device: torch.device) -> tuple[str, str | None]:
    """The provider that ``"hub"`` stands for, with the tag of ``name``, or why there is none; else ``name``."""
    if public_name(name) != NAME:
        return name, None
    from diffkern.hub.defaults import DEFAULTS
    from diffkern.hub.rule import device_name

    where = device_name(device.type)
    kernel = DEFAULTS.get(where, {}).get(op)
    if kernel is None:
        return name, f"no kernel is known for {op} on {where}: name one in the configuration"
    return kernel + name.removeprefix(NAME), None


def tagged(name: str, policy: Policy) -> str:
    """The name of a provider as an injection with this policy uses it."""
    with _register:
        tag = next((tag for tag, known in _policies.items() if known == policy), None)
        if tag is None:
            tag = f"{_TAG}{len(_policies) + 1}"
            _policies[tag] = policy
        return f"{name}{tag}"


def provider_for(name: str) -> KernelProvider:
    """Returns the provider for a reference, with or without a tag. Loads nothing yet.

    Raises:
        ValueError: it is no reference.
    """
    with _register:
        if name not in _providers:
            from diffkern.hub.policy import Policy

            reference = public_name(name)
            policy = _policies.get(name.removeprefix(reference))
            falls_through = policy is not None and not policy.strict
            _providers[name] = KernelProvider(name, reference, policy or Policy(), falls_through)
        return _providers[name]


def loaded_kernels(policy: Policy) -> list[LoadedKernel]:
    """The kernels that were loaded under a policy."""
    with _register:
        tag = next((tag for tag, known in _policies.items() if known == policy), None)
        known = [provider for name, provider in _providers.items() if tag and name.endswith(tag)]
    return [kernel for provider in known for kernel in provider.kernels()]


def layer_for(name: str, device: torch.device) -> type[torch.nn.Module]:
    """Returns the layer that a provider's reference names, for ``device``.

    ``torch.compile`` can trace this once the layer was found.

    Raises:
        NoProviderError: the kernel is not to be had, or has no such layer.
    """
    key = f"{name} {device.type}"
    return _layers[key] if key in _layers else _find_layer(name, device, key)


def _find_layer(name: str, device: torch.device, key: str) -> type[torch.nn.Module]:
    from diffkern.hub.adapters import layer_names, layer_of
    from diffkern.providers.registry import NoProviderError

    if is_ours_to_choose(name):
        raise NoProviderError(f"{public_name(name)}: it names no layer")
    kernel = provider_for(name).loaded(device)
    if isinstance(kernel, str):
        raise NoProviderError(f"{public_name(name)}: {kernel}")
    try:
        with preserved(device):
            layer = layer_of(kernel.module, kernel.reference.name)
            there = "" if layer is not None else ", ".join(layer_names(kernel.module)) or "none"
    except BaseException as error:
        if is_of_user(error):
            raise
        raise NoProviderError(f"{public_name(name)}: looking for its layer raised {summary(error)}") from error
    if layer is None:
        raise NoProviderError(f"{public_name(name)}: it has no such layer; its layers: {there}")
    if not callable(layer.forward):
        raise NoProviderError(f"{public_name(name)}: its forward is {layer.forward!r}, and no function")
    _layers[key] = layer
    return layer


def forget_failures() -> None:
    """Makes kernels that could not be had be asked for again, once."""
    from diffkern.providers import registry

    with _register:
        known = list(_providers.values())
    if any([provider.forget_failures() for provider in known]):
        registry.reset()
