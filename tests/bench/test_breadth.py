"""The denoisers of ``bench step --all``: real widths, two layers, and inputs that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffkern.bench.breadth import BREADTH
from diffkern.bench.steps import first_tensor
from scripts.check_models import denoisers

#: Of each model: the shape of what a step gives, and the parameters of one block in each of its lists of blocks; those
#: of the whole of a UNet.
EXPECTED: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "flux": ((1, 4096, 64), {"transformer_blocks": 339_831_296, "single_transformer_blocks": 141_591_808}),
    "flux2": ((1, 4096, 128), {"transformer_blocks": 981_467_648, "single_transformer_blocks": 490_733_824}),
    "chroma": ((1, 4096, 64), {"transformer_blocks": 226_548_224, "single_transformer_blocks": 113_271_040}),
    "qwen": ((1, 4096, 64), {"transformer_blocks": 339_831_296}),
    "sd3": ((2, 16, 128, 128), {"transformer_blocks": 84_980_736}),
    "sana": ((2, 32, 32, 32), {"transformer_blocks": 77_920_640}),
    "z_image": ((16, 1, 128, 128),
        {"noise_refiner": 180_910_336, "context_refiner": 176_962_816, "layers": 180_910_336}),
    "lumina2": ((2, 16, 8, 8), {"noise_refiner": 87_312_576, "context_refiner": 77_866_176, "layers": 87_312_576}),
    "wan": ((1, 16, 21, 60, 104), {"blocks": 46_440_704}),
    "hunyuan_video": ((1, 16, 9, 68, 120),
        {"transformer_blocks": 339_831_296, "single_transformer_blocks": 141_591_808}),
    "cogvideox": ((2, 13, 16, 60, 90), {"transformer_blocks": 132_197_632}),
    "sdxl": ((2, 4, 128, 128), {"": 899_183_364, "down_blocks.2.attentions.0.transformer_blocks": 34_755_840}),
    "sd15": ((2, 4, 64, 64), {"": 859_520_964}),
    "ltx": ((2, 2688, 128), {"transformer_blocks": 67_155_968}),
    "allegro": ((1, 4, 4, 90, 160), {"transformer_blocks": 84_978_432}),
    "anyflow": ((1, 9, 16, 60, 104), {"blocks": 351_394_304}),
    "auraflow": ((2, 4, 128, 128), {"joint_transformer_blocks": 339_738_624, "single_transformer_blocks": 169_869_312}),
    "bria": ((1, 4096, 64), {"transformer_blocks": 339_831_296, "single_transformer_blocks": 141_591_808}),
    "bria_fibo": ((1, 4096, 48), {"transformer_blocks": 339_831_296, "single_transformer_blocks": 141_591_808}),
    "chronoedit": ((1, 16, 2, 90, 160), {"blocks": 403_838_464}),
    "cogview3": ((2, 16, 128, 128), {"transformer_blocks": 94_425_600}),
    "cogview4": ((2, 16, 128, 128), {"transformer_blocks": 226_578_432}),
    "cosmos": ((1, 16, 4, 88, 160), {"transformer_blocks": 255_853_056}),
    "dit": ((2, 8, 64, 64), {"transformer_blocks": 26_682_624}),
    "easyanimate": ((1, 16, 13, 48, 84), {"transformer_blocks": 245_471_744}),
    "ernie_image": ((1, 128, 8, 8), {"layers": 218_112_256}),
    "hidream": ((1, 16, 8, 8), {"double_stream_blocks": 424_089_600, "single_stream_blocks": 305_438_720}),
    "hunyuan_dit": ((2, 8, 128, 128), {"blocks": 34_091_712}),
    "hunyuan_image": ((1, 64, 8, 8), {"transformer_blocks": 462_530_048, "single_transformer_blocks": 192_715_520}),
    "hunyuan_video15": ((1, 32, 9, 8, 8), {"transformer_blocks": 151_056_896}),
    "kandinsky5": ((1, 9, 64, 96, 16),
        {"text_transformer_blocks": 44_058_240, "visual_transformer_blocks": 59_668_480}),
    "latte": ((1, 8, 16, 64, 64), {"transformer_blocks": 21_255_552, "temporal_transformer_blocks": 15_942_528}),
    "longcat_image": ((1, 4096, 64), {"transformer_blocks": 339_831_296, "single_transformer_blocks": 141_591_808}),
    "ltx2": ((1, 6144, 128), {"transformer_blocks": 386_074_624}),
    "mochi": ((1, 12, 8, 8, 8), {"transformer_blocks": 207_641_600}),
    "omnigen": ((2, 4, 8, 8), {"layers": 113_252_352}),
    "ovis_image": ((1, 4096, 64), {"transformer_blocks": 415_353_344, "single_transformer_blocks": 179_352_832}),
    "pixart": ((2, 8, 128, 128), {"transformer_blocks": 21_255_552}),
    "prior": ((2, 1280), {"transformer_blocks": 50_358_272}),
    "prx": ((2, 16, 128, 128), {"blocks": 72_264_384}),
    "sana_video": ((1, 16, 9, 60, 104), {"transformer_blocks": 100_533_440}),
    "skyreels": ((1, 16, 7, 68, 120), {"blocks": 351_394_304}),
    "stable_audio": ((2, 64, 1024), {"transformer_blocks": 43_670_016}),
    "unet2d": ((4, 3, 256, 256), {"": 113_673_219}),
    "unet3d": ((2, 4, 16, 32, 32), {"": 1_411_233_860}),
    "wan_i2v": ((1, 16, 9, 60, 104), {"blocks": 403_838_464}),
    "wan_vace": ((1, 16, 9, 60, 104), {"blocks": 351_394_304, "vace_blocks": 403_833_344}),
}  # fmt: skip

#: Those that read data of their inputs, of which the meta device has none: they run on the CPU, at a small size.
OF_DATA = ("lumina2", "ernie_image", "hidream", "hunyuan_image", "hunyuan_video15", "mochi", "omnigen")


def _small(name: str, value: Any) -> Any:
    """Latents of 8 x 8, texts of eight tokens, and for OmniGen a sequence of both and a time step."""
    if not isinstance(value, Tensor) or value.ndim < 2 or name == "pooled_embeds":
        return value.clamp(max=8) if name == "text_lens" else value
    cuts: dict[str, tuple[Any, ...]] = {
        "hidden_states": (..., slice(8), slice(8)),
        "encoder_hidden_states_llama3": (..., slice(8), slice(None)),
        "attention_mask": (..., slice(25), slice(25)),
        "position_ids": (..., slice(25)),
    }
    return value[cuts.get(name, (slice(None), slice(8)))]


class _OneDtype(TorchDispatchMode):
    """Refuses products of several dtypes, as devices that have data do."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
            torch.ops.aten.convolution,
        ):
            assert len({x.dtype for x in args if isinstance(x, Tensor)}) == 1, op
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", BREADTH)
def test_a_step_fits_a_model_of_two_layers_at_its_real_width(name: str) -> None:
    denoiser, meta = BREADTH[name], torch.device("meta")
    with torch.no_grad():
        where = torch.device("cpu") if name in OF_DATA else meta
        model = denoiser.build(where if name == "lumina2" else meta)  # which has tables that are no buffers
        inputs = denoiser.step(where)
        if name in OF_DATA:
            model.to_empty(device=where)
            inputs = {key: _small(key, value) for key, value in inputs.items()}
        with _OneDtype():
            output = first_tensor(model(**inputs))
    shape, blocks = EXPECTED[name]
    assert (tuple(output.shape), output.dtype) == (shape, torch.bfloat16)
    for path, parameters in blocks.items():
        found = model.get_submodule(path)
        if isinstance(found, torch.nn.ModuleList):
            assert len(found) == (6 if name == "hunyuan_dit" else 2)
            found = found[0]
        assert sum(parameter.numel() for parameter in found.parameters()) == parameters, path


def test_every_class_of_the_tiny_denoisers_is_there() -> None:
    assert {denoiser.cls for denoiser in denoisers.DENOISERS.values()} == {each.class_name for each in BREADTH.values()}
