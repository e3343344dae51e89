"""Functions of comfy-kitchen as the proofs see them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.comfyui.kitchen import FUNCTIONS, INPUTS, KitchenBackend
from diffkern.providers import Choice, select
from diffkern.verify.fusion import Fusion
from diffkern.verify.samples import Draws

_BATCH, _HEADS, _TOKENS, _SIZE = 2, 6, 45, 128
#: Tokens where one differing bit decides.
_EXACT_TOKENS = 400


class Samples(Draws):
    """Random tensors for sample calls."""

    def rotations(self, *shape: int) -> Tensor:
        """Draws rotation matrices ``[..., 2, 2]``."""
        angles = torch.randn(shape, generator=self._generator, device="cpu") * 3
        cos, sin = angles.cos(), angles.sin()
        matrices: Tensor = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
        return matrices.to(device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class KitchenFusion(Fusion):
    """One function. A call is the tuple of its arguments; there is no module."""

    name: str
    kitchen: KitchenBackend

    @property
    @override
    def op(self) -> str:
        return FUNCTIONS[self.name][0]

    def owner(self, registry: Any, device: torch.device, dtype: torch.dtype) -> str | None:
        """Returns the backend that comfy-kitchen itself would choose, or None if it does not have the function."""
        from comfy_kitchen.exceptions import NoCapableBackendError

        call = self.samples(nn.Identity(), device, dtype, False)[0]
        try:
            backend: str = registry.get_capable_backend(self.name, self._named(call))
        except NoCapableBackendError:
            return None
        return backend

    def _named(self, call: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(FUNCTIONS[self.name][1], call, strict=True))

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args

    @override
    def primary_input(self, call: tuple[Tensor, ...]) -> Tensor:
        return call[0]

    @override
    def compute(self, module: nn.Module, call: tuple[Tensor, ...], provider: str | None, stock: tuple[str, ...]) -> Any:
        return getattr(self.kitchen, self.name)(**self._named(call))

    @override
    def kind(self, module: nn.Module) -> Hashable:
        # A variant that writes its result into its input needs no proof of its own: the numbers are the same.
        return self.name.removesuffix("_"), self.kitchen

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return select(self.op, device, dtypes, provider)

    @override
    def samples(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool
    ) -> Sequence[tuple[Tensor, ...]]:
        random, tokens = Samples(device, dtype), _EXACT_TOKENS if exact else _TOKENS
        if self.op == "norm_modulate":
            x = random(_BATCH, tokens, _SIZE)
            return [(x, *(random(_BATCH, rows, _SIZE, scale=0.5) for _ in range(2))) for rows in (1, tokens)]
        kinds = (torch.float32,) if exact else dict.fromkeys((torch.float32, dtype))
        calls = []
        for kind in kinds:
            matrices = Samples(device, kind).rotations(1, 1, tokens, _SIZE // 2)
            heads = [random(_BATCH, _HEADS, tokens, _SIZE) for name in FUNCTIONS[self.name][1] if name in INPUTS]
            scales = [random(_SIZE, scale=0.2) + 1 for name in FUNCTIONS[self.name][1] if name.endswith("scale")]
            calls.append((*heads, matrices, *scales))
        return calls

    @override
    def stock(self, module: nn.Module, call: tuple[Tensor, ...]) -> Any:
        import comfy_kitchen

        return getattr(comfy_kitchen, self.name)(*call)

    @override
    def reference(self, module: nn.Module, call: tuple[Tensor, ...]) -> Any:
        """Runs comfy-kitchen's plain torch, without its check of dtypes."""
        from comfy_kitchen.backends import eager

        return getattr(eager, self.name)(*(tensor.double() for tensor in call))
