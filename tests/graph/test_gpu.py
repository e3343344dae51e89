"""On a GPU: what changes takes effect at the next call, and a capture that fails leaves everything usable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.graph.steps import FIRST_CALL
from tests.graph.test_snapshot import CHANGES
from tests.injection.models import ltx_inputs, tiny_ltx

pytestmark = pytest.mark.gpu


def unet_inputs(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "sample": torch.randn(1, 4, 8, 8, device="cuda"),
        "timestep": torch.tensor([500.0], device="cuda"),
        "encoder_hidden_states": torch.randn(1, 6, 32, device="cuda"),
        "return_dict": False,
    }


def flux_inputs(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 16, 4, device="cuda"),
        "encoder_hidden_states": torch.randn(1, 6, 32, device="cuda"),
        "pooled_projections": torch.randn(1, 32, device="cuda"),
        "timestep": torch.tensor([0.5], device="cuda"),
        "guidance": torch.tensor([3.0], device="cuda"),
        "img_ids": torch.zeros(16, 3, device="cuda"),
        "txt_ids": torch.zeros(6, 3, device="cuda"),
        "return_dict": False,
    }


#: Changes that a forward of these inputs computes with, or that leave the result as it was.
IN_EFFECT = [
    name
    for name, (build, _, _) in CHANGES.items()
    if build.__name__ in ("_unet", "_flux")
    and not any(word in name for word in ("IP-Adapter", "padding", "cast", "config", "checkpointing"))
]


@pytest.mark.parametrize("change", IN_EFFECT)
def test_the_call_after_a_change_computes_with_the_new_value(change: str) -> None:
    build, prepare, make = CHANGES[change]
    model = copy.deepcopy(build()).requires_grad_(False)
    inputs = unet_inputs if build.__name__ == "_unet" else flux_inputs
    prepare(model)
    model.to("cuda")
    report = inject_optimized_kernels(model, cuda_graph=True, numerics="exact")
    with torch.no_grad():
        for seed in range(4):
            before = model(**inputs(seed))[0]
        assert report.calls()[_key(report)]["fused"] >= 2
        make(model)
        model.to("cuda")
        for seed in range(4):
            result = model(**inputs(seed))[0]
            twin = copy.deepcopy(model)
            restore(twin)
            assert torch.equal(result, twin(**inputs(seed))[0])
    assert before.shape == result.shape


def _key(report: Any) -> str:
    return next(path for path in report.calls() if path.endswith("(cuda_graph)") or path == "")


class Head(nn.Module):
    """A step whose head cannot be captured, or can."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.head(x) + x)


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def raise_while_capturing(x: Tensor) -> Tensor:
    if capturing():
        raise ValueError("not while capturing")
    return x


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x * x.sum().item(),
    "nonzero": lambda x: x * len(x.nonzero()),
    "boolean index": lambda x: x * x[x > 0].sum(),
    "table made on the CPU": lambda x: x + torch.arange(16).to(x.device),
    "torch.tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0] * 4, device=x.device),
    "tolist": lambda x: x * x[0, :2].tolist()[0],
    "to the CPU": lambda x: x + x.cpu().sum().cuda(),
    "synchronize": lambda x: (torch.cuda.synchronize(), x)[1],
    "its own exception": raise_while_capturing,
    "random numbers, then item": lambda x: x + torch.rand_like(x) * 0 + torch.rand_like(x).sum().item() * 0,
}


@pytest.mark.parametrize("head", HEADS)
def test_a_capture_that_fails_is_a_stock_step_with_a_reason(head: str) -> None:
    torch.manual_seed(0)
    model = Head(HEADS[head]).cuda().eval().requires_grad_(False)
    twin = copy.deepcopy(model)
    report = inject_optimized_kernels(model, cuda_graph=True)
    inputs = [torch.randn(3, 16, device="cuda") for _ in range(6)]
    stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.cuda.manual_seed(1)
    with torch.no_grad():
        expected = [twin(x) for x in inputs]
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(1)
    with torch.no_grad():
        for x, other in zip(inputs, expected, strict=True):
            assert torch.equal(model(x), other)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    count = report.calls()[_key(report)]
    reasons = dict(count["stock_reasons"])
    assert count["fused"] == 0 and reasons.pop(FIRST_CALL) == 1
    ((reason, times),) = reasons.items()
    assert times == 5 and reason.startswith("cannot be captured: ")
    assert torch.cuda.current_stream() == stream and not capturing()
    # The device can be used: random numbers, memory that two streams share, and other captures.
    torch.randn(4, device="cuda").sum().item()
    with torch.cuda.stream(side):
        shared = torch.ones(1 << 20, device="cuda")
        shared.record_stream(stream)
    allocated = torch.cuda.memory_allocated()
    del shared
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() < allocated
    other = tiny_ltx().to("cuda")
    graph = inject_optimized_kernels(other, cuda_graph=True)
    arguments = {key: value.cuda() if isinstance(value, Tensor) else value for key, value in ltx_inputs().items()}
    with torch.no_grad():
        results = [other(**arguments)[0] for _ in range(4)]
    assert all(torch.equal(results[0], result) for result in results)
    assert graph.calls()["(cuda_graph)"]["fused"] == 3


def test_many_failures_take_no_memory() -> None:
    model = Head(HEADS["item"]).cuda().eval().requires_grad_(False)
    inject_optimized_kernels(model, cuda_graph=True)
    used = []
    with torch.no_grad():
        for size in range(2, 8):
            for _ in range(2):
                model(torch.randn(size * 1000, 16, device="cuda"))
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            used.append(torch.cuda.memory_reserved())
    assert max(used[1:]) <= used[0] + (8 << 20)


def test_errors_of_the_user_look_as_they_do_in_stock() -> None:
    model = Head(lambda x: x).cuda().eval().requires_grad_(False)
    with pytest.raises(RuntimeError) as stock, torch.no_grad():
        model(torch.randn(3, 7, device="cuda"))
    inject_optimized_kernels(model, cuda_graph=True)
    for _ in range(3):
        with pytest.raises(RuntimeError) as patched, torch.no_grad():
            model(torch.randn(3, 7, device="cuda"))
        assert str(patched.value) == str(stock.value)
