"""Models whose head no graph can hold: the blocks alone are captured.

Without a GPU a "capture" runs the forward on copies, in which this head refuses to run, and a replay runs it again; the
last test runs on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import KernelConfig, StrictModeError, inject_optimized_kernels, restore
from diffkern.graph import ModuleSnapshot, steps
from diffkern.graph.capture import CaptureError, GraphPool, NoRoomError
from diffkern.graph.steps import FIRST_CALL
from diffkern.graph.timing import TIMED_CALLS
from diffkern.injection import graph_fusion, layout_fusion, planning
from diffkern.injection.patching import patches
from diffkern.verify import gain
from diffkern.verify.gain import Cost
from tests.graph.test_timing import FULL_QUEUE, SDXL, Clock

#: Whether a capture is going on, and what ran.
capturing: list[bool] = [False]
ran: list[str] = []


class Repeats:
    """In the place of a captured step: runs it again on the tensors of a replay."""

    refuses: CaptureError | None = None

    def __init__(
        self, run: Callable[[list[Any]], Any], leaves: list[Any], pool: GraphPool, limit: int | None = None
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.run, self.leaves, self.kept, self.caches = run, leaves, list[Any](), list[Any]()
        capturing[0] = True
        try:
            self.run(leaves)
        finally:
            capturing[0] = False

    def replay(self, tensors: list[Tensor]) -> Any:
        given = iter(tensors)
        before = len(ran)
        result = self.run([next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])
        del ran[before:]  # a replay runs no Python
        return result


class Block(nn.Linear):
    """A block that a capture may refuse, or that keeps state."""

    refuses = False

    def forward(self, x: Tensor) -> Tensor:
        ran.append("block")
        if capturing[0] and self.refuses:
            raise CaptureError("RuntimeError: operation not permitted when stream is capturing")
        return super().forward(x)


class Denoiser(nn.Module):
    """Reads a value in its head, and has two lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList([Block(4, 4)])
        self.blocks = nn.ModuleList([Block(4, 4) for _ in range(2)])
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        ran.append("head")
        if capturing[0]:
            raise CaptureError("RuntimeError: .item() waits for the GPU")
        x = x + x.sum().item() * scale
        for block in self.first:
            x = block(x)
        for block in self.blocks:
            x = x + block(x)
        ran.append("tail")
        return x * 2


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        yield
        return
    monkeypatch.setattr(planning, "_likely_devices", lambda *_: (torch.device("cuda", 0),))
    monkeypatch.setattr(graph_fusion, "unfit_call", lambda call: None)
    monkeypatch.setattr(graph_fusion, "Stopwatch", Clock)
    monkeypatch.setattr(GraphPool, "room", lambda self, device, share: 1 << 30)
    monkeypatch.setattr(ModuleSnapshot, "unfit", lambda self: None)
    monkeypatch.setattr(steps, "capture", Repeats)
    ran.clear()
    yield
    Repeats.refuses = None
    Clock.as_is, Clock.replayed = SDXL


def steps_of(model: nn.Module, twin: nn.Module, count: int, **options: Any) -> list[str]:
    """Some calls, each compared with stock; what ran in Python in the last of them."""
    latest: list[str] = []
    with torch.no_grad():
        for _ in range(count):
            x = torch.randn(3, 4)
            ran.clear()
            result = model(x, **options)
            latest = list(ran)
            assert torch.equal(result, twin(x, **options))
    return latest


def test_where_the_head_cannot_be_captured_the_blocks_are() -> None:
    model = Denoiser()
    twin = copy.deepcopy(model)
    report = inject_optimized_kernels(model, cuda_graph=True)
    assert steps_of(model, twin, 1) == ["head", "block", "block", "block", "tail"]
    assert steps_of(model, twin, 4) == ["head", "tail"]
    counts = report.calls()[""]
    assert counts["fused"] == 2
    assert counts["stock_reasons"] == {FIRST_CALL: 2, "cannot be captured: RuntimeError: .item() waits for the GPU": 1}
    (site,) = report.patched
    assert site.reason.startswith("its blocks alone are captured, since a step as a whole cannot be captured: ")
    # What changes takes effect at the next call.
    model.blocks[1].weight.mul_(2)
    twin.blocks[1].weight.mul_(2)
    assert steps_of(model, twin, 1) == ["head", "tail"]
    model.blocks[1] = twin.blocks[1] = Block(4, 4).requires_grad_(False).eval()
    assert steps_of(model, twin, 1).count("block") == 3
    assert steps_of(model, twin, 3) == ["head", "tail"]
    # A scale that the blocks do not read makes no other kind of them.
    assert steps_of(model, twin, 1, scale=0.5) == ["head", "tail"]
    assert report.restore() == 1 and not list(patches(model))
    assert steps_of(model, twin, 1).count("block") == 3


def test_where_the_first_blocks_cannot_be_captured_the_later_ones_are() -> None:
    model = Denoiser()
    model.first[0].refuses = True
    twin = copy.deepcopy(model)
    inject_optimized_kernels(model, cuda_graph=True)
    assert steps_of(model, twin, 8) == ["head", "block", "tail"]


def test_where_no_blocks_can_be_captured_a_step_is_stock_and_that_is_tried_once() -> None:
    model = Denoiser()
    for block in (*model.first, *model.blocks):
        block.refuses = True
    twin = copy.deepcopy(model)
    report = inject_optimized_kernels(model, cuda_graph=True)
    assert steps_of(model, twin, 12) == ["head", "block", "block", "block", "tail"]
    counts = report.calls()[""]
    assert counts["fused"] == 0 and counts["stock"] == 12
    assert all("its kind" in reason or "cannot be captured" in reason for reason in counts["stock_reasons"])


def test_a_strict_injection_waits_for_blocks_and_raises_where_they_cannot_be_captured() -> None:
    model = Denoiser()
    report = inject_optimized_kernels(model, cuda_graph=True, strict=True)
    with torch.no_grad():
        model(torch.randn(3, 4))
        with pytest.raises(StrictModeError, match="waits for the GPU"):
            model(torch.randn(3, 4))
    twin = copy.deepcopy(model)
    restore(twin)
    assert steps_of(model, twin, 4) == ["head", "tail"]
    assert (report.calls()[""]["fused"], report.calls()[""]["stock"]) == (3, 2)


def test_times_decide_about_blocks_as_about_steps() -> None:
    for clocks, expected in ((None, ["head", "tail"]), (FULL_QUEUE, ["head", "block", "block", "block", "tail"])):
        if clocks is not None:
            Clock.as_is, Clock.replayed = clocks
        model = Denoiser()
        twin = copy.deepcopy(model)
        report = inject_optimized_kernels(model, config=KernelConfig(measure=True))
        assert steps_of(model, twin, 1 + TIMED_CALLS + 3 + TIMED_CALLS + 1) == expected
        assert bool(report.patched) == (clocks is None), report.notes
        (state,) = patches(model)
        blocks = state.fusion._blocks(model)  # type: ignore[attr-defined]
        assert bool(blocks.graphs.kinds) == (clocks is None)


def test_blocks_without_room_for_their_graph_stay_as_they_are() -> None:
    model = Denoiser()
    twin = copy.deepcopy(model)
    inject_optimized_kernels(model, config=KernelConfig(measure=True))
    steps_of(model, twin, 1 + TIMED_CALLS + 1)
    Repeats.refuses = NoRoomError("CUDA graphs would take 9.00 GiB")
    assert steps_of(model, twin, 6) == ["head", "block", "block", "block", "tail"]


class OnTheCpu(nn.Module):
    """Leaves a table on the CPU, which each block copies, as CogView4 does, or computes with it there."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.computes = computes
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.linspace(0, 50, 64)
        for block in self.blocks:
            y = torch.tanh(torch.sin(table * 1.7).exp()) if self.computes else table
            x = block(x) * y.to(x.device)
        return x


@pytest.mark.parametrize("longest", [-1.0, float("inf")])
def test_a_step_is_captured_once_its_layout_is_decided(longest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call may take too long to decide: it proves and compiles."""
    decided: list[bool] = []

    def costs(computations: Any, device: torch.device) -> list[Cost]:
        decided.append(capturing[0])
        return [Cost(9.0, 1.0), Cost(9.0, 2.0)]

    def finish(device: torch.device) -> None:
        if finished:
            monkeypatch.setattr(layout_fusion, "_LONGEST", float("inf"))
        finished.append(True)

    finished: list[bool] = []
    monkeypatch.setattr(layout_fusion, "_LONGEST", longest)
    monkeypatch.setattr(layout_fusion, "finish", finish)
    monkeypatch.setattr(layout_fusion, "_is_captured", lambda x: capturing[0])
    monkeypatch.setattr(gain, "costs", costs)
    model = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)]).requires_grad_(False).eval()
    x = torch.randn(1, 4, 8, 8)
    stock = model(x)
    report = inject_optimized_kernels(model, config=KernelConfig(measure=True), cuda_graph=True)
    for _ in range(6):
        torch.testing.assert_close(model(x), stock)
    assert decided == [False] and any("computes in channels last" in note for note in report.notes)
    assert "a CUDA graph is being captured" not in str(report.calls()), "whose replays would ask for no layout"
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert any(site.op == "cuda_graph" and site._state.fused_calls for site in report.patched)


@pytest.mark.gpu
@pytest.mark.parametrize("computes", [False, True])
def test_a_table_that_the_head_leaves_on_the_cpu_is_copied_once_and_the_bits_stay(computes: bool) -> None:
    model = OnTheCpu(computes).cuda()
    twin = copy.deepcopy(model)
    report = inject_optimized_kernels(model, cuda_graph=True)
    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(4, 64, device="cuda")
            assert torch.equal(model(x), twin(x))
    fused = report.calls()[""]["fused"]
    assert computes or fused >= 4
