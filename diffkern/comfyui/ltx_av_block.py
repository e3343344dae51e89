"""The transformer block of LTX-2 in ComfyUI, which carries video and audio; its attention is that of LTX-Video."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from comfy.ldm.lightricks import av_model as native
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import unfit_input
from diffkern.comfyui.ltx_block import EPS
from diffkern.comfyui.recipe import MODULATION, ComfyRecipe, Samples, in_training, sample_options
from diffkern.comfyui.verification_clone import input_size
from diffkern.ops import norm_modulate


@dataclass(frozen=True)
class _Stream:
    """The names that one of the two streams has in the block."""

    attention: str
    text_attention: str
    feed_forward: str
    table: str
    prompt_table: str
    cross_table: str


_VIDEO = _Stream(
    "attn1", "attn2", "ff", "scale_shift_table", "prompt_scale_shift_table", "scale_shift_table_a2v_ca_video"
)
_AUDIO = _Stream(
    "audio_attn1",
    "audio_attn2",
    "audio_ff",
    "audio_scale_shift_table",
    "audio_prompt_scale_shift_table",
    "scale_shift_table_a2v_ca_audio",
)
#: Rows of the table of the attention between the streams: before the gate come scale and shift, twice.
_CROSS_GATE = 4
#: Where in a call the modulation is.
_TIMES = (4, 5, 10, 11, 12, 13, 16, 17)


class LTXAVBlock(ComfyRecipe):
    """``BasicAVTransformerBlock``: modulated RMS norms and gated residuals of both streams.

    Residuals are written where they lie, as the stock block does: its callers go on with the tensors that they gave.
    Modulation that is the same for all tokens of a frame stays one row per frame. The sums of the stock block are
    fused multiply-adds of torch, and its norms torch's or comfy-kitchen's: exactly, nothing is left to fuse.
    """

    op = "comfy_ltx_av_block"
    ops = ("norm_modulate",)
    families: ClassVar[frozenset[str]] = frozenset({MODULATION})
    exact_families: ClassVar[frozenset[str]] = frozenset()
    versions = "ComfyUI 0.33"
    fingerprints = frozenset({"bf76e705a780d66f"})
    words: ClassVar[frozenset[str]] = frozenset(
        {
            "a2v_cross_attn",
            "audio_prompt_scale_shift_table",
            "context",
            "device",
            "dim",
            "dtype",
            "k_pe",
            "mask",
            "pe",
            "prompt_scale_shift_table",
            "run_ax",
            "run_vx",
            "transformer_options",
            "v2a_cross_attn",
        }
    )

    @staticmethod
    @override
    def arguments(
        x: tuple[Tensor, Tensor],
        v_context: Any = None,
        a_context: Any = None,
        attention_mask: Any = None,
        v_timestep: Any = None,
        a_timestep: Any = None,
        v_pe: Any = None,
        a_pe: Any = None,
        v_cross_pe: Any = None,
        a_cross_pe: Any = None,
        v_cross_scale_shift_timestep: Any = None,
        a_cross_scale_shift_timestep: Any = None,
        v_cross_gate_timestep: Any = None,
        a_cross_gate_timestep: Any = None,
        transformer_options: dict[str, Any] | None = None,
        self_attention_mask: Any = None,
        v_prompt_timestep: Any = None,
        a_prompt_timestep: Any = None,
    ) -> tuple[Any, ...]:
        return (
            x, v_context, a_context, attention_mask, v_timestep, a_timestep, v_pe, a_pe, v_cross_pe, a_cross_pe,
            v_cross_scale_shift_timestep, a_cross_scale_shift_timestep, v_cross_gate_timestep, a_cross_gate_timestep,
            transformer_options or {}, self_attention_mask, v_prompt_timestep, a_prompt_timestep,
        )  # fmt: skip

    @override
    def primary_input(self, call: tuple[Any, ...]) -> Tensor:
        x: Tensor = call[0][0]
        return x

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        video, audio = call[0]
        if in_training():
            return "ComfyUI is training"
        reason = unfit_input(video) or unfit_input(audio)
        if reason is not None:
            return reason
        times = (time for position in _TIMES if (time := call[position]) is not None)
        if any(getattr(time, "data", time).dtype != video.dtype for time in times):
            return "its modulation is not of the dtype of the hidden states"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        return ()

    @override
    def compute(
        self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]
    ) -> tuple[Tensor, Tensor]:
        (
            (video, audio), v_text, a_text, mask, v_time, a_time, v_pe, a_pe, v_cross_pe, a_cross_pe,
            v_cross_time, a_cross_time, v_gate_time, a_gate_time, options, self_mask, v_prompt, a_prompt,
        ) = call  # fmt: skip
        there = audio.numel() > 0
        runs_video, runs_audio = options.get("run_vx", True), options.get("run_ax", True) and there
        to_video = runs_video and options.get("a2v_cross_attn", True) and there
        to_audio = runs_audio and options.get("v2a_cross_attn", True)
        step = _Step(module, mask, options, provider)

        if runs_video:
            step.attend(_VIDEO, video, v_time, {"pe": v_pe, "mask": self_mask}, v_text, v_prompt)
        if runs_audio:
            step.attend(_AUDIO, audio, a_time, {"pe": a_pe}, a_text, a_prompt)
        if to_video:
            y = module.audio_to_video_attn(  # type: ignore[operator]
                step.cross_modulate(_VIDEO, video, v_cross_time, 0),
                context=step.cross_modulate(_AUDIO, audio, a_cross_time, 0),
                pe=v_cross_pe, k_pe=a_cross_pe, transformer_options=options,
            )  # fmt: skip
            step.cross_add(_VIDEO, video, y, v_gate_time)
        if to_audio:
            y = module.video_to_audio_attn(  # type: ignore[operator]
                step.cross_modulate(_AUDIO, audio, a_cross_time, 2),
                context=step.cross_modulate(_VIDEO, video, v_cross_time, 2),
                pe=a_cross_pe, k_pe=v_cross_pe, transformer_options=options,
            )  # fmt: skip
            step.cross_add(_AUDIO, audio, y, a_gate_time)
        if runs_video:
            step.feed_forward(_VIDEO, video, v_time)
        if runs_audio:
            step.feed_forward(_AUDIO, audio, a_time)
        return video, audio

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        block = native.BasicAVTransformerBlock
        return (
            block.forward,
            block.get_ada_values,
            block._apply_text_cross_attention,
            native.CompressedTimestep.expand_for_computation,
        )

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        block: Any = module
        random, frames = Samples(device, dtype), 3
        width, narrow = block.scale_shift_table.shape[1], block.audio_scale_shift_table.shape[1]
        count, length, heard = block.scale_shift_table.shape[0], frames * -(-tokens // frames), tokens // 2

        def times(rows: int, size: int, parts: int) -> Tensor:
            return random(2, rows, parts * size, scale=0.5)

        def rotation(length: int, attention: Any) -> Any:
            return random.rotations(1, length, attention.heads, attention.dim_head // 2), True

        def prompt(size: int) -> Any:
            return times(1, size, 2) if block.cross_attention_adaln else None

        v_text, a_text = random(2, 7, input_size(block.attn2.to_k)), random(2, 7, input_size(block.audio_attn2.to_k))
        pes = (
            rotation(length, block.attn1), rotation(heard, block.audio_attn1),
            rotation(length, block.audio_to_video_attn), rotation(heard, block.audio_to_video_attn),
        )  # fmt: skip
        per_token = times(frames, width, count).repeat_interleave(length // frames, dim=1)
        calls = []
        for v_time in (times(1, width, count), native.CompressedTimestep(per_token, length // frames)):
            calls.append(
                (
                    (random(2, length, width), random(2, heard, narrow)), v_text, a_text, None,
                    v_time, times(1, narrow, count), *pes,
                    times(1, width, 4), times(1, narrow, 4), times(1, width, 1), times(1, narrow, 1),
                    sample_options(), None, prompt(width), prompt(narrow),
                )
            )  # fmt: skip
        return calls


class _Step:
    """The steps of one call of the block."""

    def __init__(self, block: Any, mask: Any, options: dict[str, Any], provider: str | None) -> None:
        self._block = block
        self._mask = mask
        self._options = options
        self._provider = provider

    def attend(
        self, stream: _Stream, x: Tensor, time: Any, rotation: dict[str, Any], text: Any, prompt_time: Any
    ) -> None:
        """Self-attention, and attention to the text."""
        block, table = self._block, getattr(self._block, stream.table)
        shift, scale, gate = self._values(table, x, time, slice(0, 3))
        y = self._modulate(x, scale, shift)
        self._add(x, getattr(block, stream.attention)(y, **rotation, transformer_options=self._options), gate)
        text_attention = getattr(block, stream.text_attention)
        if block.cross_attention_adaln:
            y = block._apply_text_cross_attention(
                x, text, text_attention, table, getattr(block, stream.prompt_table), time, prompt_time, self._mask,
                self._options,
            )  # fmt: skip
        else:
            y = norm_modulate(x, eps=EPS, provider=self._provider)
            y = text_attention(y, context=text, mask=self._mask, transformer_options=self._options)
        x.add_(y)

    def feed_forward(self, stream: _Stream, x: Tensor, time: Any) -> None:
        """The feed-forward of a stream."""
        shift, scale, gate = self._values(getattr(self._block, stream.table), x, time, slice(3, 6))
        self._add(x, getattr(self._block, stream.feed_forward)(self._modulate(x, scale, shift)), gate)

    def cross_modulate(self, stream: _Stream, x: Tensor, time: Any, first: int) -> Tensor:
        """What the attention between the streams reads of one of them."""
        table = getattr(self._block, stream.cross_table)[:_CROSS_GATE]
        scale, shift = self._values(table, x, time, slice(first, first + 2))
        return self._modulate(x, scale, shift)

    def cross_add(self, stream: _Stream, x: Tensor, y: Tensor, time: Any) -> None:
        """What it adds to one of them."""
        (gate,) = self._values(getattr(self._block, stream.cross_table)[_CROSS_GATE:], x, time, slice(0, 1))
        self._add(x, y, gate)

    def _values(self, table: Tensor, x: Tensor, time: Any, part: slice) -> tuple[Tensor, ...]:
        """Shifts, scales or gates: ``[B, 1 or S, D]``, or ``[B, F, D]`` with a row for each frame."""
        if isinstance(time, native.CompressedTimestep) and time.num_frames * time.patches_per_frame == x.shape[1]:
            own = time.data.reshape(x.shape[0], time.num_frames, table.shape[0], -1)[:, :, part]
            values: Tensor = table[part].to(device=own.device, dtype=own.dtype) + own
            return values.unbind(2)
        expanded: tuple[Tensor, ...] = self._block.get_ada_values(table, x.shape[0], time, part)
        return expanded

    def _modulate(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x, scale, shift = _by_frame(x, scale, shift)
        return _flat(norm_modulate(x, scale, shift, eps=EPS, provider=self._provider))

    def _add(self, x: Tensor, y: Tensor, gate: Tensor) -> None:
        rows = gate.shape[1]
        x, gate = _by_frame(x, gate)
        x.addcmul_(y if x.ndim == 3 else y.unflatten(1, (rows, -1)), gate)


def _by_frame(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Views of ``x`` and of values with a row for each frame that broadcast against each other."""
    rows = values[0].shape[1]
    if rows in (1, x.shape[1]):
        return x, *values
    return x.unflatten(1, (rows, -1)), *(value.unsqueeze(2) for value in values)


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.flatten(1, 2)


RECIPE = LTXAVBlock()
