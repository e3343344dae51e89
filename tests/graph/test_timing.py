"""Whether a graph is worth having is a function of times; the first calls of a kind are timed, and nothing waits.

Without a GPU the clocks are read from a list and a "capture" repeats the forward, as in tests/graph/test_steps.py; the
last tests run on a GPU.
"""

from __future__ import annotations

import copy
import gc
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import KernelConfig, inject_optimized_kernels, plan, restore
from diffkern.graph import MAX_GRAPHS, ModuleSnapshot, steps, timing
from diffkern.graph.capture import CaptureError, GraphPool, NoRoomError, capture
from diffkern.graph.steps import RESTING_CALLS
from diffkern.graph.timing import TIMED_CALLS, Stage, StepTime, reason_not_to_capture, reason_not_to_keep
from diffkern.injection import graph_fusion, planning
from diffkern.injection.patching import patches

#: Steps measured on an H200, in ms: host and GPU as they are, host and GPU of a replay.
SDXL = StepTime(96.0, 97.1), StepTime(2.1, 42.0)
FLUX = StepTime(31.0, 126.5), StepTime(2.4, 126.0)
SD3 = StepTime(56.3, 56.4), StepTime(1.9, 37.6)
#: A queue that is full: the host waits for the GPU, and the two take the same.
FULL_QUEUE = StepTime(126.4, 126.5), StepTime(2.4, 126.0)
#: So small that the host takes longer to compare than the GPU to compute.
TINY = StepTime(1.9, 1.9), StepTime(1.8, 0.2)


@pytest.mark.parametrize(
    ("as_is", "replayed", "captured", "kept"),
    [
        (*SDXL, True, True),
        (*SD3, True, True),
        (*FLUX, False, False),
        (*FULL_QUEUE, True, False),
        (*TINY, True, False),
        (StepTime(100.0, 125.0), StepTime(2.0, 100.0), True, True),
        (StepTime(100.0, 125.1), StepTime(2.0, 100.0), False, True),
        (StepTime(110.0, 110.0), StepTime(2.0, 100.0), True, False),
    ],
)
def test_a_graph_is_tried_where_the_gpu_may_wait_and_kept_where_it_gains_a_tenth(
    as_is: StepTime, replayed: StepTime, captured: bool, kept: bool
) -> None:
    assert (reason_not_to_capture(as_is) is None) == captured
    assert (reason_not_to_keep(as_is, replayed) is None) == kept


def test_the_reasons_have_the_figures() -> None:
    assert reason_not_to_capture(FLUX[0]) == (
        "the GPU takes 126.5 ms for a step and the host 31.0 ms: a graph would gain nothing"
    )
    assert reason_not_to_keep(*FULL_QUEUE) == (
        "a step takes 126.5 ms as it is and 126.0 ms as a graph: too little gained"
    )


def test_the_fastest_of_the_timed_calls_counts() -> None:
    # The first fills the queue, and in the second the host waits for it.
    assert timing.fastest([StepTime(31.0, 126.5), StepTime(126.4, 126.5)]) == FLUX[0]


class Model(nn.Module):
    """Doubles; counts how often Python ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0), requires_grad=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        runs.append(1)
        return x * self.weight


runs: list[int] = []


class Clock:
    """In the place of a stopwatch: reads what the test says, once the GPU is done."""

    as_is, replayed = SDXL
    done = True

    def __init__(self, device: torch.device, since: float | None = None) -> None:
        self.time = self.as_is if since is None else self.replayed
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def read(self) -> StepTime | None:
        assert self.stopped
        return self.time if Clock.done else None


class Repeats:
    """In the place of a captured step."""

    refuses: CaptureError | None = None

    def __init__(
        self, run: Callable[[list[Any]], Any], leaves: list[Any], pool: GraphPool, limit: int | None = None
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        run(leaves)
        self.kept: list[Any] = []
        self.caches: list[Any] = []
        self.limit = limit

    def replay(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0] * 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the wiring believe in a GPU."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(planning, "_likely_devices", lambda *_: (device,))
    monkeypatch.setattr(graph_fusion, "unfit_call", lambda call: None)
    monkeypatch.setattr(graph_fusion, "Stopwatch", Clock)
    monkeypatch.setattr(GraphPool, "room", lambda self, device, share: 1 << 30)
    monkeypatch.setattr(ModuleSnapshot, "unfit", lambda self: None)
    monkeypatch.setattr(steps, "capture", Repeats)
    runs.clear()
    yield
    Clock.as_is, Clock.replayed, Clock.done = *SDXL, True
    Repeats.refuses = None


def injected(**options: Any) -> tuple[Model, Any]:
    model = Model()
    return model, inject_optimized_kernels(model, config=KernelConfig(measure=True), **options)


def call(model: nn.Module, count: int, size: int = 2) -> None:
    for n in range(count):
        with torch.no_grad():
            x = torch.full((size,), float(n))
            assert torch.equal(model(x), x * 2)


def test_a_step_in_which_the_gpu_waits_becomes_a_graph_and_the_report_says_so(
    gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, report = injected()
    assert not report.patched and report.notes == [f"tests.graph.test_timing.Model: {planning.TIMED_AT_FIRST}"]
    call(model, 1 + TIMED_CALLS + 1)
    assert len(runs) == 1 + TIMED_CALLS + 1, "the last was captured"
    call(model, TIMED_CALLS + 1)
    assert len(runs) == 1 + TIMED_CALLS + 1
    said = "Model, input 2: a step took 97.1 ms as it is and takes 42.0 ms as a CUDA graph"
    assert report.notes[-1] == said and [record.message for record in caplog.records] == [said]
    (site,) = report.patched
    assert (site.op, site.how) == ("cuda_graph", "time")
    counts = report.calls()[""]
    assert counts["fused"] == TIMED_CALLS + 2
    assert counts["stock_reasons"] == {Stage.WARM_UP.value: 1, Stage.TIMED.value: TIMED_CALLS}
    assert report.restore() == 1 and not list(patches(model))


def test_a_step_that_keeps_the_gpu_busy_is_left_as_it_is(gpu: None) -> None:
    Clock.as_is = FLUX[0]
    model, report = injected(strict=True)
    call(model, 8)
    assert len(runs) == 8 and not report.patched and not report.calls()
    assert report.notes[-1].endswith("the host 31.0 ms: a graph would gain nothing")
    assert report.restore() == 0 and not list(patches(model))


def test_a_graph_that_gains_nothing_is_dropped(gpu: None) -> None:
    Clock.as_is, Clock.replayed = FULL_QUEUE
    model, report = injected()
    call(model, 10)
    (state,) = patches(model)
    graphs = state.fusion.graphs(model)  # type: ignore[attr-defined]
    assert not graphs.kinds and not report.patched and "too little gained" in report.notes[-1]
    assert len(runs) == 10 - TIMED_CALLS, "as many replays were timed"


def test_a_clock_that_the_gpu_has_not_passed_is_not_waited_for(gpu: None) -> None:
    Clock.done = False
    model, report = injected()
    call(model, 12)
    assert len(runs) == 12 and not report.patched
    Clock.done = True
    call(model, 4)
    assert len(runs) == 13 and len(report.patched) == 1


def test_the_first_replays_decide_while_the_gpu_is_behind_with_the_later_ones(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Clock] = []

    class Behind(Clock):
        """The GPU has not passed the latest replay."""

        def __init__(self, device: torch.device, since: float | None = None) -> None:
            super().__init__(device, since)
            started.append(self)

        def read(self) -> StepTime | None:
            return None if self is started[-1] and self.time is SDXL[1] else super().read()

    monkeypatch.setattr(graph_fusion, "Stopwatch", Behind)
    model, report = injected()
    call(model, 8 + TIMED_CALLS)
    assert len(report.patched) == 1


def test_a_hook_inside_is_not_looked_for_at_every_call(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Model(), Model()).eval()
    report = inject_optimized_kernels(model, config=KernelConfig(measure=True))
    handle = model[1].register_forward_hook(lambda *args: None)
    looked: list[int] = []
    snapshot = steps.StepGraphs.snapshot
    monkeypatch.setattr(steps.StepGraphs, "snapshot", lambda *args: (looked.append(1), snapshot(*args))[1])
    with torch.no_grad():
        for _ in range(1 + RESTING_CALLS):
            model(torch.ones(2))
        assert len(looked) == 1
        handle.remove()
        for _ in range(16):
            model(torch.ones(2))
    assert len(report.patched) == 1


def test_each_kind_of_call_is_timed_and_kinds_that_take_turns_get_no_graphs(gpu: None) -> None:
    model, report = injected()
    call(model, 6, size=3)
    call(model, 1 + TIMED_CALLS, size=4)
    assert len(runs) == 1 + TIMED_CALLS + 1 + 1 + TIMED_CALLS
    sizes = range(5, 5 + MAX_GRAPHS + 1)
    for _ in range(12):
        for size in sizes:
            call(model, 2, size)
    runs.clear()
    for size in sizes:
        call(model, 1, size)
    assert runs, "a kind that was captured again and again runs as it is"
    assert any("take turns" in note for note in report.notes)


def test_a_capture_that_fails_is_a_note_and_not_tried_again(gpu: None) -> None:
    Repeats.refuses = CaptureError("no")
    model, report = injected(strict=True)
    call(model, 8)
    assert len(runs) == 8 and report.notes[-1] == "Model, input 2: cannot be captured: no"


def test_graphs_without_room_all_go_so_that_the_pool_is_freed(gpu: None) -> None:
    model, report = injected()
    call(model, 8, size=3)
    Repeats.refuses = NoRoomError("CUDA graphs would take 9.00 GiB")
    call(model, 8, size=4)
    (state,) = patches(model)
    assert not state.fusion.graphs(model).kinds  # type: ignore[attr-defined]
    assert "would take 9.00 GiB" in report.notes[-1]
    Repeats.refuses = None
    call(model, 3, size=3)
    assert len(state.fusion.graphs(model).kinds) == 1  # type: ignore[attr-defined]


def test_a_pool_that_grew_too_large_is_no_graph() -> None:
    pool = GraphPool()

    def grows(run: Callable[[], Any], device: torch.device, pool: GraphPool) -> tuple[None, Any]:
        pool.size += 3 << 30
        return None, run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffkern.graph.capture._capture", grows)
        assert capture(lambda leaves: leaves[0] * 2, [torch.ones(2)], pool, 3 << 30).pool is pool
        with pytest.raises(NoRoomError, match=r"would take 6\.00 GiB, and may take 3\.00 GiB \(graph_memory\)"):
            capture(lambda leaves: leaves[0] * 2, [torch.ones(2)], pool, 3 << 30)


def test_graph_memory_bounds_what_graphs_take_and_what_is_free_does_by_default(gpu: None) -> None:
    for options, limit in (({}, 1 << 30), ({"graph_memory": 2.5}, 5 << 29)):
        model, _ = injected(**options)
        call(model, 5)
        (state,) = patches(model)
        (kind,) = state.fusion.graphs(model).kinds.values()  # type: ignore[attr-defined]
        assert kind.step.limit == limit


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "_old_forward", model.forward),
        lambda model: setattr(model, "_compiled_call_impl", model._call_impl),
    ],
    ids=["offload hook", "compiled inside"],
)
def test_nothing_is_captured_unasked_with_an_offload_hook_or_what_is_compiled(
    gpu: None, change: Callable[[Any], object]
) -> None:
    model, report = injected()
    change(model)
    call(model, 8)
    assert len(runs) == 8 and not report.patched


def test_the_compiler_sees_what_lies_below_a_graph() -> None:
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_likely_devices", lambda *_: (torch.device("cuda", 0),))
        inject_optimized_kernels(model, config=KernelConfig(measure=True))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert restore(model) == 0 and not list(patches(model))  # it only watched


def test_without_measuring_on_the_cpu_and_where_it_is_forbidden_no_graph_lies_over_a_model(gpu: None) -> None:
    for options in ({"config": KernelConfig(measure=False)}, {"cuda_graph": False}, {}):
        model = Model()
        assert not inject_optimized_kernels(model, **options).notes and not list(patches(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_likely_devices", lambda *_: (torch.device("cpu"),))
        model, _ = injected()
        assert not list(patches(model))
    assert not plan(model, config=KernelConfig(measure=True)).patched


def test_what_is_asked_for_goes_over_what_times_decide(gpu: None) -> None:
    model, _ = injected()
    forced = inject_optimized_kernels(model, cuda_graph=True)
    assert [state.fusion.op for state in patches(model)] == ["cuda_graph"] * 2
    call(model, 3)
    assert forced.calls()[""]["fused"] == 2 and len(runs) == 2
    again = inject_optimized_kernels(model, config=KernelConfig(measure=True))
    assert len(list(patches(model))) == 2 and not again.patched
    assert forced.restore() == 1 and len(list(patches(model))) == 1


def test_the_configuration_says_whether_times_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFKERN_MEASURE")
    assert KernelConfig().measures and not KernelConfig(measure=False).measures
    monkeypatch.setenv("DIFFKERN_MEASURE", "0")
    assert not KernelConfig().measures and KernelConfig(measure=True).measures
    assert KernelConfig.from_json(KernelConfig(measure=True).to_json()) == KernelConfig(measure=True)
    with pytest.raises(ValueError, match="measure='yes': pass True, False, or None"):
        KernelConfig(measure="yes")  # type: ignore[arg-type]


# --- on a GPU ---------------------------------------------------------------------------------------------


class Launches(nn.Module):
    """Many small kernels, or one large product."""

    def __init__(self, launches: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size).roll(1, 0), requires_grad=False)  # which keeps all values
        self.launches = launches
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.launches):
            x = x @ self.weight
        return x


@pytest.mark.gpu
def test_times_on_a_gpu_decide_and_the_report_says_what_they_were() -> None:
    for launches, size in ((400, 16), (20, 8192)):
        model = Launches(launches, size).cuda()
        twin = copy.deepcopy(model)
        report = inject_optimized_kernels(model, config=KernelConfig(measure=True))
        for seed in range(12):
            torch.manual_seed(seed)
            x = torch.randn(min(size, 4096), size, device="cuda")
            with torch.no_grad():
                assert torch.equal(model(x), twin(x))
            torch.cuda.synchronize()
        decided = "as a CUDA graph" if report.patched else "a graph would gain nothing|too little gained"
        assert re.search(decided, report.notes[-1]), report.notes


@pytest.mark.gpu
def test_memory_after_restore_is_as_before_and_graphs_share_a_pool() -> None:
    model = Launches(400, 64).cuda()
    gc.collect()  # what other tests left in circles, or it would go in between
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    report = inject_optimized_kernels(model, cuda_graph=True)
    reserved = []
    for rows in (4096, 4000, 3000):
        for _ in range(4):
            with torch.no_grad():
                model(torch.ones(rows, 64, device="cuda"))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert report.calls()[""]["fused"] == 9
    report.restore()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.gpu
def test_graphs_of_one_pool_replayed_in_any_order_compute_what_the_calls_do() -> None:
    models = [Launches(50, 32).cuda() for _ in range(2)]
    for model in models:
        inject_optimized_kernels(model, cuda_graph=True)
    inputs = [torch.randn(rows, 32, device="cuda") for rows in (8, 16, 24)]
    with torch.no_grad():
        expected = [copy.deepcopy(model) for model in models]
        for twin in expected:
            restore(twin)
        for turn in range(12):
            order = torch.randperm(6, generator=torch.Generator().manual_seed(turn)).tolist()
            for number in order:
                model, x = number % 2, inputs[number // 2]
                assert torch.equal(models[model](x), expected[model](x))


@pytest.mark.gpu
def test_a_user_captures_a_graph_around_a_model_that_times_decide_about() -> None:
    model = Launches(50, 32).cuda()
    inject_optimized_kernels(model, config=KernelConfig(measure=True))
    x = torch.randn(4, 32, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(2):
                expected = model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(x)
        result.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, expected)
