"""Fused blocks, LoRA, low-VRAM mode, compiling, quantised weights, training: ComfyUI itself, on tiny random models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from diffkern.comfyui.optimize import not_optimized, optimize, optimize_vae
from diffkern.comfyui.optimize import without_diffkern as without
from diffkern.comfyui.patcher import patches_of
from tests.comfyui import checkpoints, native

KINDS = ["ltx", "ltx2", "flux", "hunyuan", "wan"]

#: A linear layer and a norm of each model, for adapters.
ADAPTED = {
    "ltx": ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.attn1.q_norm"),
    "ltx2": ("transformer_blocks.0.audio_to_video_attn.to_q", "transformer_blocks.0.audio_attn1.k_norm"),
    "flux": ("double_blocks.0.img_attn.qkv", "single_blocks.1.norm.query_norm"),
    "hunyuan": ("double_blocks.0.txt_attn.qkv", "double_blocks.0.img_attn.norm.key_norm"),
    "wan": ("blocks.0.self_attn.q", "blocks.1.cross_attn.norm_k"),
}


@pytest.fixture(scope="module")
def files(comfyui: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: checkpoints.write(kind, folder / f"{kind}.safetensors") for kind in KINDS}


@pytest.fixture(autouse=True)
def as_comfyui_runs_nodes(comfyui: None) -> Iterator[None]:
    """In inference mode, from loading to unloading."""
    import comfy.model_management

    with torch.inference_mode():
        yield
        comfy.model_management.unload_all_models()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(files: dict[str, Path], kind: str) -> Any:
    return native.load(files[kind])


def near(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return bool(torch.isfinite(a).all() and (a - b).norm() <= tolerance * b.norm())


def adapted(model: Any, kind: str) -> Any:
    """A clone with an adapter on a linear layer and on a norm."""
    generator = torch.Generator().manual_seed(4)
    keys = [f"diffusion_model.{name}.weight" for name in ADAPTED[kind]]
    weights = model.model.state_dict()
    patches = {key: ("diff", (torch.randn(weights[key].shape, generator=generator) * 0.3,)) for key in keys}
    clone = model.clone()
    assert set(clone.add_patches(patches, 1.0)) == set(keys)
    return clone


def test_the_names_of_events_are_those_of_comfyui() -> None:
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    from diffkern.comfyui import patcher

    assert (patcher._ON_CLONE, patcher.ON_CLEANUP) == (CallbacksMP.ON_CLONE, CallbacksMP.ON_CLEANUP)
    assert WrappersMP.APPLY_MODEL == patcher.APPLY_MODEL


def test_everything_runs_fused_and_bypassing_gives_the_native_bits(model: Any, kind: str) -> None:
    before = native.sample(model, kind)
    optimized, report = optimize(model)
    after = native.sample(optimized, kind)
    calls = report.calls()

    assert near(after, before) and not torch.equal(after, before)
    assert report.patched and not report.failed and not report.skipped
    blocks = [count for path, count in calls.items() if "connector" not in path]
    assert all(count["fused"] >= 2 and not count["stock"] and not count["stock_pieces"] for count in blocks)
    assert torch.equal(native.sample(model, kind), before)
    assert torch.equal(native.sample(without(optimized), kind), before)


def test_a_block_writes_into_its_arguments_what_the_native_one_writes(model: Any, kind: str) -> None:
    """The blocks of Flux, LTX-Video and LTX-2 return the very tensors that they were given."""
    patches = {p.module: p for path, p in patches_of(optimize(model)[0]).items() if re.search(r"blocks\.\d+$", path)}
    calls: dict[Any, Any] = {}

    def record(module: Any, args: Any, kwargs: Any) -> None:
        calls[module] = [tree_map_only(Tensor, torch.clone, (args, kwargs)) for _ in range(2)]

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in patches]
    native.sample(model, kind)
    for hook in hooks:
        hook.remove()
    written = 0
    for module, (one, other) in calls.items():
        stock, fused = type(module).forward(module, *one[0], **one[1]), patches[module].forward(*other[0], **other[1])
        given = [[*_tensors((*args, *kwargs.values())), None] for args, kwargs in (one, other)]
        for ours, theirs in zip(_tensors(fused), _tensors(stock), strict=True):
            assert near(ours, theirs)
            assert [ours is each for each in given[1]] == [theirs is each for each in given[0]]
            written += any(ours is each for each in given[1])
        assert all(near(ours, theirs) for ours, theirs in zip(*map(_tensors, (other[0], one[0])), strict=True))
    assert calls and bool(written) == (kind != "wan")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple) else []


def test_exact_mode_gives_the_native_bits(model: Any, kind: str) -> None:
    before = native.sample(model, kind)
    optimized, report = optimize(model, numerics="exact")

    assert torch.equal(native.sample(optimized, kind), before)
    assert all(m.bit_identical for site in report.patched for m in site.measurements)
    if kind in ("ltx", "hunyuan"):
        assert sum(count["fused"] for count in report.calls().values()) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(model: Any, kind: str, dtype: torch.dtype) -> None:
    half = model.clone()
    half.set_model_compute_dtype(dtype)
    optimized, report = optimize(half)
    exact, _ = optimize(half, numerics="exact")
    expected = native.sample(half, kind)

    assert near(native.sample(optimized, kind), expected, 0.03)
    assert report.patched and not any(site.stock_calls for site in report.patched)
    assert all({m.dtype for m in site.measurements} >= {str(dtype)[6:]} for site in report.patched)
    assert torch.equal(native.sample(exact, kind), expected)


def test_a_lora_has_its_effect_before_and_after_the_node(model: Any, kind: str) -> None:
    plain, expected = native.sample(model, kind), native.sample(adapted(model, kind), kind)
    optimized, _ = optimize(model)

    assert not near(expected, plain, 1e-4)
    assert near(native.sample(adapted(optimized, kind), kind), expected)
    assert near(native.sample(optimize(adapted(model, kind))[0], kind), expected)
    assert near(native.sample(optimized, kind), plain)


def test_a_lora_after_a_deep_clone_has_its_effect(model: Any, kind: str) -> None:
    expected = native.sample(adapted(model, kind), kind)
    deep = optimize(model)[0].clone(force_deepcopy=True)

    assert deep.model is not model.model and patches_of(deep)
    assert near(native.sample(adapted(deep, kind), kind), expected)
    assert all(patch.counts.fused_calls for path, patch in patches_of(deep).items() if "connector" not in path)


def test_low_vram_mode_with_a_lora(model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are functions of the weights then, which only ComfyUI's cast calls."""
    import comfy.model_management

    expected = native.sample(adapted(model, kind), kind)
    optimized = adapted(optimize(model)[0], kind)
    comfy.model_management.unload_all_models()
    optimized.patch_model(torch.device("cpu"), lowvram_model_memory=1)
    with monkeypatch.context() as patch:
        patch.setattr(comfy.model_management, "load_models_gpu", lambda *_, **__: None)
        functions = [module for module in optimized.model.modules() if getattr(module, "weight_function", None)]
        result = native.sample(optimized, kind)
    optimized.unpatch_model()

    assert len(functions) == 2
    assert near(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["compiled last", "compiled first"])
@pytest.mark.parametrize("kind", ["ltx", "flux", "wan"])
def test_torch_compile_on_either_side(files: dict[str, Path], kind: str, order: str) -> None:
    from comfy_extras.nodes_torch_compile import TorchCompileModel
    from torch._dynamo.utils import counters

    model = native.load(files[kind])
    expected = native.sample(model, kind)
    counters.clear()
    if order == "compiled last":
        both = TorchCompileModel.execute(optimize(model)[0], "inductor")[0]
    else:
        both = optimize(TorchCompileModel.execute(model, "inductor")[0])[0]
    result = native.sample(both, kind)
    ours = [name for name in counters["graph_break"] if "diffkern" in name]

    assert patches_of(both) and near(result, expected)
    assert not ours
    assert torch.equal(native.sample(model, kind), expected)
    torch._dynamo.reset()


def test_linear_layers_of_any_storage_format_are_called(model: Any, kind: str) -> None:
    """A GGUF checkpoint has layers that hold packed bytes and unpack them in their own forward."""
    import comfy.ops

    class Packed(comfy.ops.manual_cast.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.packed.float() * self.scale
            return torch.nn.functional.linear(x, weight, self.bias)

    expected = None
    for _, module in model.model.diffusion_model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.scale = module.weight.abs().max() / 127
            module.packed = (module.weight / module.scale).round().to(torch.int8)
            module.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            module.__class__ = Packed
    expected = native.sample(model, kind)
    optimized, report = optimize(model)

    assert not report.failed and near(native.sample(optimized, kind), expected)
    assert sum(count["fused"] for count in report.calls().values()) > 0


@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_norms_of_a_class_that_is_not_known_are_called(model: Any, kind: str) -> None:
    """Loaders of other formats bring norms of their own."""
    import comfy.ops

    class LayerNorm(comfy.ops.manual_cast.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y * 1.5

    for module in model.model.diffusion_model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.__class__ = LayerNorm
    expected = native.sample(model, kind)
    optimized, _ = optimize(model)

    assert near(native.sample(optimized, kind), expected)
    assert not {name for name in _norms(optimized) if not re.search("query_norm|key_norm", name)}


def _norms(model: Any) -> set[str]:
    """The norms that rewritten blocks compute themselves."""
    patches = [patch for path, patch in patches_of(model).items() if path.endswith("blocks.0")]
    return {".".join(path) for patch in patches for site in patch.sites for path in site.plan.modules.values()}


@pytest.mark.parametrize("kind", ["flux", "wan"])
def test_norms_of_a_gguf_loader_are_fused_where_they_have_no_weights(model: Any, kind: str) -> None:
    import comfy.ops

    class LayerNorm(comfy.ops.manual_cast.LayerNorm):
        def forward_comfy_cast_weights(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward_comfy_cast_weights(x)
            return y

    for module in model.model.diffusion_model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.__class__ = LayerNorm
    expected = native.sample(model, kind)
    optimized, _ = optimize(model)

    assert near(native.sample(optimized, kind), expected)
    expected_norms = {"norm1", "norm2"} if kind == "wan" else {"img_norm1", "img_norm2", "txt_norm1", "pre_norm"}
    assert expected_norms <= _norms(optimized)


def test_a_float8_checkpoint(files: dict[str, Path], kind: str) -> None:
    """Weights that ComfyUI casts at every call, the norms' among them."""
    model = native.load(files[kind], dtype=torch.float8_e4m3fn)
    expected = native.sample(model, kind)
    optimized, report = optimize(model)

    assert report.patched and near(native.sample(optimized, kind), expected)


@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_checkpoint(files: dict[str, Path], kind: str, storage: torch.dtype, tmp_path: Path) -> None:
    """Layers with tensors of a layout of their own are called as they are."""
    path = checkpoints.quantise(files[kind], tmp_path / "quantised.safetensors", storage)
    model = native.load(path)
    layers = [m for m in model.model.diffusion_model.modules() if hasattr(m, "layout_type")]
    expected = native.sample(model, kind)
    optimized, report = optimize(model)

    assert layers and expected.isfinite().all() and report.patched and not report.failed
    # Inputs are quantised too, which makes a rounding into a step.
    assert near(native.sample(optimized, kind), expected, 0.03)
    assert near(native.sample(adapted(optimized, kind), kind), native.sample(adapted(model, kind), kind), 0.03)


def test_training_runs_the_native_forwards(model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management

    optimized, report = optimize(model)
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    expected = native.sample(model, kind)

    assert torch.equal(native.sample(optimized, kind), expected)
    reasons = {reason for count in report.calls().values() for reason in count["stock_reasons"]}
    assert reasons == {"ComfyUI is training"}
    assert not any(count["fused"] for count in report.calls().values())


def test_an_attention_override_of_another_node_is_respected(model: Any, kind: str) -> None:
    seen: list[int] = []

    def override(attend: Any, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(1)
        result: Tensor = attend(*args, **kwargs)
        return result

    results = []
    for each in (model, optimize(model)[0]):
        clone = each.clone()
        clone.model_options["transformer_options"]["optimized_attention_override"] = override
        seen.clear()
        results.append((native.sample(clone, kind), len(seen)))

    assert near(results[1][0], results[0][0]) and results[1][1] == results[0][1] > 0


@pytest.mark.parametrize(("kind", "patch"), [("flux", "attn1_patch"), ("wan", "attn1_patch"), ("wan", "attn2_patch")])
def test_patches_inside_the_attention_see_what_they_expect(files: dict[str, Path], kind: str, patch: str) -> None:
    def flux(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"q": q * 1.1, "k": k, "v": v}

    def wan(values: dict[str, Any]) -> Tensor:
        result: Tensor = values["x"] * 0.9
        return result

    model = native.load(files[kind])
    results = []
    optimized, report = optimize(model)
    for each in (model, optimized):
        clone = each.clone()
        clone.set_model_patch(flux if kind == "flux" else wan, patch)
        results.append(native.sample(clone, kind))

    assert near(results[1], results[0])
    assert any("another node patches" in reason for c in report.calls().values() for reason in c["stock_reasons"])


def test_a_block_that_another_node_wraps_is_called_as_before(files: dict[str, Path]) -> None:
    model = native.load(files["ltx"])

    def wrap(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        result = extra["original_block"](arguments)
        return {"img": result["img"] * 0.5}

    results = []
    for each in (model, optimize(model)[0]):
        clone = each.clone()
        clone.set_model_patch_replace(wrap, "dit", "double_block", 0)
        results.append(native.sample(clone, "ltx"))

    assert near(results[1], results[0])


def test_guidance_that_skips_an_attention(files: dict[str, Path]) -> None:
    model = native.load(files["ltx"])
    optimized, _ = optimize(model)
    results = []
    for each in (model, optimized):
        clone = each.clone()
        clone.model_options["transformer_options"]["stg_skip_self_attn"] = True
        results.append(native.sample(clone, "ltx"))

    assert near(results[1], results[0])


def test_a_dtype_that_changes_after_the_node_is_proven_at_the_first_call(files: dict[str, Path]) -> None:
    optimized, report = optimize(native.load(files["flux"]))
    changed = optimized.clone()
    changed.set_model_compute_dtype(torch.bfloat16)

    assert near(native.sample(changed, "flux"), native.sample(without(changed), "flux"), 0.03)
    assert all(count["fused"] for count in report.calls().values())
    assert {m.dtype for site in report.patched for m in site.measurements} == {"float32", "bfloat16"}


def test_verify_and_benchmark(files: dict[str, Path]) -> None:
    from diffkern.comfyui.compare import benchmark, verify

    model, latent = native.load(files["wan"]), {"samples": torch.zeros(native.LATENTS["wan"])}
    optimized, _ = optimize(model)
    exact, _ = optimize(model, numerics="exact")
    options = {"positive": native.conditioning(), "latent": latent, "seed": 0}
    good = verify(optimized, **options, steps=2, tolerance=1e-4)
    same = verify(exact, **options, steps=1, tolerance=0.0)
    strict = verify(optimized, **options, steps=1, tolerance=0.0)
    served = verify(optimize(model, families=[], kitchen="on")[0], **options, steps=1, tolerance=1e-4)
    nothing = not_optimized(model), not_optimized(optimize(model, families=[], kitchen="off")[0])
    times = benchmark(exact, **options, steps=3, runs=2)
    optimized.model.diffusion_model.blocks[0].modulation.data.fill_(float("nan"))
    broken = verify(optimized, **options, steps=1, tolerance=1.0)

    assert good.passed and 0 < good.error < 1e-4 and good.fused == 26 and str(good).startswith("PASS")
    assert same.passed and same.identical and "bit for bit" in str(same)
    assert served.passed and " calls of comfy-kitchen served" in str(served)
    assert "is bypassed, off, or not connected" in nothing[0] and "every family is switched off" in nothing[1]
    assert not not_optimized(optimized) and not not_optimized(exact)
    assert not strict.passed and str(strict).startswith("FAIL")
    assert not broken.passed and "stock model itself" in str(broken)
    assert len(times.stock.milliseconds) == 2 and times.stock.memory is None and "CPU" in str(times)


def test_another_model_is_handed_on_and_may_use_the_kitchen(comfyui: None) -> None:
    from comfy.ops import manual_cast

    from tests.comfyui import double

    plain = double.Model(manual_cast.Linear(32, 64))
    _, report = optimize(double.ModelPatcher(plain, torch.device("cpu"), torch.device("cpu")))

    assert ["Linear has no module that diffkern knows" in note for note in report.notes] == [True]


def test_the_vae_of_wan_decodes_and_encodes_with_its_norms_fused_in_their_loops() -> None:
    import comfy.sd
    from comfy.ldm.wan.vae import WanVAE

    generator = torch.Generator().manual_seed(0)
    weights = WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True]).state_dict()
    weights = {name: torch.randn(value.shape, generator=generator) * 0.2 for name, value in weights.items()}
    vae = comfy.sd.VAE(sd=weights)
    latents, video = torch.randn(1, 16, 2, 4, 4, generator=generator), torch.rand(5, 32, 32, 3, generator=generator)
    stock = vae.decode(latents), vae.encode(video)
    optimized, report = optimize_vae(vae)
    assert not report.skipped and not report.failed
    for one, expected in zip((optimized.decode(latents), optimized.encode(video)), stock, strict=True):
        assert near(one, expected)
    calls = report.calls()
    assert calls.keys() >= {"encoder", "decoder", "decoder.middle.0"}
    assert all(counts["fused"] and not counts["stock"] for counts in calls.values())
    assert torch.equal(vae.decode(latents), stock[0])


def test_a_block_of_the_vae_of_hunyuanvideo_15_is_fused_and_hands_on_what_the_next_frames_read() -> None:
    from comfy.ldm.hunyuan_video.vae_refiner import RMS_norm
    from comfy.ldm.modules.diffusionmodules.model import CarriedConv3d, ResnetBlock

    from diffkern.comfyui.rewrites import FAMILIES, ComfyRewriter

    block = ResnetBlock(in_channels=16, temb_channels=0, conv_op=CarriedConv3d, norm_op=RMS_norm).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    patch = ComfyRewriter("fast", None, frozenset(FAMILIES)).patch(block)
    assert patch is not None
    carried: list[list[Tensor]] = [[], []]
    for seed in range(2):
        x = torch.randn(1, 16, 3, 6, 6, generator=generator)
        before = [None if seed == 0 else list(carry) for carry in carried]
        carried = [[], []]
        stock = block(x, None, before[0], carried[0])
        assert near(patch.forward(x, None, before[1], carried[1]), stock)
        assert len(carried[0]) == 2 and all(map(near, carried[1], carried[0]))
    assert (patch.counts.fused_calls, sum(patch.counts.stock_calls.values())) == (4, 0)


def test_a_vae_decodes_and_encodes_on_fused_kernels_and_the_one_given_stays_as_it_is() -> None:
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    layers = {"double_z": True, "z_channels": 4, "resolution": 32, "in_channels": 3, "out_ch": 3, "ch": 32}
    options = {"ddconfig": {**layers, "ch_mult": [1] * 4, "num_res_blocks": 1, "attn_resolutions": []}, "embed_dim": 4}
    generator = torch.Generator().manual_seed(0)
    weights = AutoencoderKL(**options).state_dict()
    weights = {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in weights.items()}
    vae = comfy.sd.VAE(sd=weights, config={"params": options})
    latents, image = torch.randn(1, 4, 8, 8, generator=generator), torch.rand(1, 64, 64, 3, generator=generator)
    stock = vae.decode(latents), vae.encode(image)
    optimized, report = optimize_vae(vae)
    assert not report.skipped and not report.failed
    for one, expected in zip((optimized.decode(latents), optimized.encode(image)), stock, strict=True):
        assert near(one, expected)
    calls = report.calls()
    assert {path.partition(".")[0] for path in calls} == {"encoder", "decoder"}
    assert all(counts["fused"] and not counts["stock"] for counts in calls.values())
    before = sum(counts["fused"] for counts in calls.values())
    assert torch.equal(vae.decode(latents), stock[0]) and torch.equal(vae.encode(image), stock[1])
    assert sum(counts["fused"] for counts in report.calls().values()) == before
    tiled = optimized.decode_tiled(latents, tile_x=4, tile_y=4, overlap=1)
    assert near(tiled, vae.decode_tiled(latents, tile_x=4, tile_y=4, overlap=1))
