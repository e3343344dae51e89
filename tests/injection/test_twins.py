"""Modules without anything to fuse ask once for what stays the same, and compute the bits of stock."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.embeddings import Timesteps, get_timestep_embedding
from torch import Tensor, nn

from diffkern import InjectionReport, forget, inject_optimized_kernels
from diffkern.cache import memory
from diffkern.injection.twin_fusion import OP
from diffkern.rewrite.twins import signature, with_twins
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.model import Draw


class Asked:
    """Counts who asks for a signature."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        ask = inspect.signature

        def counted(*args: Any, **kwargs: Any) -> inspect.Signature:
            self.times += 1
            return ask(*args, **kwargs)

        monkeypatch.setattr(inspect, "signature", counted)


class Doubling:
    """A processor that takes another argument than those of diffusers."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, factor: float = 2.0, **ignored: Any) -> Tensor:
        return hidden_states * factor


@pytest.fixture
def pixart() -> tuple[nn.Module, nn.Module, dict[str, Any], InjectionReport]:
    stock = DENOISERS["pixart"].build()
    for module in stock.modules():
        if hasattr(module, "rescale_output_factor"):
            module.rescale_output_factor = 2.0  # a division by 1 would be something to fuse
    injected = copy.deepcopy(stock)
    draw = Draw(torch.Generator().manual_seed(1), torch.device("cpu"), torch.float32)
    inputs = DENOISERS["pixart"].inputs(draw, 8)
    return stock, injected, inputs, inject_optimized_kernels(injected)


def _own(report: InjectionReport) -> list[str]:
    return [site.path for site in report.patched if site.op == OP and "attn" in site.path]


@torch.no_grad()
def test_the_signature_of_a_processor_is_asked_for_once(pixart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, injected, inputs, report = pixart
    assert _own(report) == [f"transformer_blocks.{block}.attn{number}" for block in (0, 1) for number in (1, 2)]
    for _ in range(3):
        injected(**inputs)
    asked = Asked(monkeypatch)
    torch.testing.assert_close(injected(**inputs), stock(**inputs), rtol=1e-4, atol=1e-5)
    assert asked.times == 4, "by stock alone"
    assert [report.calls()[path] for path in _own(report)] == [
        {"fused": 4, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}
    ] * 4


@torch.no_grad()
def test_an_attention_module_computes_the_bits_of_stock(pixart: Any) -> None:
    stock, injected, _, _ = pixart
    attention, twin = (model.transformer_blocks[0].attn1 for model in (injected, stock))
    x = torch.randn(2, 7, attention.to_q.in_features)
    assert all(torch.equal(attention(x), twin(x)) for _ in range(3))


@torch.no_grad()
def test_a_processor_set_later_is_asked_for_its_own_arguments(pixart: Any) -> None:
    _, injected, _, _ = pixart
    attention = injected.transformer_blocks[0].attn1
    x = torch.randn(2, 7, attention.to_q.in_features)
    for _ in range(3):
        attention(x)
    attention.processor = Doubling()
    assert torch.equal(attention(x, factor=3.0), 3 * x)


@torch.no_grad()
def test_a_signature_set_on_the_function_later_counts(pixart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, injected, _, _ = pixart
    attention = injected.transformer_blocks[0].attn1
    attention.processor = Doubling()
    x = torch.randn(2, 7, attention.to_q.in_features)
    assert torch.equal(attention(x, factor=3.0), 3 * x)
    without = inspect.Signature([inspect.Parameter("attn", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    monkeypatch.setattr(Doubling.__call__, "__signature__", without, raising=False)
    assert torch.equal(attention(x, factor=3.0), 2 * x), "an argument that it does not take is dropped"


def test_defaults_and_code_set_on_the_function_later_count() -> None:
    class Taking:
        def __call__(self, attn: nn.Module, factor: float = 2.0) -> float:
            return factor

    call = Taking().__call__
    assert signature(call) is signature(call) and signature(call) == inspect.signature(call)
    Taking.__call__.__defaults__ = (3.0,)
    assert signature(call).parameters["factor"].default == 3.0
    Taking.__call__.__code__ = (lambda self, other, factor=1.0: factor).__code__
    assert list(signature(call).parameters) == ["other", "factor"]


@torch.no_grad()
def test_a_forward_of_the_class_replaced_later_runs(pixart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, injected, _, _ = pixart
    attention = injected.transformer_blocks[0].attn1
    x = torch.randn(2, 7, attention.to_q.in_features)
    for _ in range(3):
        attention(x)
    monkeypatch.setattr(type(attention), "forward", lambda self, x: x + 1)
    assert torch.equal(attention(x), x + 1)


def test_gradients_are_those_of_stock(pixart: Any) -> None:
    stock, injected, _, _ = pixart
    x = torch.randn(2, 7, stock.transformer_blocks[0].attn1.to_q.in_features, requires_grad=True)
    mine, other = (torch.autograd.grad(m.transformer_blocks[0].attn1(x).square().sum(), x) for m in (injected, stock))
    assert torch.equal(*mine, *other)


def test_a_configuration_can_leave_it_alone() -> None:
    module = nn.Sequential(Timesteps(16, True, 0), nn.LayerNorm(16))
    report = inject_optimized_kernels(module, config={OP: None})
    assert [site.op for site in report.patched] == ["layer_norm"]


def test_restore_leaves_no_forward_behind(pixart: Any) -> None:
    _, injected, _, report = pixart
    report.restore()
    assert not any("forward" in module.__dict__ for module in injected.modules())


# --- the embedding of timesteps ------------------------------------------------------------------------------


def _embedded(module: nn.Module) -> Any:
    """A module like this one that calls the twin."""
    twin = copy.deepcopy(module)
    inject_optimized_kernels(twin)
    return twin


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("width", "shift", "scale"), [(256, 0, 1), (32, 1, 1), (10, 0.5, 1000.0), (7, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_an_embedding_has_the_bits_of_stock(
    flip: bool, width: int, shift: float, scale: float, dtype: torch.dtype
) -> None:
    stock = Timesteps(width, flip, shift, scale)  # type: ignore[arg-type]
    twin, times = _embedded(stock), torch.tensor([0.0, 0.25, 3.0, 999.0]).to(dtype)
    for _ in range(3):
        assert torch.equal(twin(times), stock(times))
    assert len(memory(twin).get("frequencies", {})) == (width % 2 == 0)


def test_frequencies_are_made_once_and_forgotten_when_asked() -> None:
    twin = _embedded(Timesteps(16, True, 0))
    twin(torch.tensor([1.0, 2.0]))
    (kept,) = memory(twin)["frequencies"].values()
    twin(torch.tensor([5.0]))
    assert next(iter(memory(twin)["frequencies"].values())) is kept
    forget(twin)
    assert "frequencies" not in memory(twin)


def test_a_setting_that_changes_takes_effect() -> None:
    twin, times = _embedded(Timesteps(16, True, 0)), torch.tensor([1.0, 2.0])
    twin(times)
    twin.downscale_freq_shift, twin.flip_sin_to_cos, twin.num_channels, twin.scale = 1, False, 12, 3
    assert torch.equal(twin(times), get_timestep_embedding(times, 12, False, 1, 3))


def test_a_function_that_takes_its_place_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, times = _embedded(Timesteps(16, True, 0)), torch.tensor([1.0, 2.0])
    twin(times)
    monkeypatch.setattr(embeddings, "get_timestep_embedding", lambda times, width, **others: times + width)
    assert torch.equal(twin(times), times + 16)


def test_a_function_of_that_name_with_other_frequencies_has_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_timestep_embedding(
        timesteps: Tensor,
        embedding_dim: int,
        flip_sin_to_cos: bool = False,
        downscale_freq_shift: float = 1,
        scale: float = 1,
        max_period: int = 10000,
    ) -> Tensor:
        return timesteps[:, None] * torch.ones(embedding_dim)

    monkeypatch.setattr(embeddings, "get_timestep_embedding", get_timestep_embedding)

    class Mine(nn.Module):
        forward = Timesteps.forward

    assert with_twins(type("Fresh", (), {"forward": _copied(Mine.forward)}).forward) is None  # type: ignore[attr-defined]


def _copied(function: Any) -> Any:
    """The same function as another object, about which nothing is known yet."""
    return type(function)(function.__code__, function.__globals__, function.__name__)


def test_frequencies_made_in_inference_mode_serve_gradients_later() -> None:
    stock = Timesteps(16, True, 0)
    twin, times = _embedded(stock), torch.tensor([1.0, 2.0], requires_grad=True)
    with torch.inference_mode():
        twin(times.detach())
    mine, other = (
        torch.autograd.grad(module(times).square().sum() + module(times).sum(), times) for module in (twin, stock)
    )
    assert torch.equal(*mine, *other)


def test_transforms_and_fake_tensors_see_the_function_of_stock() -> None:
    stock = Timesteps(16, True, 0)
    twin, times = _embedded(stock), torch.rand(3, 2)
    twin(times[0])
    assert torch.equal(torch.vmap(twin)(times), torch.vmap(stock)(times))
    first = times[0].clone()
    with torch._subclasses.FakeTensorMode() as mode:
        assert twin(mode.from_tensor(first)).shape == (2, 16)
    assert twin(first.to("meta")).shape == (2, 16)


def test_it_is_compiled_without_a_break() -> None:
    stock = Timesteps(16, True, 0)
    twin, times = _embedded(stock), torch.tensor([1.0, 2.0])
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    assert torch.equal(compiled(times), stock(times))
