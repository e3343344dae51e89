"""Single-stream blocks: what attention returns goes into the memory of the feed-forward's result, in front of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffkern import inject_optimized_kernels, restore
from diffkern.rewrite import Rewriter, Rewritten

TEXT, IMAGE = 5, 12


class Cats(TorchDispatchMode):
    """Remembers along which dimension tensors are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.default:
            self.dims.append(args[1])
        return func(*args, **(kwargs or {}))


def block() -> FluxSingleTransformerBlock:
    torch.manual_seed(0)
    return FluxSingleTransformerBlock(32, 2, 16).bfloat16().eval().requires_grad_(False)


def arguments(batch: int = 2) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    image, text, time = (torch.randn(batch, *shape, 32, generator=generator) for shape in ((IMAGE,), (TEXT,), ()))
    angles = torch.randn(TEXT + IMAGE, 8, generator=generator).repeat_interleave(2, 1)
    return image.bfloat16(), text.bfloat16(), time.bfloat16(), (angles.cos(), angles.sin())


def run(module: nn.Module, batch: int = 2) -> Tensor:
    with torch.no_grad():
        return torch.stack([part.double().flatten(1) for part in module(*arguments(batch))][:1])


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_after_the_first_call_nothing_is_concatenated_along_the_features(numerics: str) -> None:
    module = block()
    stock = run(module)
    rewritten = Rewriter(numerics).rewrite(module)
    assert isinstance(rewritten, Rewritten)
    module.forward = rewritten.function.__get__(module)
    first = run(module)
    with torch.no_grad(), Cats() as seen:
        module(*arguments())
    assert 2 in seen.dims  # an observer of ops sees what it saw before
    again, cats = run(module), count_cats(module)
    assert cats == [1] and torch.equal(again, first)
    assert torch.equal(again, stock) if numerics == "exact" else torch.allclose(again, stock, rtol=2e-2, atol=2e-2)


def count_cats(module: nn.Module) -> list[int]:
    """The dimensions of the concatenations of a call that no mode observes."""
    called, cat = [], torch.cat

    def counting(tensors: Any, dim: int = 0) -> Tensor:
        called.append(dim)
        return cat(tensors, dim)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "cat", counting)
        module(*arguments())
    return called


def test_calls_of_another_batch_a_hook_and_gradients_compute_what_stock_does() -> None:
    module, stock = block(), block()
    report = inject_optimized_kernels(module)
    assert report is not None
    run(module)
    for batch in (2, 1, 3):
        assert torch.allclose(run(module, batch), run(stock, batch), rtol=2e-2, atol=2e-2)
    seen: list[int] = []
    handle = module.act_mlp.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(run(module), run(stock), rtol=2e-2, atol=2e-2) and seen == [1]
    handle.remove()
    image, *rest = arguments()
    grads = []
    for one in (module, stock):
        x = image.clone().requires_grad_()
        one(x, *rest)[1].float().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, rtol=5e-2, atol=5e-2)
    restore(module)
    assert torch.equal(run(module), run(stock))


class Tiny(nn.Module):
    """A feed-forward whose input lies in front of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.act = nn.Linear(8, 16), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.proj(x))
        return torch.cat([x, y], dim=2)


def test_compiled_it_is_one_graph() -> None:
    module, x = Tiny().requires_grad_(False), torch.randn(1, 4, 8)
    stock = module(x)
    inject_optimized_kernels(module)
    with torch.no_grad():
        first = module(x)
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), first)
    torch.testing.assert_close(first, stock)
