"""What blocks compute alike is computed once in a call of their model, and kept no longer."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffkern.cache.in_call import once_in_call, one_model_call

computed: list[Tensor] = []


def doubled(x: Tensor, factor: float = 2.0) -> Tensor:
    computed.append(x)
    return x * factor


def test_a_result_is_kept_until_its_call_is_over_and_not_beyond() -> None:
    computed.clear()
    mask = torch.ones(3)
    with one_model_call():
        first = once_in_call(doubled, mask)
        assert once_in_call(doubled, mask) is first and once_in_call(doubled, mask, 3.0) is not first
        result = weakref.ref(first)
        del first
        gc.collect()
        assert result() is not None
    gc.collect()
    assert result() is None, "the mask is there still, and what was made of it may be large"
    with one_model_call():
        once_in_call(doubled, mask)
    assert len(computed) == 3
    once_in_call(doubled, mask)
    once_in_call(doubled, mask)
    assert len(computed) == 5, "outside of a call everything is computed"


def test_a_write_and_another_tensor_in_the_place_of_one_that_went_are_seen() -> None:
    with one_model_call():
        x = torch.ones(3)
        assert torch.equal(once_in_call(doubled, x), torch.full((3,), 2.0))
        x.mul_(5)
        assert torch.equal(once_in_call(doubled, x), torch.full((3,), 10.0))
        for n in range(20):
            x = torch.full((3,), float(n))  # mostly where the one before was
            assert torch.equal(once_in_call(doubled, x), torch.full((3,), 2.0 * n))


def test_a_call_inside_of_another_has_results_of_its_own() -> None:
    computed.clear()
    x = torch.ones(3)
    with one_model_call():
        outer = once_in_call(doubled, x)
        with one_model_call():
            once_in_call(doubled, x)
        assert once_in_call(doubled, x) is outer
    assert len(computed) == 2


def test_what_a_backward_reads_is_computed_in_each_block_which_may_be_computed_again_outside_of_the_call() -> None:
    index, table, x = torch.zeros(4, dtype=torch.int64), torch.ones(2, 3).requires_grad_(), torch.ones(4, 3)

    def block(x: Tensor) -> Tensor:
        return x * once_in_call(F.embedding, index, table)

    with one_model_call():
        y = x
        for _ in range(2):
            y = checkpoint(block, y, use_reentrant=False)
        with torch.no_grad():
            assert once_in_call(F.embedding, index, table) is once_in_call(F.embedding, index, table)
    y.sum().backward()
    assert torch.equal(table.grad, torch.tensor([[8.0] * 3, [0.0] * 3]))
