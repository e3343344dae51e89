"""What holds for the kernels of every op: they agree with the reference, and with nothing to do they do nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffkern.providers import eager, get_provider
from diffkern.providers.registry import kernel_for
from tests.ops.kernel_calls import CALLS
from tests.ops.reference import INTERPRETED


def _all(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def test_every_op_with_a_kernel_of_its_own_is_called() -> None:
    assert set(CALLS) == {*get_provider("compiled").support, *get_provider("triton").support}


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("op", CALLS)
def test_kernels_agree_with_the_reference_also_on_nothing(op: str, batch: int, provider: str, device: str) -> None:
    support = get_provider(provider).support.get(op)
    if support is None or torch.device(device).type not in (support.device_types or ()):
        pytest.skip(f"{provider} has no {op} for {device}")
    kernel = kernel_for(op, torch.device(device), provider, torch.float32)
    results = _all(CALLS[op](kernel, batch, device))
    expected = _all(CALLS[op](eager.PROVIDER.kernel(op, torch.device(device)), batch, device))
    for y, truth in zip(results, expected, strict=True):
        assert (y.shape, y.dtype, y.device) == (truth.shape, truth.dtype, truth.device)
        assert y.shape[0] == batch
        if y.dtype == torch.float8_e4m3fn:
            if not INTERPRETED:  # whose e4m3 is wrong
                torch.testing.assert_close(y.float(), truth.float(), rtol=2**-3, atol=2**-9)  # neighbours
            continue
        torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5)
