"""From what a configuration says of a module to the ways it can be computed, the preferred first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from diffkern.hub import KernelConfig
from diffkern.hub.policy import Policy
from diffkern.hub.reference import KernelReference, is_reference
from diffkern.hub.rule import Rule
from diffkern.injection.layer_fusion import LayerFusion
from diffkern.injection.state import STOCK
from diffkern.providers import hub
from diffkern.verify.fusion import Fusion


@dataclass(frozen=True)
class Option:
    """One way: what is computed, by whom, and how that is known (see :class:`diffkern.injection.report.Site`)."""

    fusion: Fusion
    rule: Rule
    how: str | None

    @property
    def names_kernel(self) -> bool:
        """Whether the configuration names a kernel of the Hub, for whichever device or mode."""
        choices = (choice for choice in self.rule.choices() if choice and hub.is_kernel(choice))
        return any(not choice.startswith(hub.WITH_HUB) for choice in choices)


class KernelSelector:
    """Turns the choices of a configuration into providers; if strict, kernels that cannot be had are errors."""

    def __init__(self, config: KernelConfig, strict: bool) -> None:
        self._policy = Policy(config.trust_remote_code, config.lock, strict)
        self._automatic = hub.tagged(hub.WITH_HUB, self._policy) if config.hub == "auto" else None
        if config.hub == "auto" or config.references():
            hub.forget_failures()

    def options(self, rule: Rule | None, fusion: Fusion | None, how: str | None) -> list[Option]:
        """Lists the ways to compute a module; none if it is left alone, or no provider can.

        The rule is what the configuration says of it, the fusion what is known of it, and ``how``.
        """
        named = [choice for choice in rule.choices() if choice and is_reference(choice)] if rule else []
        layers = [name for choice in named if (name := KernelReference.parse(choice).name)]
        served = self.served(rule or Rule())
        options = []
        # A layer that is a norm serves the op, on modules of any class; any other stands in for the module.
        serves_op = fusion is not None and (not layers or fusion.takes_layers)
        if fusion is not None and serves_op and any(choice != STOCK for choice in served.choices()):
            options.append(Option(fusion, served, how))
        if layers:
            options.append(Option(LayerFusion(served, layers[0]), served, "config"))
        if fusion is not None and options and any(choice and hub.is_kernel(choice) for choice in served.choices()):
            # What the Hub cannot give, or gives wrong, the next provider serves.
            without = served.map(lambda choice: None if choice and hub.is_kernel(choice) else choice)
            options.append(Option(fusion, without, how))
        return options

    def served(self, rule: Rule) -> Rule:
        """The rule with the names of providers in the place of what a configuration calls them."""
        return rule.map(self._provider)

    def describe_kernels(self, providers: Iterable[str | None]) -> list[str]:
        """A sentence for each kernel of the Hub among the providers that serve."""
        used = set(providers)
        kernels = hub.loaded_kernels(self._policy)
        return [f"kernel {kernel.describe()}" for kernel in kernels if str(kernel.reference) in used]

    def _provider(self, choice: str | None) -> str | None:
        """The name of the provider that a choice of the configuration means."""
        if choice is None:
            return STOCK
        if choice == "auto":
            return self._automatic
        return hub.tagged(choice, self._policy) if hub.is_kernel(choice) else choice


def layer_name(module: nn.Module, fusion: Fusion | None) -> str:
    """The name that transformers has for the layer that a module is, or "".

    It is on the class only if transformers likes the ``kernels`` package that is installed.
    """
    name = getattr(type(module), "kernel_layer_name", "")
    of_transformers = type(module).__module__.startswith("transformers.")
    if not name and of_transformers and fusion is not None and fusion.op == "rms_norm":
        return "RMSNorm"
    return str(name)
