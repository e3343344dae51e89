"""Rotations of models in bfloat16, with the inputs that pipelines give them, and sizes at which proofs draw parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern.bench.models import Denoiser
from diffkern.bench.models import rotary as cosines_and_sines
from diffkern.cache import rotary
from diffkern.cache.in_call import one_model_call
from diffkern.rewrite import Rewriter, Rewritten, draws, prove_ahead
from diffkern.rewrite.reference import CastsLifted, to_float64
from tests.rewrite.test_processors import TorchOps

CPU = torch.device("cpu")


def _allegro_rotary(randn: Callable[..., Tensor]) -> Any:
    axes = [torch.arange(size) for size in (2, 8, 8)]
    grid = tuple(axis.reshape(1, -1) for axis in torch.meshgrid(*axes, indexing="ij"))
    return tuple(cosines_and_sines(randn, len(axis), 32, neighbours=False) for axis in axes), grid


def _step(**given: Any) -> Callable[[Callable[..., Tensor]], Mapping[str, Any]]:
    return lambda randn: {
        name: randn(*value) if isinstance(value, tuple) else value(randn) if callable(value) else value
        for name, value in given.items()
    }


#: EasyAnimate with blocks that have projections of the text, or without.
_EASYANIMATE = {
    mmdit: Denoiser(
        "EasyAnimateTransformer3DModel", "",
        _step(hidden_states=(2, 16, 2, 32, 32), encoder_hidden_states=(2, 16, 64), timestep=torch.full((2,), 500)),
        {"num_attention_heads": 2, "attention_head_dim": 64, "text_embed_dim": 64, "in_channels": 16,
         "out_channels": 16, "patch_size": 2, "add_norm_text_encoder": True, "mmdit_layers": mmdit},
        {"num_layers": 1},
    )
    for mmdit in (1, 0)
}  # fmt: skip
#: A model with one layer, the module whose processor rotates, the rule that finds it there, and how many columns tables
#: have for each element of a head.
MODELS: dict[str, tuple[Denoiser, str, str, float]] = {
    "cogvideox": (
        Denoiser(
            "CogVideoXTransformer3DModel", "",
            _step(
                hidden_states=(2, 2, 16, 32, 32), encoder_hidden_states=(2, 26, 64), timestep=torch.full((2,), 500),
                image_rotary_emb=lambda randn: cosines_and_sines(randn, 512, 64, neighbours=True),
            ),
            {"num_attention_heads": 2, "text_embed_dim": 64, "use_rotary_positional_embeddings": True},
            {"num_layers": 1},
        ),
        "transformer_blocks.0.attn1", "query and key norm, two streams", 1.0,
    ),
    "cogview4": (
        Denoiser(
            "CogView4Transformer2DModel", "",
            _step(
                hidden_states=(2, 16, 32, 32), encoder_hidden_states=(2, 16, 64), timestep=torch.full((2,), 500),
                **{name: torch.full((2, 2), 256.0) for name in ("original_size", "target_size", "crop_coords")},
            ),
            {"num_attention_heads": 2, "attention_head_dim": 64, "text_embed_dim": 64},
            {"num_layers": 1},
        ),
        "transformer_blocks.0.attn1", "query and key norm, two streams", 1.0,
    ),
    "easyanimate": (_EASYANIMATE[1], "transformer_blocks.0.attn1", "query and key norm, two streams", 1.0),
    "easyanimate, joined": (_EASYANIMATE[0], "transformer_blocks.0.attn1", "query and key norm, two streams", 1.0),
    "hunyuan_dit": (
        Denoiser(
            "HunyuanDiT2DModel", "",
            _step(
                hidden_states=(2, 4, 32, 32), timestep=torch.full((2,), 500.0).bfloat16(),
                encoder_hidden_states=(2, 13, 64), text_embedding_mask=torch.ones(2, 13),
                encoder_hidden_states_t5=(2, 9, 64), text_embedding_mask_t5=torch.ones(2, 9),
                image_rotary_emb=lambda randn: cosines_and_sines(randn, 256, 64, neighbours=True),
            ),
            {"num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 4, "patch_size": 2, "sample_size": 32,
             "hidden_size": 128, "mlp_ratio": 2.0, "use_style_cond_and_image_meta_size": False, "text_len": 13,
             "cross_attention_dim": 64, "cross_attention_dim_t5": 64, "text_len_t5": 9},
            {"num_layers": 2},
        ),
        "blocks.0.attn2", "query and key norm, rotation", 1.0,
    ),
    "lumina2": (
        Denoiser(
            "Lumina2Transformer2DModel", "",
            _step(
                hidden_states=(2, 16, 32, 32), encoder_hidden_states=(2, 16, 64), timestep=torch.full((2,), 0.5),
                encoder_attention_mask=torch.ones(2, 16, dtype=torch.bool),
            ),
            {"cap_feat_dim": 64, "hidden_size": 384, "num_attention_heads": 4, "num_kv_heads": 2},
            {"num_layers": 1, "num_refiner_layers": 1},
        ),
        "layers.0.attn", "query and key norm, rotation", 0.5,
    ),
    "stable_audio": (
        Denoiser(
            "StableAudioDiTModel", "",
            _step(
                hidden_states=(2, 64, 128), encoder_hidden_states=(2, 13, 64), global_hidden_states=(2, 1, 128),
                timestep=torch.full((2,), 0.5),
                rotary_embedding=lambda randn: cosines_and_sines(randn, 129, 32, neighbours=False),
            ),
            {"num_attention_heads": 4, "num_key_value_attention_heads": 2, "cross_attention_input_dim": 64,
             "cross_attention_dim": 128, "global_states_input_dim": 128},
            {"num_layers": 1},
        ),
        "transformer_blocks.0.attn1", "rotation of query and key", 0.5,
    ),
    "allegro": (
        Denoiser(
            "AllegroTransformer3DModel", "",
            _step(
                hidden_states=(1, 4, 2, 16, 16), encoder_hidden_states=(1, 1, 16, 64), timestep=torch.full((1,), 500),
                encoder_attention_mask=torch.ones(1, 16), attention_mask=torch.ones(1, 2, 16, 16),
                image_rotary_emb=_allegro_rotary,
            ),
            {"num_attention_heads": 4, "caption_channels": 64, "cross_attention_dim": 384},
            {"num_layers": 1},
        ),
        "transformer_blocks.0.attn1", "rotation of query and key", 1.0,
    ),
}  # fmt: skip


def attention(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The module that rotates, and what the model calls it with."""
    denoiser, path, *_ = MODELS[name]
    model, seen = denoiser.build(CPU), []
    module = model.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    torch.manual_seed(1)
    with torch.no_grad():
        model(**denoiser.step(CPU))
    handle.remove()
    ((hidden_states, *rest), kwargs), *_ = [(args or (kwargs.pop("hidden_states"),), kwargs) for args, kwargs in seen]
    assert not rest
    return module, {"hidden_states": hidden_states, **kwargs}


def rewritten(module: nn.Module, numerics: str = "fast") -> Rewritten:
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    module.forward = partial(found.function, module)  # type: ignore[method-assign]
    return found


def results(module: nn.Module, given: Mapping[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        result = module(**given)
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("large", [False, True], ids=["whole", "in part"])
def test_a_model_in_bfloat16_has_its_rotation_fused(name: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With large operands a proof draws few tokens, and as many rows of tables, and indices of them."""
    module, given = attention(name)
    wide = copy.deepcopy(module).double()
    if large:
        monkeypatch.setattr(draws, "_LARGEST", 1 << 12)
    stock = results(module, given)
    with CastsLifted():
        exact = results(wide, {key: to_float64(value) for key, value in given.items()})
    found = rewritten(module)
    fused = results(module, given)
    sites = [site for site in found.sites if site.plan.rule.name == MODELS[name][2] and any(site.ways)]
    assert [(site.fused_calls, site.original_calls, site.reasons) for site in sites] == [(1, 0, {})]
    assert [way.columns for site in sites for way in site.ways.values() if way] == [MODELS[name][3]]
    for ours, theirs, reference in zip(fused, stock, exact, strict=True):
        assert (ours.double() - reference).norm() <= 1.05 * (theirs.double() - reference).norm()
    with torch.no_grad(), TorchOps() as seen:
        module(**given)
    assert any("qk_norm_rope" in op for op in seen.names)
    assert not {"aten::neg", "aten::view_as_complex"} & {*seen.names}
    found.guard.force_original()
    assert all(map(torch.equal, results(module, given), stock))


@pytest.mark.parametrize("name", MODELS)
def test_exact_numerics_give_the_bits_of_a_model(name: str) -> None:
    module, given = attention(name)
    stock = results(module, given)
    rewritten(module, "exact")
    assert all(map(torch.equal, results(module, given), stock))


def test_float32_keeps_tables_in_float64() -> None:
    """What float32 tables lose is far below bfloat16, and not below float32."""
    module, given = attention("lumina2")
    module, given = (
        module.float(),
        {key: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in given.items()},
    )
    wide = copy.deepcopy(module).double()
    (stock,) = results(module, given)
    with CastsLifted():
        (exact,) = results(wide, {key: to_float64(value) for key, value in given.items()})
    found = rewritten(module)
    (fused,) = results(module, given)
    (site,) = [site for site in found.sites if site.fused_calls and site.rotates]
    assert not any("tables_in_float32" in way.options for way in site.ways.values() if way)
    assert (fused.double() - exact).norm() <= 1.05 * (stock.double() - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("name", ["lumina2", "allegro"])
def test_tables_are_made_once_in_a_call_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = attention(name)
    rewritten(module)
    results(module, given)
    made: list[Any] = []
    for function in ("_narrowed", "_rows"):
        compute = getattr(rotary, function)
        monkeypatch.setattr(rotary, function, lambda *x, compute=compute: made.append(1) or compute(*x))
    for _ in range(2):
        with one_model_call():
            first, second, third = [results(module, given) for _ in range(3)]
        assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, third))
    assert len(made) == 2


def test_a_rotation_by_tables_that_have_a_dimension_for_heads_is_proven_ahead_for_heads_that_are_apart() -> None:
    """Those of heads that lie together would rotate along samples, and say that the op computes something else."""
    module, given = attention("hunyuan_dit")
    found = rewritten(module)
    for site in found.sites:
        prove_ahead(site, module, CPU, torch.bfloat16)
        site.on_new_signature = None
    results(module, given)
    rotated = found.sites[0]
    assert rotated.plan.rule.name == MODELS["hunyuan_dit"][2]
    assert (rotated.fused_calls, rotated.original_calls, rotated.reasons) == (1, 0, {})


def test_tables_of_keys_that_are_not_rotated_are_made_once_in_a_call() -> None:
    module, given = attention("hunyuan_dit")
    rewritten(module)
    with one_model_call():
        for _ in range(3):
            results(module, given)
        with TorchOps() as seen:
            results(module, given)
    assert not {"aten::ones", "aten::zeros"} & {*seen.names}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cogview4", "easyanimate", "easyanimate, joined"])
def test_tables_on_the_cpu_rotate_queries_on_a_gpu(name: str, device: str) -> None:
    module, given = attention(name)
    module.to(device)
    given = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in given.items()}
    assert {table.device for table in given["image_rotary_emb"]} == {CPU}
    stock, found = results(module, given), rewritten(module)
    with one_model_call():
        for _ in range(3):
            fused = results(module, given)
        with TorchOps() as seen:
            results(module, given)
    sites = [site for site in found.sites if site.plan.rule.name == MODELS[name][2]]
    ran = [(site.fused_calls, site.original_calls, site.reasons) for site in sites]
    assert [each for each in ran if any(each)] == [(4, 0, {})], "those of other arguments do not run"
    assert "aten::_to_copy" not in seen.names
    for ours, theirs in zip(fused, stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
