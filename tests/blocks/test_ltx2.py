"""The block of LTX-2, found by rules: every configuration as accurate as the stock one, and its bits where exact."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AudioVideoRotaryPosEmbed,
    LTX2PerturbedAttnProcessor,
    LTX2VideoTransformerBlock,
)
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.bench.measure import relative_error
from diffkern.cache import memory
from diffkern.ops.registration import Op
from tests.blocks.test_ltx import in_float64
from tests.injection.models import randomise
from tests.pipelines.tiny import make_visible
from tests.stateful.models import SUBJECTS

DIM, SOUND = 48, 32

#: What one call of the block runs: six residuals with the norm behind them, two last residuals, the other norms, and
#: queries and keys of six attentions.
FUSED = {"gate_residual_norm_modulate": 6, "gate_residual": 2, "norm_modulate": 4, "qk_norm_rope": 6}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"rope_type": "split"},
    "gated": {"video_gated_attn": True, "audio_gated_attn": True, "rope_type": "split"},
    "modulated text": {"video_cross_attn_adaln": True, "audio_cross_attn_adaln": True},
    "modulated text of the video": {"video_cross_attn_adaln": True},
}


def block(dtype: torch.dtype = torch.float32, **options: Any) -> LTX2VideoTransformerBlock:
    layer = LTX2VideoTransformerBlock(
        dim=DIM, num_attention_heads=3, attention_head_dim=16, cross_attention_dim=DIM,
        audio_dim=SOUND, audio_num_attention_heads=2, audio_attention_head_dim=16, audio_cross_attention_dim=SOUND,
        **options,
    )  # fmt: skip
    randomise(layer)
    return layer.eval().requires_grad_(False).to(dtype)


def inputs(layer: nn.Module, dtype: torch.dtype, *, per_token: bool = False, masked: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    length, sound = 33, 11

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def tables(attention: Any, count: int) -> tuple[Tensor, Tensor]:
        embedding = LTX2AudioVideoRotaryPosEmbed(
            attention.inner_dim, modality="audio", rope_type=attention.rope_type, num_attention_heads=attention.heads
        )
        return embedding(torch.arange(count, dtype=torch.float32).expand(2, 1, count))

    n, m = (length, sound) if per_token else (1, 1)
    mask = torch.zeros(2, 1, 7, dtype=dtype)
    mask[0, :, 4:] = -10000.0
    return {
        "hidden_states": random(2, length, DIM),
        "audio_hidden_states": random(2, sound, SOUND),
        "encoder_hidden_states": random(2, 7, DIM),
        "audio_encoder_hidden_states": random(2, 7, SOUND),
        "temb": random(2, n, layer.scale_shift_table.numel()),
        "temb_audio": random(2, m, layer.audio_scale_shift_table.numel()),
        "temb_ca_scale_shift": random(2, n, 4 * DIM),
        "temb_ca_audio_scale_shift": random(2, m, 4 * SOUND),
        "temb_ca_gate": random(2, n, DIM),
        "temb_ca_audio_gate": random(2, m, SOUND),
        "temb_prompt": random(2, 1, 2 * DIM) if layer.cross_attn_adaln else None,
        "video_rotary_emb": tables(layer.attn1, length),
        "audio_rotary_emb": tables(layer.audio_attn1, sound),
        "ca_video_rotary_emb": tables(layer.audio_to_video_attn, length),
        "ca_audio_rotary_emb": tables(layer.video_to_audio_attn, sound),
        "encoder_attention_mask": mask if masked else None,
        "audio_encoder_attention_mask": mask if masked else None,
    }


def joined(result: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in result])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_as_close_to_float64_as_the_stock_block(name: str, dtype: torch.dtype) -> None:
    layer = block(dtype, **CONFIGURATIONS[name])
    wide = block(**CONFIGURATIONS[name]).to(dtype).double()
    for kind in ({}, {"per_token": True, "masked": False}):
        arguments = inputs(layer, dtype, **kind)
        reference = joined(wide(**{key: in_float64(value) for key, value in arguments.items()}))
        stock = layer(**arguments)
        report = inject_optimized_kernels(layer)
        fused = layer(**arguments)
        assert report.calls()[""]["fused"] and not report.calls()[""]["stock"]
        assert [(y.dtype, y.shape) for y in fused] == [(y.dtype, y.shape) for y in stock]
        slack = 1e-6 if dtype == torch.float32 else 0
        error, stock_error = (relative_error(joined(y), reference) for y in (fused, stock))
        assert error <= 1.05 * stock_error + slack
        report.restore()
        assert torch.equal(joined(layer(**arguments)), joined(stock))


@pytest.mark.exhaustive  # a proof of bits draws 256 times for a block as small as this one
@pytest.mark.parametrize(("name", "dtype"), [("gated", torch.bfloat16), ("modulated text", torch.float32)])
def test_exact_is_bit_identical(name: str, dtype: torch.dtype) -> None:
    layer = block(dtype, **CONFIGURATIONS[name])
    report = inject_optimized_kernels(layer, numerics="exact")
    for kind in ({}, {"per_token": True, "masked": False}):
        arguments = inputs(layer, dtype, **kind)
        assert torch.equal(joined(layer(**arguments)), joined(type(layer).forward(layer, **arguments)))
    assert report.calls()[""]["fused"] and not report.calls()[""]["stock"]


def ops_of(layer: nn.Module, arguments: dict[str, Any]) -> Counter[str]:
    """How often one call runs each fused op."""
    found: Counter[str] = Counter()
    plain = Op.call

    def counted(op: Op, *given: Any) -> Any:
        found[op.op.name().removeprefix("diffkern::")] += 1
        return plain(op, *given)

    layer(**arguments)  # with the proofs of what is met for the first time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "call", counted)
        layer(**arguments)
    return found


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_elementwise_on_the_streams_is_left_beside_the_fused_ops(name: str) -> None:
    layer = block(**CONFIGURATIONS[name])
    inject_optimized_kernels(layer)
    text = 2 if layer.cross_attn_adaln else 0  # whose states are modulated
    assert ops_of(layer, inputs(layer, torch.float32)) == {**FUSED, "norm_modulate": FUSED["norm_modulate"] + text}


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)])
def test_streams_that_do_not_attend_to_each_other(flags: tuple[bool, bool]) -> None:
    layer = block()
    arguments = inputs(layer, torch.float32)
    arguments |= {"use_a2v_cross_attention": flags[0], "use_v2a_cross_attention": flags[1]}
    stock = layer(**arguments)
    inject_optimized_kernels(layer)
    torch.testing.assert_close(joined(layer(**arguments)), joined(stock), rtol=1e-4, atol=1e-4)
    pairs = ops_of(layer, arguments)["gate_residual_norm_modulate"]
    assert pairs == (4 if not any(flags) else 2)


def test_perturbed_attention_runs_as_it_is_inside_of_a_fused_block() -> None:
    layer = block(perturbed_attn=True)
    assert type(layer.attn1.processor) is LTX2PerturbedAttnProcessor
    arguments = inputs(layer, torch.float32) | {"perturbation_mask": torch.tensor([0.0, 1.0]).view(2, 1, 1)}
    stock = layer(**arguments, all_perturbed=False)
    report = inject_optimized_kernels(layer)
    torch.testing.assert_close(joined(layer(**arguments, all_perturbed=False)), joined(stock), rtol=1e-4, atol=1e-4)
    assert report.calls()[""]["fused"] and not report.calls()[""]["stock"]


@pytest.mark.parametrize("child", ["norm1", "audio_norm2", "attn2", "audio_to_video_attn", "video_to_audio_norm", "ff"])
def test_a_hook_on_a_child_is_called_and_its_result_used(child: str) -> None:
    layer = block()
    arguments = inputs(layer, torch.float32)
    inject_optimized_kernels(layer)
    called = []
    layer.get_submodule(child).register_forward_hook(lambda *call: called.append(1) or call[-1] * 1.5)
    expected = type(layer).forward(layer, **arguments)
    called.clear()
    torch.testing.assert_close(joined(layer(**arguments)), joined(expected), rtol=1e-4, atol=1e-4)
    assert called == [1]


def test_gradients_are_those_of_the_stock_block() -> None:
    layer = block().requires_grad_(True)
    arguments = inputs(layer, torch.float32)
    x = arguments["hidden_states"].requires_grad_()
    joined(layer(**arguments)).sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad()
    x.grad = None
    inject_optimized_kernels(layer)
    joined(layer(**arguments)).sum().backward()
    for own, other in zip([x.grad, *(parameter.grad for parameter in layer.parameters())], expected, strict=True):
        if other is not None:
            assert own is not None and relative_error(own, other) < 1e-4


def test_unknown_arguments_fail_as_in_the_stock_block() -> None:
    layer = block()
    arguments = inputs(layer, torch.float32)
    inject_optimized_kernels(layer)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        layer(**arguments, speed=2)


@torch.no_grad()
def test_keys_and_values_of_the_text_are_kept_from_step_to_step() -> None:
    subject = SUBJECTS["ltx2"]
    torch.manual_seed(0)
    model = subject.build()
    make_visible(model)
    model.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    steps = [subject.inputs(lambda *shape: torch.randn(shape, generator=generator), 1)]
    steps += [{**steps[0], "timestep": steps[0]["timestep"] - 100 * number} for number in (1, 2, 3)]
    expected = [joined(model(**step, return_dict=False)) for step in steps]
    inject_optimized_kernels(model)
    attention = model.transformer_blocks[1].attn2
    for step, stock in zip(steps, expected, strict=True):
        torch.testing.assert_close(joined(model(**step, return_dict=False)), stock, rtol=1e-4, atol=1e-4)
    layers = memory(attention)["texts"]
    assert set(layers) == {"to_k", "to_v"} and not memory(model.transformer_blocks[1].attn1)
    kept = layers["to_k"].texts[0].result
    model(**steps[0])
    assert kept is not None and layers["to_k"].texts[0].result is kept
    attention.to_k.register_forward_hook(lambda module, args, result: 2 * result)
    y = joined(model(**steps[0], return_dict=False))
    assert "to_k" not in memory(attention)["texts"]
    restore(model)
    torch.testing.assert_close(y, joined(model(**steps[0], return_dict=False)), rtol=1e-4, atol=1e-4)
    assert not memory(attention)
