"""Attention in fp8 that reads queries and keys before their norm and rotation, in a small Flux."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import HunyuanVideoTransformer3DModel
from diffusers.models.transformers import transformer_flux as flux
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from diffkern.attention import BACKENDS, accuracy, cudnn_fp8
from diffkern.providers.eager.attention_fp8 import Unrotated
from diffkern.rewrite import masked, plan
from diffkern.rewrite.rewriter import Rewriter
from diffkern.verify.measures import relative_error

TEXT, SIDE = 16, 8


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return (
        flux.FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=128,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(16, 56, 56),
        )
        .bfloat16()
        .eval()
    )  # fmt: skip


def inputs(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).bfloat16().to(dtype)

    rows = torch.arange(SIDE * SIDE)
    return {
        "hidden_states": random(SIDE * SIDE, 16),
        "encoder_hidden_states": random(TEXT, 32),
        "pooled_projections": random(32),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.stack([0 * rows, rows // SIDE, rows % SIDE], 1).float(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


class Served:
    """The backend on the CPU, whose calls from before the rotation are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compute: Callable[..., Tensor] | None = None) -> None:
        self.streams: list[int] = []
        self._compute = compute or cudnn_fp8.attend_unrotated
        backend = replace(
            BACKENDS["cudnn_fp8"], load=lambda: cudnn_fp8.attend, device_types=None, capability=None, package="",
            timed=False, unrotated=self,
        )  # fmt: skip
        monkeypatch.setitem(BACKENDS, "cudnn_fp8", backend)

    def __call__(self, x: Unrotated, value: Tensor, scale: float | None) -> Tensor:
        self.streams.append(len(x.queries))
        return self._compute(x, value, scale)

    def run(self, model: nn.Module, **more: Any) -> Tensor:
        """Calls the model; :attr:`streams` are those of this call then."""
        self.streams.clear()
        with torch.no_grad():
            y: Tensor = model(**{**inputs(), **more})[0]
        return y


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def error_of(y: Tensor, model: nn.Module) -> float:
    with torch.no_grad():
        return accuracy.distance(y, copy.deepcopy(model).double()(**inputs(torch.float64))[0])


def test_attention_begins_before_the_rotation_once_all_is_proven(model: nn.Module, served: Served) -> None:
    stock = served.run(model)
    stock_error, exact = error_of(stock, model), copy.deepcopy(model)
    report = inject_optimized_kernels(model, attention="cudnn_fp8")
    first = served.run(model)
    assert served.streams == []
    served.run(model)
    assert served.streams == [2, 2, 1, 1]  # the first of each kind is compared with float64
    y = served.run(model)
    assert served.streams == [2, 1]
    assert accuracy.distance(y, first.double()) < 0.01
    assert error_of(y, exact) < 1.1 * max(stock_error, error_of(first, exact))
    calls = report.calls()
    assert calls[""]["fused"] == 6 and calls["single_transformer_blocks.0.attn"]["fused"] == 3
    joins = {"fused": 9}  # beside queries and keys the values of the image, and their concatenation
    assert calls["transformer_blocks.0.attn"] == {**calls["single_transformer_blocks.0.attn"], **joins}
    report.restore()
    assert torch.equal(served.run(model), stock) and served.streams == []


def ran(model: nn.Module, served: Served) -> Tensor:
    """The result of a model, injected, whose attention does not begin before the rotation yet."""
    inject_optimized_kernels(model, attention="cudnn_fp8")
    return served.run(model)


def test_a_call_that_is_watched_gets_queries_and_keys(
    model: nn.Module, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, seen = ran(model, served), []
    dispatch = flux.dispatch_attention_fn

    def watched(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.extend([query.isfinite().all(), key.isfinite().all()])
        return dispatch(query, key, *rest, **options)

    monkeypatch.setattr(flux, "dispatch_attention_fn", watched)
    assert torch.equal(served.run(model), first) and len(seen) == 4 and all(seen)
    assert served.streams == []


def test_a_call_with_a_mask_gets_queries_and_keys(model: nn.Module, served: Served) -> None:
    length = TEXT + SIDE * SIDE
    mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    ran(model, served)
    served.run(model, joint_attention_kwargs={"attention_mask": mask})
    assert served.streams == []


@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_one_that_does_not_keep_its_error_steps_aside(
    how: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: Unrotated, value: Tensor, scale: float | None) -> Tensor:
        if how == "raises":
            raise RuntimeError("no kernel")
        return 1.2 * cudnn_fp8.attend_unrotated(x, value, scale)

    served = Served(monkeypatch, broken)
    first = ran(model, served)
    with pytest.warns(UserWarning, match="no kernel" if how == "raises" else "an error of"):
        assert torch.equal(served.run(model), first) and served.streams == [2, 1]
    assert torch.equal(served.run(model), first) and served.streams == []


@pytest.mark.parametrize("how", ["a provider is named", "attention is not routed"])
def test_what_must_have_queries_and_keys_has_them(how: str, model: nn.Module, served: Served) -> None:
    attention = None if how == "attention is not routed" else "cudnn_fp8"
    config = {"qk_norm_rope": "eager"} if how == "a provider is named" else None
    inject_optimized_kernels(model, attention=attention, config=config)
    for _ in range(3):
        served.run(model)
    assert served.streams == []


def test_gradients_reach_what_queries_alone_are_made_from(model: nn.Module, served: Served) -> None:
    model.requires_grad_(False)
    ran(model, served)
    served.run(model)
    served.streams.clear()
    weight = model.get_parameter("single_transformer_blocks.0.attn.to_q.weight").requires_grad_()
    model(**inputs())[0].float().square().sum().backward()
    assert served.streams == [] and weight.grad is not None and weight.grad.count_nonzero() > 0


def test_norms_that_are_no_longer_alike_are_computed_one_by_one(model: nn.Module, served: Served) -> None:
    ran(model, served)
    served.run(model)
    attention: Any = model.get_submodule("single_transformer_blocks.0.attn")
    attention.norm_q.eps = 0.5
    assert served.run(model).isfinite().all() and served.streams == [2]


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_weight_that_is_not_dense_is_read_by_the_norm(side: str, model: nn.Module, served: Served) -> None:
    ran(model, served)
    served.run(model)
    norm: Any = model.get_submodule(f"single_transformer_blocks.0.attn.norm_{side}")
    norm.weight = nn.Parameter(torch.rand(256, generator=torch.Generator().manual_seed(2)).bfloat16()[::2])
    y = served.run(model)
    assert served.streams == [2]
    norm.weight = nn.Parameter(norm.weight.detach().clone(memory_format=torch.contiguous_format))
    assert torch.equal(served.run(model), y)


def test_a_compiled_model_computes_what_it_did(model: nn.Module, served: Served) -> None:
    first = ran(model, served)
    served.run(model)
    with torch.no_grad():
        y = torch.compile(model, fullgraph=True, backend="eager")(**inputs())[0]
    assert relative_error(y, first) < 2**-7, "gated residuals are the compiler's, which this one rounds twice"


class Reading(flux.FluxAttnProcessor):
    """Reads its queries behind the attention, too."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, (-1, attn.head_dim)))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, (-1, attn.head_dim)))
        value = attn.to_v(hidden_states).unflatten(-1, (-1, attn.head_dim))
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        hidden_states = dispatch_attention_fn(
            query, key, value, attn_mask=attention_mask, backend=self._attention_backend
        )
        return hidden_states.flatten(2, 3) + query.flatten(2, 3)


def test_queries_that_something_else_reads_are_there(model: nn.Module) -> None:
    attention: Any = model.get_submodule("single_transformer_blocks.0.attn")
    rewritten = Rewriter().rewrite(attention)
    assert not isinstance(rewritten, str) and rewritten.plan.sites[0].attended
    attention.set_processor(Reading())
    rewritten = Rewriter().rewrite(attention)
    assert not isinstance(rewritten, str) and rewritten.sites[0].plan.rule.op == "qk_norm_rope"
    assert not any(site.attended for site in rewritten.plan.sites)


def test_a_site_that_has_another_reader_in_another_branch_computes_its_results(model: nn.Module) -> None:
    rewritten = Rewriter().rewrite(model.get_submodule("single_transformer_blocks.0.attn"))
    assert not isinstance(rewritten, str)
    made, attention = (next(site for site in rewritten.plan.sites if found(site)) for found in (_is_attended, _attends))
    goes = "q, k = _sites[0](attn, x)\n  y = _sites[1](attn, q, k, v)"
    for other, attended in ((goes, True), ("q, k = _sites[0](attn, x)\n  y = q + k", False)):
        tree = ast.parse(f"def f(attn, x, v):\n if x is None:\n  {goes}\n else:\n  {other}\n return y").body[0]
        assert isinstance(tree, ast.FunctionDef)
        sites = [replace(made, attended=False), attention]
        plan._attend_unrotated(tree, sites)
        assert sites[0].attended == attended


def _is_attended(site: plan.SitePlan) -> bool:
    return site.attended


def _attends(site: plan.SitePlan) -> bool:
    return "tokens" in site.options


@pytest.mark.parametrize("shown", [6, 8])
def test_a_mask_that_hides_padding_alone_takes_attention_in_fp8_with_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    monkeypatch.setattr(masked, "LEAST_PAIRS", 1)
    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=128, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, mlp_ratio=2.0, patch_size=1, patch_size_t=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(16, 56, 56), guidance_embeds=True,
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4, generator=generator),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 8, 16, generator=generator),
        "encoder_attention_mask": (torch.arange(8) < shown)[None],
        "pooled_projections": torch.randn(1, 8, generator=generator),
        "guidance": torch.tensor([6000.0]),
    }
    exact = copy.deepcopy(model).double()(**{k: v.double() if v.is_floating_point() else v for k, v in given.items()})
    model, half = model.bfloat16(), {k: v.bfloat16() if v.is_floating_point() else v for k, v in given.items()}
    report = inject_optimized_kernels(model, attention="cudnn_fp8")
    with torch.no_grad():
        for _ in range(4):
            served.streams.clear()
            y = model(**half)[0]
    assert accuracy.distance(y, exact[0]) < 0.05
    assert served.streams == []  # a text that is not rotated keeps it from what is
    assert report.calls()[""]["fused"] == 8 and not report.calls()[""]["stock_reasons"]  # both attentions, each time
