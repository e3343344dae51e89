"""Layers of kernels on modules that diffkern does not know: what will run is what is proven, or stock runs."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import StrictModeError, inject_optimized_kernels
from tests.hub.kernels import kernel, write
from tests.hub.server import LoopbackHub

pytestmark = pytest.mark.filterwarnings("ignore:diffkern")

LAYERS = """
    import torch
    from torch import nn

    class Right(nn.Module):
        def forward(self, x):
            return self.lin(x).relu()

    class Wrong(nn.Module):
        def forward(self, x):
            return 5 * self.lin(x).relu()

    class WrongInTraining(nn.Module):
        def forward(self, x):
            return (5 if self.training else 1) * self.lin(x).relu()

    class Times7(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return 7 * g

    class WrongBackward(nn.Module):
        def forward(self, x):
            return Times7.apply(self.lin(x).relu())

    class Detached(nn.Module):
        def forward(self, x):
            return self.lin(x).relu().detach()

    class DetachedInput(nn.Module):
        def forward(self, x):
            return self.lin(x.detach()).relu()

    class Scaled(nn.Module):
        def forward(self, x, scale=None):
            y = self.lin(x).relu()
            return y if scale is None else scale * y

    class IgnoresScale(nn.Module):
        def forward(self, x, scale=None):
            return self.lin(x).relu()

    class ReadsTheWeight(nn.Module):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.lin.weight, self.lin.bias).relu()

    class Raises(nn.Module):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("only two\\nframes")
            return self.lin(x).relu()

    class Pair(nn.Module):
        def forward(self, x, flag=None):
            return self.lin(x).relu(), None

    class Lone(nn.Module):
        def forward(self, x, flag=None):
            return self.lin(x).relu()

    class OtherKey(nn.Module):
        def forward(self, x, flag=None):
            return {"other": self.lin(x).relu()}

    class Named(nn.Module):
        def forward(self, x, flag=None):
            return {"y": self.lin(x).relu()}
"""


class B(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).relu()


class WithScale(B):
    def forward(self, x: Tensor, scale: float | Tensor | None = None) -> Tensor:  # type: ignore[override]
        y = self.lin(x).relu()
        return y if scale is None else scale * y


class WithPair(B):
    def forward(self, x: Tensor, flag: bool | None = None) -> Any:  # type: ignore[override]
        return self.lin(x).relu(), None


class WithName(B):
    def forward(self, x: Tensor, flag: bool | None = None) -> Any:  # type: ignore[override]
        return {"y": self.lin(x).relu()}


class WithDropout(B):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.lin(x).relu())


@pytest.fixture
def path(hub: LoopbackHub, tmp_path: Path) -> str:
    return write(tmp_path / "kernel", kernel("", textwrap.dedent(LAYERS)))


def pair(cls: type[nn.Module] = B) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(cls())
    return model, copy.deepcopy(model)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("first", ["train", "eval"])
def test_a_layer_for_training_is_proven_for_itself(path: str, first: str) -> None:
    model, twin = pair()
    config = {"B": {"inference": f"{path}:Right", "training": f"{path}:Wrong"}}
    report = inject_optimized_kernels(getattr(model, first)(), config=config)
    for mode in ("eval", "train", "eval"):
        assert_same(step(getattr(model, mode)(), random(2, 5, 8)), step(getattr(twin, mode)(), random(2, 5, 8)))
        model.zero_grad(), twin.zero_grad()
    fused = report.calls()["0"]["fused"] if report.patched else 0
    assert fused == (2 if first == "eval" else 0)  # refused at injection, or proven for inference alone


def test_a_layer_that_computes_something_else_in_training_is_found_at_the_first_call_there(path: str) -> None:
    model, twin = pair()
    report = inject_optimized_kernels(model.eval(), config={"B": f"{path}:WrongInTraining"})
    x = random(2, 5, 8)
    torch.testing.assert_close(model(x), twin.eval()(x))
    assert_same(step(model.train(), x), step(twin.train(), x))
    assert report.calls()["0"]["fused"] == 1 and report.calls()["0"]["stock"] == 1


@pytest.mark.parametrize("layer", ["WrongBackward", "Detached", "DetachedInput"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_wrong_gradients_run_stock_with_the_reason(path: str, layer: str, mode: str) -> None:
    model, twin = pair()
    report = inject_optimized_kernels(getattr(model, mode)(), config={"B": f"{path}:{layer}"})
    x = random(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x))
    assert_same(step(model, x), step(getattr(twin, mode)(), x))
    (reason,) = report.calls()["0"]["stock_reasons"]
    assert report.calls()["0"]["fused"] == 1 and reason.startswith("runs stock wherever gradients are wanted")


def test_right_gradients_run_fused(path: str) -> None:
    model, twin = pair()
    report = inject_optimized_kernels(model.train(), config={"B": f"{path}:Right"}, strict=True)
    assert_same(step(model, random(2, 5, 8)), step(twin, random(2, 5, 8)))
    assert report.calls()["0"]["fused"] == 1


def test_an_argument_that_a_layer_ignores_is_found_when_it_is_given(path: str) -> None:
    for layer, fused in (("IgnoresScale", 1), ("Scaled", 3)):
        model, twin = pair(WithScale)
        model, twin = model[0].eval(), twin[0].eval()
        report = inject_optimized_kernels(model, config={"WithScale": f"{path}:{layer}"})
        x = random(2, 5, 8)
        with torch.no_grad():
            for arguments in ({}, {"scale": 3.0}, {"scale": random(8)}):
                torch.testing.assert_close(model(x, **arguments), twin(x, **arguments))
        assert report.calls()[""]["fused"] == fused


@pytest.mark.parametrize(
    ("cls", "right", "wrong"), [(WithPair, "Pair", ("Lone", "Named")), (WithName, "Named", ("OtherKey", "Pair"))]
)
def test_modules_that_return_several_things(path: str, cls: type[nn.Module], right: str, wrong: tuple[str]) -> None:
    x = random(2, 5, 8)
    for layer in (right, *wrong):
        model, twin = (part[0].eval() for part in pair(cls))
        report = inject_optimized_kernels(model, config={cls.__name__: f"{path}:{layer}"})
        y, expected = model(x), twin(x)
        assert torch.utils._pytree.tree_structure(y) == torch.utils._pytree.tree_structure(expected)
        pick: Callable[[Any], Tensor] = (lambda y: y["y"]) if cls is WithName else (lambda y: y[0])
        torch.testing.assert_close(pick(y), pick(expected))
        assert len(report.patched) == (layer == right)
    sites = report.failed
    assert "another structure" in str(sites[0].reason)


def test_a_module_that_draws_random_numbers_is_not_compared(path: str) -> None:
    model, _ = pair(WithDropout)
    report = inject_optimized_kernels(model.train(), config={"WithDropout": f"{path}:Right"})
    assert "draws random numbers" in str(report.failed[0].reason)
    model, twin = pair(WithDropout)
    report = inject_optimized_kernels(model.eval(), config={"WithDropout": f"{path}:Right"})
    x = random(2, 5, 8)
    torch.testing.assert_close(model(x), twin.eval()(x))
    assert report.calls()["0"]["fused"] == 1
    torch.manual_seed(3)
    y = model.train()(x)
    torch.manual_seed(3)
    assert torch.equal(y, twin.train()(x))


def test_layers_inside_with_hooks_or_weights_of_their_own_run_stock(path: str) -> None:
    model, twin = pair()
    report = inject_optimized_kernels(model.eval(), config={"B": f"{path}:ReadsTheWeight"})
    x = random(2, 5, 8)
    torch.testing.assert_close(model(x), twin(x))
    for one in (model, twin):
        one[0].lin.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(model(x), twin(x))
    assert report.calls()["0"]["fused"] == 1
    assert "has hooks, adapters or quantised weights" in next(iter(report.calls()["0"]["stock_reasons"]))


def test_a_layer_that_raises_later_gives_way_and_a_wrong_call_is_the_users(path: str) -> None:
    model, twin = pair()
    report = inject_optimized_kernels(model.eval(), config={"B": f"{path}:Raises"})
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(random(2, 5, 9))
    model(random(2, 5, 8))
    with pytest.warns(UserWarning, match="Raises failed: ValueError: only two; it runs stock from now on"):
        y = model(random(3, 5, 8))
    torch.testing.assert_close(y, twin(random(3, 5, 8)))
    model(random(2, 5, 8))
    calls = report.calls()["0"]
    assert calls["fused"] >= 1 and calls["stock_reasons"]["Raises failed: ValueError: only two"] == 2
    strict, _ = pair()
    inject_optimized_kernels(strict.eval(), config={"B": f"{path}:Raises"}, strict=True)
    with pytest.raises(StrictModeError, match="only two"):
        strict(random(3, 5, 8))


def test_an_attention_of_a_language_model_keeps_its_result_and_its_cache(hub: LoopbackHub, tmp_path: Path) -> None:
    build = pytest.importorskip("tests.transformers.models", exc_type=ImportError).build
    layers = """
        from torch import nn

        class Attention(nn.Module):
            def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None,
                        **kwargs):
                return 2 * self.o_proj(hidden_states), None
    """
    path = write(tmp_path / "attention", kernel("", textwrap.dedent(layers)))
    ids = torch.arange(1, 8)[None]
    model, twin = build("llama"), build("llama")
    config = {"LlamaAttention": f"{path}:Attention", "rms_norm": None, "glu": None}
    report = inject_optimized_kernels(model, config=config)
    for use_cache in (True, False):
        with torch.no_grad():
            y, expected = (one(ids, use_cache=use_cache) for one in (model, twin))
        assert torch.equal(y.logits, expected.logits)
        assert not use_cache or y.past_key_values.get_seq_length() == 7
    (first, second) = report.calls()["model.layers.0.self_attn"]["stock_reasons"]
    assert first == "an argument holds a DynamicCache, which a proof cannot copy" and "lost its proof" in second
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))


def test_an_op_of_a_kernel_that_raises_later_gives_way(hub: LoopbackHub, tmp_path: Path) -> None:
    source = """
        import torch

        def apply_rms_norm(x, weight, eps):
            if x.shape[0] == 3:
                raise ValueError("only two")
            return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    """
    path = write(tmp_path / "norm", kernel(source))
    norm = nn.RMSNorm(16, eps=1e-6)
    inject_optimized_kernels(norm, config={"rms_norm": path})
    norm(random(2, 5, 16))
    with pytest.warns(UserWarning, match="failed: ValueError: only two; such calls run in plain PyTorch"):
        y = norm(random(3, 5, 16))
    torch.testing.assert_close(y, nn.functional.rms_norm(random(3, 5, 16), (16,), norm.weight, 1e-6))
