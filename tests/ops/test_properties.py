"""What holds for every op and provider: repeatable to the bit, the same whatever the batch, and tidy in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from diffkern import ops

Result = tuple[Tensor, ...]


@dataclass(frozen=True)
class Call:
    """An op on inputs that have the batch as their first dimension.

    Attributes:
        shapes: Shapes of the batched inputs, without the batch.
        run: Calls the op, given the inputs, a parameter vector of the last (or channel) size, and the provider.
        channels: The size of the parameter vector.
    """

    shapes: tuple[tuple[int, ...], ...]
    run: Callable[[list[Tensor], Tensor, str], Tensor | Result]
    channels: int = 72


ROWS = (5, 72)
ANGLES = torch.linspace(0, 3, 5 * 36).view(5, 36)

CALLS: dict[str, Call] = {
    "rms_norm": Call((ROWS,), lambda x, w, p: ops.rms_norm(x[0], w, provider=p)),
    "layer_norm": Call((ROWS,), lambda x, w, p: ops.layer_norm(x[0], w, w, provider=p)),
    "norm_modulate": Call((ROWS, (1, 72), (1, 72)), lambda x, w, p: ops.norm_modulate(x[0], x[1], x[2], w, provider=p)),
    "gate_residual": Call((ROWS, ROWS, (1, 72)), lambda x, w, p: ops.gate_residual(x[0], x[1], x[2], provider=p)),
    "gate_residual_norm_modulate": Call(
        (ROWS, ROWS, ROWS, ROWS, ROWS),
        lambda x, w, p: ops.gate_residual_norm_modulate(*x, norm="layer", provider=p),
    ),
    "rope": Call((ROWS,), lambda x, w, p: ops.rope(x[0], *_table(x[0]), provider=p)),
    "rope_3d": Call(
        (ROWS,),
        lambda x, w, p: ops.rope_3d(x[0], [_table(x[0])[0]], [_table(x[0])[1]], grid=(5,), provider=p),
    ),
    "qk_norm_rope": Call((ROWS, ROWS), lambda x, w, p: ops.qk_norm_rope(x[0], x[1], w, w, *_table(x[0]), provider=p)),
    "gelu": Call((ROWS,), lambda x, w, p: ops.gelu(x[0], "tanh", provider=p)),
    "geglu": Call((ROWS,), lambda x, w, p: ops.geglu(x[0], provider=p)),
    "swiglu": Call((ROWS,), lambda x, w, p: ops.swiglu(x[0], provider=p)),
    "group_norm_silu": Call(((24, 5, 7),), lambda x, w, p: ops.group_norm_silu(x[0], 8, w, w, provider=p), 24),
    "channel_rms_norm_silu": Call(((24, 3, 5, 7),), lambda x, w, p: ops.channel_rms_norm_silu(x[0], w, provider=p), 24),
}


def _table(x: Tensor) -> tuple[Tensor, Tensor]:
    angles = ANGLES.to(x.device)
    return angles.cos(), angles.sin()


def _inputs(call: Call, batch: int, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(batch, *shape, generator=generator).to(device, dtype) for shape in call.shapes]
    return inputs, torch.randn(call.channels, generator=generator).to(device, dtype)


def _results(result: Tensor | Result) -> Result:
    return result if isinstance(result, tuple) else (result,)


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, provider: str, device: str) -> Call:
    from diffkern.providers import explain

    if provider == "eager":
        pytest.skip("torch's own kernels round some elements differently by where they lie")
    op = {"gelu": "activation", "geglu": "glu", "swiglu": "glu"}.get(request.param, request.param)
    reason = explain(op, torch.device(device), (torch.float32,))[provider]
    if reason is not None:
        pytest.skip(f"{provider}: {reason}")
    return CALLS[request.param]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_does_not_depend_on_its_batch_and_runs_repeat(
    call: Call, provider: str, device: str, dtype: torch.dtype
) -> None:
    inputs, weight = _inputs(call, 3, device, dtype)
    whole = _results(call.run(inputs, weight, provider))
    again = _results(call.run(inputs, weight, provider))
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    for index in range(3):
        alone = _results(call.run([x[index : index + 1] for x in inputs], weight, provider))
        for one, other in zip(whole, alone, strict=True):
            assert torch.equal(one[index : index + 1], other)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_what_lies_beside_the_output_stays_as_it_is(call: Call, provider: str, device: str, batch: int) -> None:
    """The output goes where a tensor was freed between two others, which must not change."""
    inputs, weight = _inputs(call, batch, device, torch.float32)
    results = _results(call.run(inputs, weight, provider))
    # Large enough for a segment of the allocator of its own, cut into slots of the output's size.
    torch.cuda.empty_cache()
    size = results[0].numel()
    guards = [torch.full((size,), 12345.0, device=device) for _ in range(64)]
    places = {guard.data_ptr() for guard in guards[1::2]}
    del guards[1::2]
    fresh = _results(call.run(inputs, weight, provider))
    assert all(torch.equal(one, other) for one, other in zip(fresh, results, strict=True))
    assert any(result.data_ptr() in places for result in fresh)
    assert all(bool((guard == 12345.0).all()) for guard in guards)
