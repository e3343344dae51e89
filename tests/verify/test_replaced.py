"""What is put in the place of a class's forward or a function takes effect, before the injection and after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import activations, attention, attention_processor, embeddings, normalization
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.models.transformers import transformer_flux, transformer_ltx
from torch import nn
from transformers.models.llama import modeling_llama

from diffkern import inject_optimized_kernels
from diffkern.blocks.pieces import unfit_surroundings, untouched
from diffkern.matching.genuine import replaced_function, replacement
from tests.injection.models import run, tiny_ltx
from tests.transformers.models import build, inputs, logits


def scaled(old: Callable[..., Any], wraps: bool = False) -> Callable[..., Any]:
    """The same function, its results multiplied; ``wraps`` gives it the name and module of the old one."""

    def new(*args: Any, **kwargs: Any) -> Any:
        result = old(*args, **kwargs)
        return tuple(part * 1.5 for part in result) if isinstance(result, tuple) else result * 1.5

    return functools.wraps(old)(new) if wraps else new


def check(
    monkeypatch: pytest.MonkeyPatch, model_of: Callable[[], Any], run: Callable[[Any], Any], owner: Any, name: str,
    before: bool, wraps: bool = False,
) -> None:  # fmt: skip
    """Replaces something, before the injection or between two calls, and puts it back."""
    stock, model = model_of(), model_of()
    plain = run(stock)
    if not before:
        inject_optimized_kernels(model)
        run(model)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, scaled(getattr(owner, name), wraps))
        if before:
            inject_optimized_kernels(model)
        expected = run(stock)
        assert (expected - plain).norm() > 1e-3 * plain.norm()
        for _ in range(2):
            torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(model), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Linear, "forward"),
        (nn.RMSNorm, "forward"),
        (normalization.RMSNorm, "forward"),
        (activations.GELU, "gelu"),
        (attention.FeedForward, "forward"),
        (transformer_ltx, "apply_rotary_emb"),
        (F, "scaled_dot_product_attention"),
        (F, "gelu"),
        (F, "rms_norm"),
    ],
)
def test_in_a_fused_block(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: bool) -> None:
    check(monkeypatch, lambda: tiny_ltx(1), run, owner, name, before)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("imported", [True, False])
def test_the_rotation_of_a_processor(monkeypatch: pytest.MonkeyPatch, imported: bool, before: bool) -> None:
    """CogVideoX's imports it at each call, Flux's file once."""
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(2, 1, 9, 32, generator=generator)
    tables = torch.rand(2, 9 if imported else 18, 16, generator=generator)

    def model_of() -> Any:
        torch.manual_seed(0)
        if imported:
            processor = attention_processor.CogVideoXAttnProcessor2_0()
            own: Any = attention_processor.Attention(
                32, heads=2, dim_head=16, qk_norm="layer_norm", processor=processor
            )
        else:
            own = transformer_flux.FluxAttention(32, 2, 16, added_kv_proj_dim=32, out_dim=32, context_pre_only=False)
        return nn.ModuleList([own.requires_grad_(False)])

    def run(model: Any) -> Any:
        return model[0](x, encoder_hidden_states=text, image_rotary_emb=tuple(tables))[0]

    owner = embeddings if imported else transformer_flux
    check(monkeypatch, model_of, run, owner, "apply_rotary_emb", before)


class Scale:
    """A callable that computes what a function computes, times a number that may change, and counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.factor, self.calls = function, 1.0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs) * self.factor


def wrapped(scale: Scale) -> Callable[..., Any]:
    return functools.wraps(scale.function)(lambda *args, **kwargs: scale(*args, **kwargs))


@pytest.mark.parametrize("put", [lambda scale: scale, functools.partial, wrapped], ids=["object", "partial", "wraps"])
def test_a_rotation_that_returned_the_same_at_the_injection_is_called(
    monkeypatch: pytest.MonkeyPatch, put: Callable[[Scale], Callable[..., Any]]
) -> None:
    model, stock = tiny_ltx(1), tiny_ltx(1)
    plain, scale = run(stock), Scale(transformer_ltx.apply_rotary_emb)
    monkeypatch.setattr(transformer_ltx, "apply_rotary_emb", put(scale))
    report = inject_optimized_kernels(model)
    run(model)
    before = scale.calls
    torch.testing.assert_close(run(model), plain, rtol=1e-4, atol=1e-5)
    assert scale.calls == before + 2
    (reason,) = report.calls()["transformer_blocks.0.attn1"]["stock_reasons"]
    assert "the function apply_rotary_emb was replaced by" in reason
    scale.factor = 1.5
    torch.testing.assert_close(run(model), run(stock), rtol=1e-4, atol=1e-5)
    monkeypatch.undo()
    torch.testing.assert_close(run(model), plain, rtol=1e-4, atol=1e-5)
    again = tiny_ltx(1)
    report = inject_optimized_kernels(again)
    torch.testing.assert_close(run(again), plain, rtol=1e-4, atol=1e-5)
    assert report.calls()["transformer_blocks.0.attn1"]["fused"] == 1


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama, "rotate_half"),
        (modeling_llama, "eager_attention_forward"),
        (modeling_llama.LlamaMLP, "forward"),
    ],
)
def test_inside_of_the_forwards_of_language_models(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: bool
) -> None:
    batch = inputs("llama")

    def model_of() -> Any:
        model = build("llama").eval()
        model.set_attn_implementation("eager")
        return model

    def run(model: Any) -> Any:
        with torch.no_grad():
            return logits(model, batch)

    check(monkeypatch, model_of, run, owner, name, before)


def test_a_replacement_under_the_name_of_the_old_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, lambda: tiny_ltx(1), run, nn.Linear, "forward", True, wraps=True)


@pytest.mark.parametrize("module", [nn.LayerNorm(8), PixArtAlphaTextProjection(8, 8)], ids=["norm", "recipe"])
def test_the_report_names_the_replacement(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(module), "forward", scaled(type(module).forward))
    report = inject_optimized_kernels(nn.Sequential(module))
    assert report.skipped[0].reason == f"the forward of its class was replaced by {__name__}.new"


def test_forwards_of_libraries_are_their_own_decorators_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (nn.Linear, nn.ModuleList, transformer_ltx.LTXVideoTransformer3DModel, modeling_llama.LlamaAttention):
        assert replacement(cls) is None
    assert replaced_function((transformer_ltx.apply_rotary_emb, attention.FeedForward.forward)) is None
    assert replaced_function((attention.FeedForward.forward, scaled)) == f"{__name__}.scaled"

    layer = nn.Linear(2, 2)
    assert untouched(layer, nn.Linear) and unfit_surroundings() is None
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", scaled(nn.Linear.forward, wraps=True))
        assert not untouched(layer, nn.Linear) and replacement(nn.Linear) == f"{__name__}.new"
    assert untouched(layer, nn.Linear)


def test_a_graph_hears_of_it_and_is_not_compiled_again_for_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: Any, samples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    expected = layer(x)

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * (2 if untouched(layer, nn.Linear) else 1)

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), expected * 2)

    class Another(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert untouched(Another(2, 2), Another) and untouched(nn.Tanh(), nn.Tanh)
    assert torch.equal(compiled(x), expected * 2) and len(graphs) == 1
    monkeypatch.setattr(nn.Linear, "forward", scaled(nn.Linear.forward))
    assert torch.equal(compiled(x), expected * 1.5) and len(graphs) == 2
