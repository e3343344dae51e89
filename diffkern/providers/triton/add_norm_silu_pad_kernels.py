"""The Triton kernel of add_norm_silu_pad. Imported at first use, since this needs Triton.

A program computes all channels of ``POSITIONS`` positions of one frame of the result; without a norm a slice of them. A
frame that pads is computed like the one it repeats: reading that again costs no more than writing the copy, and saves a
second pass.

Offsets are 64-bit, since a stride times an index passes 2^31 in tensors that models really have.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl

from diffkern.providers.triton.activation_kernels import sigmoid_product

# Plain counts: specialising on them would only compile more variants.
_COUNTS = ["positions", "tiles", "frames", "out_frames", "front"]


@triton.jit
def _channels(ptr, offset, inside):
    """A parameter or modulation of all channels in float32, as one row."""
    return tl.load(ptr + offset, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=_COUNTS)
def add_norm_silu_pad_kernel(
    x_ptr, b_ptr, residual_ptr, scale_ptr, shift_ptr, y_ptr,
    channels, positions, tiles, frames, out_frames, front,
    x_n, x_c, x_t, x_s, r_n, r_c, r_t, r_s, y_n, y_c, y_t, y_s,
    b_stride, scale_n, scale_c, shift_n, shift_c, eps,
    NORM: tl.constexpr, SILU: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """See ``diffkern.ops.add_norm_silu_pad``."""
    program = tl.program_id(0)
    out_frame = (program // tiles % out_frames).to(tl.int64)
    sample = (program // tiles // out_frames).to(tl.int64)
    frame = tl.minimum(tl.maximum(out_frame - front, 0), frames - 1)
    position = (program % tiles).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    channel_inside = channel < channels
    inside = (position < positions)[:, None] & channel_inside[None, :]

    rows = sample * x_n + frame * x_t + position * x_s
    y = tl.load(x_ptr + rows[:, None] + (channel * x_c)[None, :], mask=inside, other=0.0).to(tl.float32)
    if b_ptr is not None:
        y += _channels(b_ptr, channel * b_stride, channel_inside)
    if residual_ptr is not None:
        rows = sample * r_n + frame * r_t + position * r_s
        y += tl.load(residual_ptr + rows[:, None] + (channel * r_c)[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(y * y, axis=1) / tl.cast(channels, tl.float32)
        y *= tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    if scale_ptr is not None:
        y *= 1.0 + _channels(scale_ptr, sample * scale_n + channel * scale_c, channel_inside)
    if shift_ptr is not None:
        y += _channels(shift_ptr, sample * shift_n + channel * shift_c, channel_inside)
    if SILU:
        y = sigmoid_product(y, y)
    rows = sample * y_n + out_frame * y_t + position * y_s
    tl.store(y_ptr + rows[:, None] + (channel * y_c)[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
