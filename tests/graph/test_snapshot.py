"""What a replay depends on: everything that users change on a loaded model is seen, and nothing is kept alive."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel, UNet3DConditionModel
from diffusers.models.attention_processor import AttnProcessor, IPAdapterAttnProcessor2_0
from torch import Tensor, nn

from diffkern.graph.snapshot import MAX_ENTRIES, ModuleSnapshot


@functools.cache
def _unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        block_out_channels=(32, 64),
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).eval()


@functools.cache
def _unet3d() -> UNet3DConditionModel:
    return UNet3DConditionModel(
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        block_out_channels=(32, 64),
        sample_size=8,
        down_block_types=("DownBlock3D", "CrossAttnDownBlock3D"),
        up_block_types=("CrossAttnUpBlock3D", "UpBlock3D"),
    ).eval()


@functools.cache
def _flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    ).eval()


def ip_adapter(unet: Any) -> Any:
    processor = IPAdapterAttnProcessor2_0(64, 32, num_tokens=(4,), scale=[1.0])
    attention(unet).set_processor(processor)
    return processor


def lora(model: Any, *names: str) -> None:
    peft = pytest.importorskip("peft")
    for name in names:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights="gaussian"), name)


def attention(unet: Any) -> Any:
    return unet.down_blocks[1].attentions[0].transformer_blocks[0].attn2


#: What users change on a loaded model: a preparation, and the change.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "enable_freeu": (_unet, lambda m: None, lambda m: m.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)),
    "freeu's scales": (
        _unet,
        lambda m: m.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
        lambda m: m.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.5),
    ),
    "disable_freeu": (_unet, lambda m: m.enable_freeu(0.9, 0.2, 1.2, 1.4), lambda m: m.disable_freeu()),
    "set_attn_processor": (_unet, lambda m: None, lambda m: m.set_attn_processor(AttnProcessor())),
    "set_default_attn_processor": (_unet, lambda m: None, lambda m: m.set_default_attn_processor()),
    "set_attention_backend": (_flux, lambda m: None, lambda m: m.set_attention_backend("native")),
    "reset_attention_backend": (
        _flux,
        lambda m: m.set_attention_backend("native"),
        lambda m: m.reset_attention_backend(),
    ),
    "set_attention_slice": (_unet, lambda m: None, lambda m: m.set_attention_slice("max")),
    "fuse_qkv_projections": (_unet, lambda m: None, lambda m: m.fuse_qkv_projections()),
    "fuse_qkv_projections of Flux": (_flux, lambda m: None, lambda m: m.fuse_qkv_projections()),
    "unfuse_qkv_projections": (_unet, lambda m: m.fuse_qkv_projections(), lambda m: m.unfuse_qkv_projections()),
    "enable_forward_chunking": (_unet3d, lambda m: None, lambda m: m.enable_forward_chunking(2, 1)),
    "disable_forward_chunking": (
        _unet3d,
        lambda m: m.enable_forward_chunking(2, 1),
        lambda m: m.disable_forward_chunking(),
    ),
    "enable_gradient_checkpointing": (_unet, lambda m: None, lambda m: m.enable_gradient_checkpointing()),
    "disable_gradient_checkpointing": (
        _flux,
        lambda m: m.enable_gradient_checkpointing(),
        lambda m: m.disable_gradient_checkpointing(),
    ),
    "the scale of an IP-Adapter": (_unet, ip_adapter, lambda m: setattr(attention(m).processor, "scale", [0.5])),
    "the scale of an IP-Adapter, in its list": (
        _unet,
        ip_adapter,
        lambda m: attention(m).processor.scale.__setitem__(0, 0.5),
    ),
    "add_adapter": (_flux, lambda m: lora(m, "one"), lambda m: lora(m, "two")),
    "set_adapters": (_flux, lambda m: lora(m, "one", "two"), lambda m: m.set_adapters("one")),
    "the weights of set_adapters": (
        _flux,
        lambda m: (lora(m, "one"), m.set_adapters("one", 1.0)),
        lambda m: m.set_adapters("one", 0.5),
    ),
    "disable_adapters": (_flux, lambda m: lora(m, "one"), lambda m: m.disable_adapters()),
    "enable_adapters": (
        _flux,
        lambda m: (lora(m, "one"), m.disable_adapters()),
        lambda m: m.enable_adapters(),
    ),
    "delete_adapters": (_flux, lambda m: lora(m, "one", "two"), lambda m: m.delete_adapters("two")),
    "fuse_lora": (_flux, lambda m: lora(m, "one"), lambda m: m.fuse_lora(0.5)),
    "output_scale_factor": (_unet, lambda m: None, lambda m: setattr(m.mid_block.resnets[0], "output_scale_factor", 2)),
    "rescale_output_factor": (_unet, lambda m: None, lambda m: setattr(attention(m), "rescale_output_factor", 2.0)),
    "the scale of an attention": (_unet, lambda m: None, lambda m: setattr(attention(m), "scale", 0.1)),
    "the number of heads": (_unet, lambda m: None, lambda m: setattr(attention(m), "heads", 4)),
    "eps": (_unet, lambda m: None, lambda m: setattr(m.conv_norm_out, "eps", 1e-3)),
    "the padding of a convolution": (_unet, lambda m: None, lambda m: setattr(m.conv_in, "padding", (0, 0))),
    "register_to_config": (_unet, lambda m: None, lambda m: m.register_to_config(center_input_sample=True)),
    "an axis of a rotary table": (_flux, lambda m: None, lambda m: setattr(m.pos_embed, "theta", 5000)),
    "an activation": (_unet, lambda m: None, lambda m: setattr(m.mid_block.resnets[0], "nonlinearity", nn.GELU())),
    "float for a cast": (_unet, lambda m: None, lambda m: m.half()),
    "channels_last": (_unet, lambda m: None, lambda m: m.to(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_diffusers_changes_on_a_loaded_model_is_seen(change: str) -> None:
    build, prepare, make = CHANGES[change]
    model = copy.deepcopy(build())
    prepare(model)
    before = ModuleSnapshot(model)
    assert before.holds() and before == ModuleSnapshot(model) and not before.opaque
    make(model)
    after = ModuleSnapshot(model)
    assert not before.holds() and after.holds() and before != after
    assert before.difference(after)


def test_tiling_and_slicing_of_a_vae_are_seen() -> None:
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    for change in (vae.enable_tiling, vae.disable_tiling, vae.enable_slicing, vae.disable_slicing):
        before = ModuleSnapshot(vae)
        change()
        assert not before.holds() and before != ModuleSnapshot(vae)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Config:
    scale: float
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


class Slotted:
    """As objects of dataclasses with slots are."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


#: Values of an attribute, the second of which another forward would read.
VALUES: dict[str, tuple[Any, Any]] = {
    "float": (1.0, 0.5),
    "the sign of zero": (0.0, -0.0),
    "bool for int": (1, True),
    "int for float": (1, 1.0),
    "None": (None, 0),
    "string": ("native", "flash"),
    "dtype": (torch.float16, torch.bfloat16),
    "device": (torch.device("cpu"), torch.device("meta")),
    "enum": (Colour.RED, Colour.BLUE),
    "tuple": ((1, 2), (1, 3)),
    "list": ([1, 2], [1, 2, 3]),
    "list in a dict": ({"one": [0.5]}, {"one": [0.25]}),
    "keys": ({"one": 1}, {"two": 1}),
    "set": ({1}, {2}),
    "frozenset in a tuple": ((frozenset({1}),), (frozenset({2}),)),
    "frozen config": (Config(1.0), Config(1.0, (torch.float16,))),
    "nested object": (SimpleNamespace(inner=[SimpleNamespace(x=1)]), SimpleNamespace(inner=[SimpleNamespace(x=2)])),
    "slots": (Slotted(1.0), Slotted(2.0)),
    "array": (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
    "number of numpy": (np.float32(1), np.float32(2)),
    "tensor on the CPU": (torch.tensor(1.0), torch.tensor(2.0)),
    "tensor for a number": (1.0, torch.tensor(1.0)),
    "module in a list": ([nn.Dropout(0.0)], [nn.Dropout(0.1)]),
    "function": (torch.sin, torch.cos),
}


@pytest.mark.parametrize("kind", VALUES)
def test_an_attribute_of_any_kind_is_seen_when_it_is_replaced(kind: str) -> None:
    old, new = VALUES[kind]
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity()).eval()
    model[1].attribute = old
    before = ModuleSnapshot(model)
    assert before.holds() and before == ModuleSnapshot(model)
    model[1].attribute = new
    assert not before.holds() and before.difference(ModuleSnapshot(model)).startswith("1.attribute")


def write_array(array: Any) -> None:
    array[0] = 7


#: A value, and what changes it in place.
WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1.0], lambda value: value.append(2.0)),
    "dict": (lambda: {"one": 1.0}, lambda value: value.update(one=0.5)),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "empty dict": (dict, lambda value: value.update(one=0.5)),
    "list in a tuple": (lambda: ([1.0],), lambda value: value[0].append(2.0)),
    "object": (lambda: SimpleNamespace(x=1), lambda value: setattr(value, "x", 2)),
    "new attribute of an object": (lambda: SimpleNamespace(), lambda value: setattr(value, "x", 2)),
    "slots": (lambda: Slotted(1.0), lambda value: setattr(value, "scale", 2.0)),
    "array": (lambda: np.array([1.0, 2.0]), write_array),
    "tensor on the CPU": (lambda: torch.ones(2), lambda value: value.data.mul_(2)),
    "number on the CPU": (lambda: torch.tensor(1.0), lambda value: value.data.fill_(2)),
    "object in a list in an object": (
        lambda: SimpleNamespace(all=[SimpleNamespace(x=1)]),
        lambda value: setattr(value.all[0], "x", 2),
    ),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_in_place_is_seen(kind: str) -> None:
    make, write = WRITES[kind]
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity()).eval()
    model[1].attribute = make()
    before = ModuleSnapshot(model)
    assert before.holds()
    write(model[1].attribute)
    assert not before.holds() and before != ModuleSnapshot(model)


def test_weights_written_in_place_are_read_by_the_replay_itself() -> None:
    model = nn.Linear(2, 2)
    before = ModuleSnapshot(model)
    with torch.no_grad():
        model.weight.mul_(2)
        model.bias.data.fill_(1)
    assert before.holds() and before == ModuleSnapshot(model)


def test_values_that_are_equal_but_not_the_same_are_none_that_changed() -> None:
    model = nn.Identity()
    model.scale, model.names = 0.1 + 0.2, ["a", "b"]
    before = ModuleSnapshot(model)
    model.scale, model.names = float("0.30000000000000004"), ["a", "b"]
    assert not before.holds() and before == ModuleSnapshot(model)


def helper(x: Tensor) -> Tensor:
    return x + 1


class Calls(nn.Module):
    factor = 1

    def forward(self, x: Tensor) -> Tensor:
        return helper(x) * self.factor

    def method(self) -> None:
        """Replaced in a test."""


def test_a_replaced_function_method_or_class_attribute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Calls())
    seen = [ModuleSnapshot(model)]
    for target, name, value in (
        (Calls, "factor", 2),
        (Calls, "method", lambda self: None),
        (nn.Linear, "unrelated", 1),
    ):
        monkeypatch.setattr(target, name, value, raising=False)
        if target is Calls:
            assert not seen[-1].holds() and seen[-1] != ModuleSnapshot(model)
            seen.append(ModuleSnapshot(model))
    assert seen[-1].holds()  # a class that is not in it may change
    monkeypatch.setitem(globals(), "helper", lambda x: x - 1)
    assert not seen[-1].holds() and seen[-1].difference(ModuleSnapshot(model)) == "the code of its classes"


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    ],
)
def test_settings_of_torch_are_seen(change: Callable[[], None]) -> None:
    model = nn.Linear(2, 2)
    before = ModuleSnapshot(model)
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    try:
        change()
        assert not before.holds() and before.difference(ModuleSnapshot(model)) == "the settings of torch or diffusers"
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cuda.enable_flash_sdp(True)
    assert before.holds()


def test_the_attention_backend_that_a_context_sets_is_seen() -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    model = nn.Identity()
    before = ModuleSnapshot(model)
    assert before.holds()
    with dispatch.attention_backend("_native_math"):
        assert not before.holds()
    assert before.holds()


def test_what_changed_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.0)))
    before = ModuleSnapshot(model)
    model[1][0].p = 0.5
    assert before.difference(ModuleSnapshot(model)) == "1.0.p"
    model[1][0].p = 0.0
    model[1].extra = 1
    assert before.difference(ModuleSnapshot(model)) == "1.extra"
    del model[1].extra
    model[0].bias = None
    assert before.difference(ModuleSnapshot(model)) == "0.bias"


def returns(model: nn.Module) -> Callable[[], nn.Module]:
    return lambda: model


def test_a_snapshot_keeps_neither_modules_nor_weights_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model.forward = model.forward  # a bound method in its own attributes
    model[1].callback = returns(model)
    model[1].owner = Config(model)
    found = ModuleSnapshot(model)
    weight, root = weakref.ref(model[0].weight), weakref.ref(model)
    assert found.holds()
    del model
    gc.collect()
    assert root() is None and weight() is None and not found.holds() and not found.is_there()


def test_what_cannot_be_compared_is_named() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].table = dict.fromkeys(range(MAX_ENTRIES + 1))
    assert "0.table has" in ModuleSnapshot(model).opaque
    del model[0].table
    model[0].parents = [model]
    assert ModuleSnapshot(model).opaque == "0.parents holds the model itself"
