"""The arms of a comparison leave a model exactly as they found it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diffkern.attention import BACKENDS
from diffkern.bench.arms import (
    ARMS,
    COMPILED,
    FAST,
    FAST_COMPILED,
    FAST_GRAPH,
    FLOAT32,
    FP8,
    FP8_ATTENTION,
    NAMED,
    STOCK,
    TORCHAO,
    Arm,
    ArmUnavailableError,
    applied,
    compiled,
    unavailable_reason,
)
from diffkern.injection import fp8_fusion
from diffkern.providers.eager import fp8 as eager_fp8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).sin()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).requires_grad_(False)


def test_compiled_computes_the_same_and_leaves_no_trace() -> None:
    model, x = make_model(), torch.randn(4, 64)
    expected = model(x)
    attributes = [set(module.__dict__) for module in model.modules()]
    with compiled(model, backend="eager"):
        assert model._compiled_call_impl is not None
        torch.testing.assert_close(model(x), expected)
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert torch.equal(model(x), expected)


def test_compiled_puts_back_what_the_user_had_compiled() -> None:
    model = make_model()
    model[0].compile(backend="eager")
    mine = model[0]._compiled_call_impl
    with compiled(model, backend="eager"):
        pass
    assert model[0]._compiled_call_impl is mine
    assert model._compiled_call_impl is None


def test_compiled_takes_only_the_repeated_blocks_of_a_diffusers_model() -> None:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
    )
    with compiled(model, backend="eager"):
        taken = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert taken == ["transformer_blocks.0", "transformer_blocks.1"]
    with compiled(model, as_graph=True, backend="eager"):
        taken = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert taken == [""]


def test_the_model_is_stock_again_after_an_arm_that_raised() -> None:
    model, x = make_model(), torch.randn(4, 64)
    expected = model(x)
    with pytest.raises(RuntimeError, match="stop"), applied(FAST_COMPILED, model, model):
        raise RuntimeError("stop")
    assert "forward" not in model[0].norm.__dict__
    assert model._compiled_call_impl is None
    assert torch.equal(model(x), expected)


def test_each_arm_says_what_it_does() -> None:
    names = ["stock", "stock + compile", "exact", "fast", "fast + graph", "fast + compile", "fp8", "fp8 + graph"]
    assert [arm.name for arm in ARMS] == names
    assert ARMS[0] is STOCK
    assert Arm("fast", cuda_graph=True, compiled=True).name == "fast + graph + compile"


def test_an_arm_that_could_not_be_what_it_says_is_refused_with_the_reason_and_leaves_the_model_stock() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False), torch.randn(2, 8)
    expected = model(x)
    with pytest.raises(ArmUnavailableError, match="nothing in the pipeline"), applied(FAST, model, model):
        raise AssertionError("the arm must not run")
    assert torch.equal(model(x), expected)


def test_what_a_device_lacks_is_known_before_anything_runs() -> None:
    cpu = torch.device("cpu")
    assert unavailable_reason(STOCK, cpu) is None
    assert unavailable_reason(FAST, cpu) is None
    assert "CUDA graphs need a GPU" in str(unavailable_reason(FAST_GRAPH, cpu))
    assert unavailable_reason(COMPILED, cpu) == unavailable_reason(FAST_COMPILED, cpu)
    assert "fp8 needs an NVIDIA GPU" in str(unavailable_reason(FP8, cpu))


@pytest.mark.gpu
def test_torchao_quantises_the_layers_that_are_computed_in_fp8_and_gives_their_weights_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 32)
    layers = nn.ModuleDict({"to_q": nn.Linear(64, 64), "embed": nn.Linear(64, 64)})
    layers.to(torch.bfloat16).requires_grad_(False)
    weights = {name: layer.weight for name, layer in layers.items()}
    with applied(Arm(torchao=True), layers, layers):
        assert type(layers["to_q"].weight) is not nn.Parameter and layers["embed"].weight is weights["embed"]
    assert all(layer.weight is weights[name] for name, layer in layers.items())
    assert "extra_repr" not in vars(layers["to_q"])


def test_torchao_is_an_arm_by_name_that_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NAMED["torchao float8 + compile"] is TORCHAO and TORCHAO not in ARMS
    assert unavailable_reason(TORCHAO, torch.device("cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install torchao" in str(unavailable_reason(TORCHAO, torch.device("cpu")))


def test_blocks_that_are_compiled_one_by_one_may_be_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_fp8, "fp8_unavailable_reason", lambda device: None)
    cpu = torch.device("cpu")
    assert unavailable_reason(FP8, cpu) is None
    assert unavailable_reason(Arm("fp8", compiled=True), cpu) == unavailable_reason(COMPILED, cpu)


def test_the_arm_in_float32_is_the_exact_result_of_the_same_weights() -> None:
    model, x = make_model().bfloat16(), torch.randn(4, 64, dtype=torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = make_model()
    expected.load_state_dict(state)
    with applied(FLOAT32, model, model) as report:
        assert report is None and FLOAT32.name == "stock float32"
        assert torch.equal(model(x), expected(x.float()))
    assert model(x).dtype == torch.bfloat16 and not model._forward_pre_hooks
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_arm_with_attention_in_fp8_says_what_it_lacks() -> None:
    assert FP8_ATTENTION.name == "fp8 + cudnn_fp8" and NAMED[FP8_ATTENTION.name] is FP8_ATTENTION
    plain = replace(FP8_ATTENTION, numerics="fast", cuda_graph=False)
    if BACKENDS["cudnn_fp8"].missing() is not None:
        assert "diffkern[cudnn]" in (unavailable_reason(plain, torch.device("cpu")) or "")
    with pytest.raises(ArmUnavailableError), applied(replace(plain, attention="native"), make_model(), make_model()):
        pass
