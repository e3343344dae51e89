"""Linear layers of any model in fp8: which ones, their error, and copies of weights that are never out of date.

On the CPU ``config={"linear_fp8": "eager"}`` has the numbers behind fp8 multiplied.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import HunyuanVideoTransformer3DModel, QwenImageTransformer2DModel, WanTransformer3DModel
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn

from diffkern import InjectionReport, KernelConfig, forget, inject_optimized_kernels, inspection, plan, restore
from diffkern.blocks import fp8
from diffkern.cache import memory
from diffkern.injection import fp8_fusion, planning
from diffkern.inspection import verify_model
from diffkern.ops import activation_fp8
from diffkern.verify import gain
from diffkern.verify.contract import FP8_ALLOWANCE, FP8_ALLOWANCE_OF_TWO
from diffkern.verify.gain import Cost
from diffkern.verify.measures import relative_error
from tests.injection.models import replay_dependencies
from tests.pipelines.tiny import make_visible
from tests.stateful.models import SUBJECTS, Inputs

#: Has products in fp8 on any device.
EMULATED = {"linear_fp8": "eager"}


@pytest.fixture(autouse=True)
def _small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 32)
    monkeypatch.setattr(fp8_fusion, "LEAST_ROWS", 8)


@pytest.fixture
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU taken for a GPU with fp8: norms and processors run fused as well."""
    monkeypatch.setattr(planning, "fp8_unavailable_reason", lambda device: None)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="diffkern")
        yield


def _random(seed: int = 1) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).bfloat16()


def _qwen() -> nn.Module:
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip


def _qwen_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    return {
        "hidden_states": random(1, 64, 16),
        "encoder_hidden_states": random(1, 9, 32),
        "encoder_hidden_states_mask": torch.ones(1, 9, dtype=torch.bool),
        "timestep": torch.full((1,), 0.5, dtype=torch.bfloat16),
        "img_shapes": [[(1, 8, 8)]],
    }


def _flux_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    # A thousand times this is a number of bfloat16.
    return {**SUBJECTS["flux"].inputs(random, variant), "guidance": torch.full((variant + 1,), 4.0).bfloat16()}


def _wan() -> nn.Module:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=64, ffn_dim=96, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip


def _hunyuan() -> nn.Module:
    return HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=16, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=32,
        pooled_projection_dim=32, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def _hunyuan_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    return {
        "hidden_states": random(1, 4, 2, 6, 6),
        "timestep": torch.full((1,), 500),
        "encoder_hidden_states": random(1, 9, 32),
        "encoder_attention_mask": torch.ones(1, 9, dtype=torch.int64),
        "pooled_projections": random(1, 32),
        "guidance": torch.full((1,), 3500.0).bfloat16(),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Inputs]]] = {
    "qwen": (_qwen, _qwen_inputs),
    "hunyuan": (_hunyuan, _hunyuan_inputs),
    "flux": (SUBJECTS["flux"].build, _flux_inputs),
    "sd3": (SUBJECTS["sd3"].build, SUBJECTS["sd3"].inputs),
    "wan": (_wan, SUBJECTS["wan"].inputs),
}


def model_and_inputs(name: str) -> tuple[Any, Inputs]:
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build()
    make_visible(model)
    return nn.Module.to(model, torch.bfloat16).eval().requires_grad_(False), inputs(_random(), 1)


def output(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs, return_dict=False)[0]
    return result


def in_float64(model: nn.Module, inputs: Inputs) -> Tensor:
    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return output(nn.Module.double(copy.deepcopy(model)), {name: double(value) for name, value in inputs.items()})


def linear(features: int = 64, out: int = 48, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(features, out).to(dtype).requires_grad_(False)


def as_torchao(model: nn.Module, paths: list[str]) -> None:
    """Rounds inputs and weights of layers to e4m3, row by row, as dynamic quantisation in float8 does."""

    def rounded(x: Tensor) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale

    def replace(module: Any, args: tuple[Tensor], result: Tensor) -> Tensor:
        if args[0].numel() < fp8_fusion.LEAST_ROWS * args[0].shape[-1]:
            return result
        bias = None if module.bias is None else module.bias.float()
        return F.linear(rounded(args[0]), rounded(module.weight), bias).to(result.dtype)

    for path in paths:
        model.get_submodule(path).register_forward_hook(replace)


def in_fp8(report: InjectionReport) -> set[str]:
    """The layers that ran in fp8, alone or in a feed-forward that ran so."""
    ran = {site.path: site.op for site in report.patched if site.fused_calls}
    whole = [path for path, op in ran.items() if op == "feed_forward_fp8"]
    return {path for path, op in ran.items() if op == "linear_fp8"} | {
        f"{path}.net.{name}" for path in whole for name in ("0.proj", "2")
    }


@pytest.mark.usefixtures("on_this_device")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("flux", "wan") else pytest.mark.exhaustive) for name in MODELS]
)
def test_a_model_in_fp8_has_the_error_of_its_roundings_and_comes_back_bit_for_bit(name: str) -> None:
    model, inputs = model_and_inputs(name)
    stock, exact = output(model, inputs), in_float64(model, inputs)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    torchao = copy.deepcopy(model)
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    layers = [site for site in report.patched if site.op == "linear_fp8"]
    assert len(layers) >= 10 and not report.failed
    for site in layers:
        assert site.measurements
        assert all(0.01 < m.fused <= 1.05 * m.stock + FP8_ALLOWANCE for m in site.measurements)
    first, second = output(model, inputs), output(model, inputs)
    assert torch.equal(first, second)
    ran = in_fp8(report)
    alone = {site.path for site in layers if site.stock_calls.total() == 2}
    assert {site.path for site in layers} == ran | alone, "no forward computes around one"
    assert len(ran) >= 10 and {site.op for site in report.patched} > {"linear_fp8"}
    as_torchao(torchao, sorted(ran))
    error = relative_error(first, exact)
    assert relative_error(stock, exact) < error <= 1.3 * relative_error(output(torchao, inputs), exact)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    report.restore()
    assert torch.equal(output(model, inputs), stock)
    assert not any("_diffkern" in vars(module) or "forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("on_this_device")
def test_a_layer_before_a_gelu_is_called_and_not_computed_with_the_gelu() -> None:
    layer, x = GELU(64, 96, approximate="tanh").to(torch.bfloat16).requires_grad_(False), _random()(1, 32, 64)
    config = {**EMULATED, "linear_gelu": "eager"}
    report = inject_optimized_kernels(layer, numerics="fp8", config=config)
    expected = F.gelu(layer.proj(x), approximate="tanh")
    assert torch.equal(layer(x), expected)
    assert {site.path: site.fused_calls for site in report.patched} == {"proj": 2}
    report.restore()
    for config in ({"linear_fp8": None}, {"proj": None}, KernelConfig(fp8_exclude=("proj",))):
        rules = {"linear_gelu": "eager", **KernelConfig.of(config).rules}
        config = dataclasses.replace(KernelConfig.of(config), rules=rules)
        report = inject_optimized_kernels(layer, numerics="fp8", config=config)
        assert [site.op for site in report.patched] == ["linear_gelu"], "the layer stays in its dtype"
        report.restore()


def test_a_layer_computes_the_product_of_its_rounded_rows() -> None:
    layer, x = linear(), _random()(3, 20, 64)
    report = inject_optimized_kernels(layer, numerics="fp8", config=EMULATED)
    rows, weight = activation_fp8(x), activation_fp8(layer.weight)
    wide = [values.double() * scales.double() for values, scales in (rows, weight)]
    assert layer.bias is not None
    y = layer(x)
    torch.testing.assert_close(y.double(), wide[0] @ wide[1].t() + layer.bias.double(), rtol=2**-8, atol=1e-3)
    assert report.summary().startswith("patched 1 module of Linear: 1 ran fused (1 by eager)")
    assert "numerics 'fp8'" in report.summary()
    assert f"copies in fp8 will take {64 * 48 / 2**30:.2g} GiB beside the weights" in report.notes


def test_modulation_embeddings_and_the_first_and_last_layers_are_left_alone() -> None:
    model, _ = model_and_inputs("flux")
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    inside = {f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")}
    inside |= {"attn.to_add_out"} | {f"{ff}.net.{i}" for ff in ("ff", "ff_context") for i in ("0.proj", "2")}
    single = {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"}
    expected = {f"transformer_blocks.0.{name}" for name in inside}
    expected |= {f"single_transformer_blocks.0.{name}" for name in single}
    assert {site.path for site in report.patched if site.op == "linear_fp8"} == expected
    reasons = {site.path: site.reason for site in report.skipped}
    assert reasons["context_embedder"].startswith("a layer of a modulation, an embedding or a norm")
    assert reasons["transformer_blocks.0.norm1.linear"] == reasons["context_embedder"]
    other, _ = model_and_inputs("qwen")
    reasons = {site.path: site.reason for site in inject_optimized_kernels(other, numerics="fp8").skipped}
    assert reasons["txt_in"].startswith("a layer before or after the repeated blocks")
    assert reasons["transformer_blocks.0.img_mod.1"].startswith("a layer of a modulation")
    assert "eager" not in reasons["transformer_blocks.0.attn.to_q"]
    assert reasons["transformer_blocks.0.attn.to_q"].startswith("fp8 needs an NVIDIA GPU")


@pytest.mark.parametrize(
    ("parent", "stays"),
    [(name, True) for name in ("norm1_context", "adaLN_modulation", "img_mod", "time_in", "temb", "t_embedder")]
    + [(name, True) for name in ("distilled_guidance_layer", "emb_layers", "router", "text_embedder")]
    + [(name, False) for name in ("attn", "ff_context", "img_mlp", "single", "model", "modality", "times", "experts")],
)
def test_names_say_what_modulates_and_embeds(parent: str, stays: bool) -> None:
    model = nn.ModuleDict({parent: nn.ModuleDict({"to_q": linear()})})
    report = plan(model, numerics="fp8", config=EMULATED)
    assert bool(report.skipped) is stays and bool(report.patched) is not stays


def test_patterns_add_layers_and_take_them_away() -> None:
    model, inputs = model_and_inputs("qwen")
    config = KernelConfig(EMULATED, fp8_include=("txt_in", "proj_out"), fp8_exclude=("*.to_out.0", "proj_out"))
    report = inject_optimized_kernels(model, numerics="fp8", config=config)
    output(model, inputs)
    patched = {site.path for site in report.patched}
    assert "txt_in" in patched and "proj_out" not in patched
    assert {site.path: site.reason for site in report.skipped}["transformer_blocks.1.attn.to_out.0"] == (
        "left in its dtype by fp8_exclude"
    )
    assert report.calls()["txt_in"]["fused"] == 1
    for options in ({"fp8_include": ("to_q",)}, {"fp8_exclude": ("*.to_qq",)}):
        with pytest.raises(ValueError, match=r"fits no linear layer of this model; there are such as 'time_text_embed"):
            inject_optimized_kernels(model, numerics="fp8", config=KernelConfig(EMULATED, **options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fp8_include='to_q': pass a list"):
        KernelConfig(fp8_include="to_q")  # type: ignore[arg-type]
    assert KernelConfig.from_json(config.to_json()) == config


def test_what_no_card_computes_in_fp8_is_not_blamed_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).bfloat16()
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 1024)
    (site,) = inject_optimized_kernels(norm, numerics="fp8").skipped
    assert site.reason.startswith("no module here has a form in fp8 (no linear layer of a step has 1024 features or")
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 32)
    report = inject_optimized_kernels(norm.float(), numerics="fp8")
    assert "no module here has a form in fp8 (its weight is float32; float16 and" in " ".join(str(report).split())


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize(
    "config",
    [
        *(KernelConfig(EMULATED), KernelConfig(fp8_include=("0",)), KernelConfig(fp8_exclude=("0",))),
        KernelConfig(fp8_weights="replace"),
    ],
    ids=str,
)
def test_a_configuration_of_fp8_needs_numerics_of_fp8(numerics: str, config: KernelConfig) -> None:
    norm = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    with pytest.raises(ValueError, match=rf"numerics='{numerics}' computes nothing in fp8: pass 'fp8'"):
        inject_optimized_kernels(norm, numerics=numerics, config=config)
    assert "forward" not in vars(norm[1])


def test_the_report_says_the_error_by_kind_of_layer() -> None:
    model, _ = model_and_inputs("wan")
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    text = " ".join(str(report).split())
    said = text.partition("error by layer: ")[2]
    for name in ("attn1.to_q", "attn2.to_k", "ffn.net.0.proj", "ffn.net.2"):
        errors = [m.fused for site in report.patched if site.path.endswith(name) for m in site.measurements]
        assert errors and f"{name} {max(errors):.1%}" in said


@pytest.mark.parametrize("adapter_first", [True, False])
def test_an_adapter_is_computed_in_its_dtype_on_top_of_a_product_in_fp8(adapter_first: bool) -> None:
    model, inputs = model_and_inputs("flux")
    plain = in_float64(model, inputs)

    def add() -> None:
        names = ["to_q", "to_v", "to_out.0", "proj_mlp"]
        model.add_adapter(peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model.requires_grad_(False)

    if adapter_first:
        add()
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    before = output(model, inputs)
    if not adapter_first:
        add()
    counts = {path: count["fused"] for path, count in report.calls().items()}
    tuned, exact = output(model, inputs), in_float64(model, inputs)
    assert relative_error(tuned, exact) < 0.1 < relative_error(exact, plain)
    wrapped = "transformer_blocks.0.attn.to_q" + ".base_layer" * adapter_first
    assert report.calls()[wrapped]["fused"] == counts[wrapped] + 1
    if not adapter_first:
        model.unload_lora()
        assert torch.equal(output(model, inputs), before)
    report.restore()


def test_an_adapter_on_a_layer_is_exact_on_top() -> None:
    x, base = _random()(1, 32, 64), linear()
    inject_optimized_kernels(base, numerics="fp8", config=EMULATED)
    in_fp8 = base(x)
    model = peft.get_peft_model(
        nn.Sequential(base), peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    )
    model = model.to(torch.bfloat16).requires_grad_(False)
    layer: Any = model.base_model.model[0]
    adapter = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
    assert torch.equal(model(x), in_fp8 + adapter)


def test_a_write_is_noticed_counted_or_not_and_what_is_forgotten_is_made_again() -> None:
    model, inputs = model_and_inputs("wan")
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    before = output(model, inputs)
    layer = model.blocks[0].ffn.net[2]
    with torch.no_grad():
        layer.weight.mul_(-1.5)  # counted
    changed = output(model, inputs)
    assert relative_error(changed, in_float64(model, inputs)) <= 0.08 < relative_error(changed, before)
    layer.weight.data += 0.3  # not counted, as peft merges
    with pytest.warns(UserWarning, match="PyTorch does not count"):
        merged = output(model, inputs)
    assert relative_error(merged, in_float64(model, inputs)) <= 0.08 < relative_error(merged, changed)
    assert torch.equal(output(model, inputs), merged)
    assert forget(model) >= 10
    assert torch.equal(output(model, inputs), merged)
    report.restore()


def test_another_tier_over_this_one_is_refused() -> None:
    model, inputs = model_and_inputs("wan")
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    expected = output(model, inputs)
    for numerics in ("fast", "exact"):
        with pytest.raises(ValueError, match="already patched with numerics='fp8'"):
            inject_optimized_kernels(model, numerics=numerics)
    again = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    assert not again.patched and again.already == len(report.patched)
    assert torch.equal(output(model, inputs), expected)
    report.restore()
    assert inject_optimized_kernels(model, numerics="fast").restore()


def test_layers_that_read_one_tensor_have_it_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.ModuleList(linear() for _ in range(3))
    inject_optimized_kernels(layers, numerics="fp8", config=EMULATED)
    x, calls = _random()(2, 16, 64), []

    def counted(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(x)
        return activation_fp8(x, *args, **options)

    with torch.no_grad():
        expected = [layer(x.clone()) for layer in layers]  # quantises the weights
        monkeypatch.setattr(fp8, "activation_fp8", counted)
        assert all(map(torch.equal, [layer(x) for layer in layers], expected))
        assert len(calls) == 1
        for _ in range(2):  # the next steps, whose input may have been written by a replay
            x.data.neg_()
            step = [layer(x) for layer in layers]
        assert len(calls) == 3 and all(map(torch.equal, step, expected))
        layers[0](x)
        x.mul_(2)  # counted, between two readers
        assert not torch.equal(layers[1](x), expected[1]) and len(calls) == 5
        x.data = -x.data  # not counted, and at another address
        assert not torch.equal(layers[2](x), step[2]) and len(calls) == 6
        rows = weakref.ref(fp8.shared_rows(x, layers[0], "eager").values)
        del x, calls[:]
    assert rows() is None


def test_what_cannot_be_in_fp8_says_why_and_is_stock() -> None:
    layer, x = linear(), _random()(1, 32, 64)
    stock, few, mapped = layer(x), layer(x[:, :4]), torch.func.vmap(layer)(x[None])[0]
    report = inject_optimized_kernels(layer, numerics="fp8", config=EMULATED)
    assert torch.equal(layer(x[:, :4]), few)
    layer.requires_grad_(True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, stock) and layer.weight.grad is not None
    layer.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), stock)
    assert torch.equal(torch.func.vmap(layer)(x[None])[0], mapped)
    assert not torch.equal(layer(x), stock)
    with torch.inference_mode():
        assert torch.equal(layer(x.clone()), layer(x))
        layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    assert torch.equal(layer(x), stock)
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    assert torch.equal(layer(x), stock)
    reasons = report.calls()[""]["stock_reasons"]
    for part in ("fewer than 8 rows", "gradients are wanted", "autocast", "a transform", "inference tensor", "a hook"):
        assert any(part in reason for reason in reasons), (part, reasons)
    assert sum(reasons.values()) == 6


def test_a_weight_that_moves_at_every_call_keeps_no_copy() -> None:
    layer, x = linear(), _random()(1, 32, 64)
    stock = layer(x)
    report = inject_optimized_kernels(layer, numerics="fp8", config=EMULATED)
    for _ in range(8):  # as group offloading does with the parameters of a block
        layer.weight.data = layer.weight.data.clone()
        y = layer(x)
    assert torch.equal(y, stock)
    assert report.calls()[""]["fused"] == 4
    assert any("another one at every call" in reason for reason in report.calls()[""]["stock_reasons"])


def test_quantised_and_odd_layers_stay_with_a_reason() -> None:
    class Quantised(nn.Linear):
        """As other libraries have it."""

    class Packed(Tensor):
        """A weight of another library."""

    packed, double, odd = linear(), linear(dtype=torch.float64), linear(40, 48)
    packed.weight = nn.Parameter(packed.weight.data.as_subclass(Packed), requires_grad=False)
    model = nn.ModuleDict({"own": Quantised(64, 64), "packed": packed, "wide": double, "odd": odd, "fits": linear()})
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED, strict=True)
    assert [site.path for site in report.patched] == ["fits"]
    reasons = {site.path: site.reason for site in report.skipped}
    assert reasons["own"] == "a Quantised is left to the library that it is of"
    assert "its weight is a Packed" in reasons["packed"] and "its weight is float64" in reasons["wide"]
    assert "multiples of 16, and it has 40 x 48" in reasons["odd"]


def test_a_compiled_model_computes_as_it_is_written_and_the_report_says_so() -> None:
    layers, x = nn.Sequential(linear(64, 64), linear(64, 64)), _random()(1, 32, 64)
    with torch.no_grad():
        stock = layers(x)
        report = inject_optimized_kernels(layers, numerics="fp8", config=EMULATED)
        layers.compile(backend="aot_eager", fullgraph=True)
        with pytest.warns(UserWarning, match="its graphs hold no fp8"):
            assert torch.equal(layers(x), stock)
    assert any("traced Linear as numerics='fast' has it" in note for note in report.notes)
    torch._dynamo.reset()


def test_a_recorded_step_depends_on_the_copies() -> None:
    model, inputs = model_and_inputs("wan")
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    output(model, inputs)
    first = replay_dependencies(model)
    output(model, inputs)
    assert replay_dependencies(model) == first
    with torch.no_grad():
        model.blocks[1].ffn.net[2].weight.mul_(2)
    assert replay_dependencies(model) != first
    report.restore()


def test_copies_of_a_model_share_no_copies_of_weights() -> None:
    model, inputs = model_and_inputs("wan")
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    before = output(model, inputs)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].ffn.net[2].weight.mul_(3)
    assert not torch.equal(output(other, inputs), before)
    assert torch.equal(output(model, inputs), before)
    report.restore()


@pytest.mark.parametrize("approximate", ["gelu-approximate", "gelu"])
def test_a_gelu_between_two_layers_writes_its_rows_in_fp8(approximate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = FeedForward(64, mult=2, activation_fn=approximate).to(torch.bfloat16).eval().requires_grad_(False)
    x, functions = _random()(1, 32, 64), []
    stock, exact = module(x), copy.deepcopy(module).double()(x.double())
    report = inject_optimized_kernels(module, numerics="fp8", config=EMULATED)
    assert {site.op for site in report.patched} == {"feed_forward_fp8", "linear_fp8"} and not report.failed

    def noted(x: Tensor, function: str = "identity", **options: Any) -> tuple[Tensor, Tensor]:
        functions.append(function)
        return activation_fp8(x, function, **options)

    with monkeypatch.context() as within:
        for file in (fp8, fp8_fusion):
            within.setattr(file, "activation_fp8", noted)
        y = module(x)
    gelu = "gelu_tanh" if approximate == "gelu-approximate" else "gelu"
    assert [function for function in functions if function != "identity"] == [gelu]
    assert relative_error(stock, exact) < relative_error(y, exact) <= FP8_ALLOWANCE_OF_TWO
    calls = report.calls()
    assert calls[""]["fused"] == 1 and not calls["net.2"]["fused"]
    heard = []
    handle = module.net[0].proj.register_forward_hook(lambda *call: heard.append(call))
    assert relative_error(module(x), y.double()) < 0.03 and len(heard) == 1
    handle.remove()
    module.train()
    module.net[1].p = 0.5
    assert relative_error(module(x), y.double()) > 0.1, "it drops values"
    module.eval()
    assert torch.equal(module(x), y)
    report.restore()
    assert torch.equal(module(x), stock)


@pytest.mark.usefixtures("on_this_device")
def test_a_layer_that_gains_nothing_runs_as_it_is_written_and_keeps_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def slow(computations: Any, device: torch.device) -> list[Cost]:
        results = [compute() for compute in computations]
        timed.append(relative_error(results[0], results[1].double()))
        return [Cost(2.0, 1.5), Cost(3.0, 1.0)]

    monkeypatch.setattr(gain, "costs", slow)
    x, expected = _random()(1, 32, 64), {}
    for cuda_graph, gains in (("auto", False), (False, True)):
        layer = linear()
        stock = layer(x)
        measured = KernelConfig(measure=True)
        report = inject_optimized_kernels(layer, numerics="fp8", config=measured, cuda_graph=cuda_graph)
        expected[cuda_graph] = [torch.equal(layer(x), stock), torch.equal(layer(x), stock)]
        assert expected[cuda_graph] == [not gains] * 2, "as a replay only the device counts, else the host as well"
        assert bool(memory(layer)["fp8"].entries()) is gains
        assert any("no gain" in reason for reason in report.calls()[""]["stock_reasons"]) is not gains
    assert len(timed) == 2 and all(0.01 < error < 0.05 for error in timed)
    layer = linear()
    stock = layer(x)
    inject_optimized_kernels(layer, numerics="fp8", config=KernelConfig(EMULATED, measure=True))
    assert not torch.equal(layer(x), stock) and len(timed) == 2, "who names a provider wants it"


@pytest.mark.usefixtures("on_this_device")
@pytest.mark.parametrize("whole", [True, False])
def test_a_feed_forward_that_is_timed_runs_in_fp8_as_a_whole_or_layer_by_layer(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = FeedForward(64, mult=2, activation_fn="gelu-approximate").to(torch.bfloat16).eval().requires_grad_(False)
    x = _random()(1, 32, 64)
    stock, timed = module(x), []

    def costs(computations: Any, device: torch.device) -> list[Cost]:
        timed.append(torch.equal([compute() for compute in computations][1], stock))
        return [Cost(1.0, 1.0), Cost(3.0, 3.0)] if whole or len(timed) > 1 else [Cost(3.0, 3.0), Cost(1.0, 1.0)]

    monkeypatch.setattr(gain, "costs", costs)
    report = inject_optimized_kernels(module, numerics="fp8", config=KernelConfig(measure=True))
    y = module(x)
    assert 0.01 < relative_error(y, stock.double()) <= FP8_ALLOWANCE_OF_TWO
    calls = report.calls()
    assert calls[""]["fused"] == whole and calls["net.2"]["fused"] == (not whole)
    assert timed == [True, False, False][: 1 if whole else 3], "the whole against layers without fp8"


@pytest.mark.usefixtures("on_this_device")
def test_layers_of_ltx2_are_in_fp8_inside_of_its_block() -> None:
    subject = SUBJECTS["ltx2"]
    torch.manual_seed(0)
    model = subject.build()
    make_visible(model)
    model = nn.Module.to(model, torch.bfloat16).eval().requires_grad_(False)
    inputs = subject.inputs(_random(), 1)
    inputs = {k: v.bfloat16() if isinstance(v, Tensor) and k == "timestep" else v for k, v in inputs.items()}
    stock, exact = output(model, inputs), in_float64(model, inputs)
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED, verify=False)  # the proof takes seconds
    y = output(model, inputs)
    ran = {path.removeprefix("transformer_blocks.0.") for path in in_fp8(report)}
    assert ran > {"attn1.to_q", "attn1.to_out.0", "ff.net.0.proj", "ff.net.2"}
    assert not any(count["stock_pieces"] for count in report.calls().values())
    assert relative_error(stock, exact) < relative_error(y, exact) < 0.08
    report.restore()
    assert torch.equal(output(model, inputs), stock)


class Block(nn.Module):
    """Two layers, of which the second weighs more."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_v = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.to_q(x) + self.to_v(x)


class Denoiser(nn.Module):
    """Two of these blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, hidden_states: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return (hidden_states,)


@pytest.mark.usefixtures("on_this_device")
def test_verify_says_how_far_a_short_run_ends_from_stock_and_which_layers_cost_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, inputs = Denoiser().to(torch.bfloat16).requires_grad_(False), {"hidden_states": _random()(1, 32, 64)}
    stock, x = output(model, inputs), inputs["hidden_states"]
    result = verify_model(model, inputs, "fp8", float64=False)
    assert result.trajectory is not None and result.trajectory.steps == 4 and not result.trajectory.without
    psnr = result.trajectory.psnr
    assert f"whole model, after 4 steps: {psnr:.1f} dB against stock" in str(result)
    ends = []
    for injected in (False, True):
        if injected:
            inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
        end = x
        for _ in range(4):
            end = end - output(model, {"hidden_states": end}) / 4
        ends.append(end.double())
    root = (ends[1] - ends[0]).square().mean().sqrt()
    assert psnr == pytest.approx(20 * math.log10((ends[0].max() - ends[0].min()) / root)) and 30 < psnr < 50
    restore(model)
    monkeypatch.setattr(inspection, "POOR", psnr + 1)
    poor = inspection.follow(model, inputs, KernelConfig(measure=False))
    assert list(poor.without) == ["blocks.*.to_v", "blocks.*.to_q"] and poor.without["blocks.*.to_v"] > psnr + 5
    assert "KernelConfig(fp8_exclude=['blocks.*.to_v', 'blocks.*.to_q'])" in str(poor)
    assert torch.equal(output(model, inputs), stock)


REPLACED = KernelConfig(EMULATED, fp8_weights="replace")


@pytest.fixture
def weights_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU taken for a GPU: what goes to the memory of the host is not a number as long as it is there."""
    monkeypatch.setattr(planning, "_replaced", lambda weights, size: "")
    kept: dict[int, Tensor] = {}
    replace, put_back = fp8.replace_weight, fp8._put_back

    def away(layer: nn.Linear) -> None:
        replace(layer)
        kept[id(layer.weight)] = layer.weight.data
        layer.weight.data = torch.full_like(layer.weight, torch.nan)
        (copy,) = memory(layer)["fp8"].entries()
        copy.source = fp8.TensorFingerprint.of(layer.weight, sums=False)

    def back(layer: nn.Linear) -> None:
        layer.weight.data = kept.pop(id(layer.weight))
        put_back(layer)

    monkeypatch.setattr(fp8_fusion, "replace_weight", away)
    monkeypatch.setattr(fp8, "_put_back", back)


@pytest.mark.usefixtures("weights_elsewhere")
def test_copies_in_the_place_of_weights_are_all_that_is_read_and_go_when_the_model_is_restored() -> None:
    model, inputs = model_and_inputs("wan")
    stock, weights = output(model, inputs), {key: value.clone() for key, value in model.state_dict().items()}
    report = inject_optimized_kernels(model, numerics="fp8", config=EMULATED)
    beside = output(model, inputs)
    report.restore()
    report = inject_optimized_kernels(model, numerics="fp8", config=REPLACED)
    gone = [name for name, weight in model.named_parameters() if weight.isnan().any()]
    assert len(gone) == sum(site.op == "linear_fp8" for site in report.patched) >= 10
    assert torch.equal(output(model, inputs), beside) and torch.equal(output(model, inputs), beside)
    few = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][:, :2]}
    assert output(model, few).isfinite().all(), "few rows, too, since nothing else can compute them"
    report.restore()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items()) and not fp8._away
    assert torch.equal(output(model, inputs), stock)


def test_weights_are_replaced_where_that_makes_room_and_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(), _random()(1, 32, 64)
    with pytest.raises(ValueError, match=r"weights are on cpu: call pipe\.to\('cuda'\) before"):
        inject_optimized_kernels(layer, numerics="fp8", config=REPLACED)
    assert "forward" not in layer.__dict__
    with pytest.raises(ValueError, match="fp8_weights='replaced': choose 'keep' or 'replace'"):
        KernelConfig(fp8_weights="replaced")
    assert KernelConfig.from_dict(REPLACED.to_dict()) == REPLACED
    fusion = fp8_fusion.Fp8Fusion("net.2", replaces=True)
    monkeypatch.setattr(fp8_fusion, "STORE", layer.weight.device)
    elsewhere = x.to("meta")
    with pytest.raises(RuntimeError, match=r"net\.2 cannot run in fp8.*fp8_weights='replace'.*restore\(\) brings"):
        fusion.declines(layer, elsewhere)


@pytest.mark.gpu
def test_on_a_gpu_weights_halve_and_come_back_bit_for_bit() -> None:
    layers = nn.Sequential(*[linear(2048, 2048) for _ in range(8)]).cuda()
    x = torch.randn(1, 64, 2048).cuda().bfloat16()
    weights = {key: value.clone().cpu() for key, value in layers.state_dict().items()}
    with torch.no_grad():
        stock = layers(x)
        report = inject_optimized_kernels(layers, numerics="fp8", config=KernelConfig(measure=False))
        beside = layers(x)
        report.restore()
        before = torch.cuda.memory_allocated()
        config = KernelConfig(measure=False, fp8_weights="replace")
        report = inject_optimized_kernels(layers, numerics="fp8", config=config)
        assert torch.cuda.memory_allocated() - before < -0.4 * 8 * 2048 * 2048 * 2
        assert torch.equal(layers(x), beside)
        assert relative_error(layers(x[:, :4]), beside[:, :4].double()) < 0.01
        assert all(torch.equal(value.cpu(), weights[key]) for key, value in layers.state_dict().items())
        with torch.autocast("cuda"), pytest.raises(RuntimeError, match="restore\\(\\) brings it back"):
            layers(x)
        layers[0].weight.neg_()  # on the host, and counted
        assert not torch.equal(layers(x), beside)
        layers[0].weight.neg_()
        report.restore()
        assert torch.equal(layers(x), stock) and all(p.is_cuda for p in layers.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_graphs_keep_fp8_and_notice_a_changed_weight(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 numbers")
    model, inputs = model_and_inputs("flux")
    model.to("cuda", dtype)
    inputs = {name: value.to("cuda", dtype if value.is_floating_point() else None) for name, value in inputs.items()}
    report = inject_optimized_kernels(model, numerics="fp8", cuda_graph=True)
    layers = [site for site in report.patched if site.op == "linear_fp8"]
    assert len(layers) == 17 and not report.failed
    results = [output(model, inputs) for _ in range(4)]
    exact = in_float64(model, inputs)
    assert all(0.005 < relative_error(result, exact) <= 0.15 for result in results)
    assert torch.equal(results[-1], results[-2])
    with torch.no_grad():
        model.transformer_blocks[0].ff.net[2].weight.mul_(-3)
    exact = in_float64(model, inputs)
    assert relative_error(results[-1], exact) > 0.15
    assert all(relative_error(output(model, inputs), exact) <= 0.15 for _ in range(3))
    report.restore()
