"""When a step is captured and when replayed, and what a capture that fails leaves behind.

There is no capture without a GPU. Here a step is "captured" by a function that runs it once and repeats what it gave
from inputs that are copied in, as a graph does; the real thing is tested on GPUs in tests/injection/test_graphs.py.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from diffkern.graph import capture as capture_module
from diffkern.graph import steps
from diffkern.graph.capture import CaptureError, GraphPool
from diffkern.graph.steps import (
    FIRST_CALL,
    MAX_CHANGES,
    MAX_FAILURES,
    MAX_GRAPHS,
    RESTING_CALLS,
    StepCall,
    StepGraphs,
)
from diffkern.providers.foreign import summary
from tests.graph.test_snapshot import returns


class Model(nn.Module):
    """Multiplies by an attribute; counts how often it ran where the test wants it to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)
        self.scale = 2.0
        self.ran: list[int] = []
        self.keeps_state = False

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        runs.append(1)
        if self.keeps_state:
            self.ran.append(1)
        return (x * self.weight * self.scale) ** power


runs: list[int] = []


class Recorded:
    """Stands for a captured step: the forward with the attributes that it had when it was captured."""

    def __init__(
        self, run: Callable[[list[Any]], Any], leaves: list[Any], pool: GraphPool, limit: int | None = None
    ) -> None:
        run(leaves)  # Python runs once, at the capture
        self.model: Any = weakref.ref(current[0])
        self.scale = current[0].scale
        self.power = next((leaf for leaf in leaves if isinstance(leaf, int)), 1)
        self.kept: list[Any] = []
        self.caches: list[Any] = []
        self.replays = 0

    def replay(self, tensors: list[Tensor]) -> Tensor:
        self.replays += 1
        return (tensors[0] * self.model().weight * self.scale) ** self.power  # type: ignore[no-any-return]


current: list[Any] = []


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "capture", Recorded)
    runs.clear()


def call(graphs: StepGraphs, model: Any, *args: Any) -> tuple[Tensor, str | None]:
    """One call as the patch makes it; its result, and why it ran as it is."""
    current[:] = [model]
    step = StepCall(*tree_flatten((args, {})))

    def forward(step: StepCall, leaves: list[Any]) -> Any:
        arguments, options = step.arguments(leaves)
        return model(*arguments, **options)

    reason = graphs.failure(step)
    if reason is None:
        graphs.speculate(step)
        reason = graphs.check_guards(step, graphs.snapshot(model, ()), ())
    if reason is None:
        try:
            return graphs.run(step, model, (), lambda now: (), forward), None
        except CaptureError:
            reason = graphs.failure(step)
    return model(*args), reason


def test_the_second_call_of_a_kind_is_captured_and_later_ones_replayed() -> None:
    graphs, model = StepGraphs(), Model()
    for n in range(1, 6):
        result, reason = call(graphs, model, torch.full((2,), float(n)))
        assert torch.equal(result, torch.full((2,), 2.0 * n)) and reason == (FIRST_CALL if n == 1 else None)
    assert len(runs) == 2
    model.weight.fill_(3)  # in place: the replay reads it
    assert torch.equal(call(graphs, model, torch.ones(2))[0], torch.full((2,), 6.0)) and len(runs) == 2


def test_a_thread_runs_one_call_as_it_is_before_it_captures_and_replays_at_once() -> None:
    graphs, model = StepGraphs(), Model()
    reasons: list[str | None] = []

    def work(calls: int) -> None:
        reasons.extend(call(graphs, model, torch.ones(2))[1] for _ in range(calls))

    for calls in (1, 2, 2):
        thread = threading.Thread(target=work, args=(calls,))
        thread.start()
        thread.join()
    assert reasons == [FIRST_CALL, FIRST_CALL, None, None, None] and len(runs) == 3


def test_threads_do_not_take_a_kind_of_calls_from_each_other() -> None:
    graphs, model = StepGraphs(), Model()
    for _ in range(2):
        call(graphs, model, torch.ones(2))
    reasons: list[str | None] = []

    def patched() -> Iterator[nn.Module]:
        """Another thread comes in the middle of a comparison."""
        thread = threading.Thread(target=lambda: reasons.append(call(graphs, model, torch.ones(2))[1]))
        thread.start()
        thread.join()
        yield from ()

    step = StepCall(*tree_flatten(((torch.ones(2),), {})))
    reasons.append(graphs.check_guards(step, graphs.snapshot(model, ()), patched()))
    assert reasons == [None, None]


def test_the_next_call_computes_with_the_new_value_of_an_attribute() -> None:
    graphs, model = StepGraphs(), Model()
    for _ in range(3):
        call(graphs, model, torch.ones(2))
    model.scale = 5.0
    result, reason = call(graphs, model, torch.ones(2))
    assert torch.equal(result, torch.full((2,), 5.0)) and reason == "scale changed since the last call of its kind"
    for _ in range(2):
        result, reason = call(graphs, model, torch.ones(2))
        assert torch.equal(result, torch.full((2,), 5.0)) and reason is None
    assert len(runs) == 4


def test_kinds_of_calls_differ_in_shapes_and_plain_arguments() -> None:
    graphs, model = StepGraphs(), Model()
    kinds = [(torch.full((n,), 3.0), power) for n in (1, 2) for power in (1, 2)]
    for _ in range(3):
        for x, power in kinds:
            assert torch.equal(call(graphs, model, x, power)[0], (x * 2) ** power)
    assert len(runs) == 2 * len(kinds) and len(graphs.kinds) == len(kinds) == MAX_GRAPHS
    call(graphs, model, torch.ones(7))
    assert len(graphs.kinds) == MAX_GRAPHS
    assert call(graphs, model, *kinds[0])[1] == FIRST_CALL


def test_a_forward_that_keeps_state_runs_each_time_and_once_a_call() -> None:
    graphs, model = StepGraphs(), Model()
    model.keeps_state = True
    reasons = [call(graphs, model, torch.ones(2))[1] for _ in range(8)]
    assert len(model.ran) == len(runs) == 8
    assert reasons[0] == FIRST_CALL and reasons[1] == "ran.0 changed since the last call of its kind"
    assert reasons[MAX_CHANGES] == reasons[-1] and str(reasons[-1]).endswith("changes from call to call")


def test_a_forward_that_keeps_state_now_and_then_is_found_out_by_its_capture() -> None:
    class Alternates(Model):
        """Keeps the size of its last input, as some forwards do."""

        def forward(self, x: Tensor, power: int = 1) -> Tensor:
            self.size = len(x)
            return super().forward(x, power)

    graphs, model = StepGraphs(), Alternates()
    for _ in range(3):
        for n in (2, 3):
            x = torch.ones(n)
            result, reason = call(graphs, model, x)
            assert torch.equal(result, 2 * x) and model.size == n
    assert reason == "its forward keeps state: size"
    assert len(runs) == 6


def test_a_kind_that_cannot_be_captured_runs_as_it_is_and_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*args: Any) -> Any:
        tried.append(1)
        raise CaptureError("RuntimeError: operation not permitted when stream is capturing")

    monkeypatch.setattr(steps, "capture", fails)
    graphs, model = StepGraphs(), Model()
    for _ in range(5):
        result, reason = call(graphs, model, torch.ones(2))
        assert torch.equal(result, torch.full((2,), 2.0))
    assert len(tried) == 1 and reason == (
        "cannot be captured: RuntimeError: operation not permitted when stream is capturing"
    )
    for size in range(3, 3 + 2 * MAX_FAILURES):
        for _ in range(2):
            call(graphs, model, torch.ones(size))
    assert len(tried) == len(graphs.failures) == MAX_FAILURES
    assert "no more are tried" in str(call(graphs, model, torch.ones(99))[1])


def test_a_module_that_cannot_be_replayed_is_not_looked_at_before_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, model = StepGraphs(), Model()
    call(graphs, model, torch.ones(2))
    graphs.rest("its weights are elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "snapshot", None)
        reasons = [call(graphs, model, torch.ones(2))[1] for _ in range(RESTING_CALLS)]
    assert set(reasons) == {"its weights are elsewhere"}
    assert call(graphs, model, torch.ones(2))[1] is None


def test_errors_of_the_user_reach_the_user() -> None:
    graphs, model = StepGraphs(), Model()
    with pytest.raises(TypeError):
        call(graphs, model, torch.ones(2), "power")


def test_what_is_known_of_a_model_does_not_keep_it_alive() -> None:
    memory: weakref.WeakKeyDictionary[nn.Module, StepGraphs] = weakref.WeakKeyDictionary()
    model = nn.Sequential(Model(), nn.Linear(2, 2)).requires_grad_(False)
    model[0].parent = SimpleNamespace(names=["x"])
    model[0].callback = returns(model)
    model.scale = 1.0
    graphs = memory[model] = StepGraphs()
    call(graphs, model, torch.ones(2))
    reference = weakref.ref(model)
    current.clear()
    del model, graphs
    gc.collect()
    assert reference() is None and not memory


class Device:
    """The parts of torch that a capture goes through, as a log. A capture is lost if ``lost``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
        self.log: list[str] = []
        self.lost = lost
        device = self

        class Graph:
            def __init__(self) -> None:
                self.name = "spare" if any(line.startswith("begin") for line in device.log) else "graph"

            def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
                assert capture_error_mode == "thread_local"
                device.log.append(f"begin {self.name}")

            def capture_end(self) -> None:
                device.log.append(f"end {self.name}")
                if device.lost and self.name == "graph":
                    raise RuntimeError("operation failed due to a previous error during capture")

            def pool(self) -> str:
                if f"end {self.name}" not in device.log or device.lost:
                    raise RuntimeError("called without a preceding successful capture")
                return "pool"

            def reset(self) -> None:
                device.log.append(f"reset {self.name}")

        class Within:
            def __init__(self, *args: Any) -> None: ...

            def __enter__(self) -> None: ...

            def __exit__(self, *args: object) -> None: ...

        for name, value in {
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: "pool",
            "synchronize": lambda device: self.log.append("synchronize"),
            "empty_cache": lambda: None,
            "stream": Within,
            "device": Within,
            "Stream": lambda device: "stream",
            "get_rng_state": lambda device: torch.get_rng_state(),
            "set_rng_state": lambda state, device: self.log.append("set the generator of the GPU"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            end = functools.partial(lambda name, index, pool: self.log.append(f"{name} {pool}"), name)
            monkeypatch.setattr(torch._C, name, end, raising=False)
        monkeypatch.setattr(torch, "zeros", lambda size, device: torch.ones(size))


@pytest.mark.parametrize("lost", [False, True])
def test_a_capture_that_fails_is_ended_everywhere(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    device = Device(monkeypatch, lost)
    before = torch.get_rng_state()

    def run() -> None:
        torch.rand(3)
        raise RuntimeError("\nCannot copy between CPU and CUDA tensors\nmore")

    with pytest.raises(CaptureError, match=r"^RuntimeError: Cannot copy between CPU and CUDA tensors$") as raised:
        capture_module._capture(run, torch.device("cpu"), GraphPool())
    assert raised.value.__context__ is None  # whose frames would hold the memory of the step
    assert torch.equal(torch.get_rng_state(), before)
    pools = ["_cuda_endAllocateToPool pool", "_cuda_releasePool pool"]
    expected = ["synchronize", "begin graph", "end graph", *(pools if lost else []), "reset graph", "synchronize"]
    assert device.log == [*expected, "begin spare", "end spare", "reset spare", "synchronize"]
    if lost:
        capture_module._lost.pop()


def test_nothing_is_captured_any_more_in_a_pool_in_which_a_capture_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, lost=False)
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    pool, graph = GraphPool(), nn.Identity()
    assert pool.handle() == 0
    pool.add(graph, 5)  # type: ignore[arg-type]
    assert (pool.handle(), pool.handle()) == (0, 0)
    with pytest.raises(CaptureError, match="division by zero"):
        capture_module._capture(lambda: 1 / 0, torch.device("cpu"), pool)
    assert pool.handle() == 1 and pool.size == 5, "the graph that is there takes what it took"


def test_an_interrupt_of_the_user_is_none_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, lost=False)

    def run() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_module._capture(run, torch.device("cpu"), GraphPool())
    assert device.log[-2:] == ["reset spare", "synchronize"]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: x.add_(1), "its forward writes into its inputs"),
        (lambda x: torch.rand(2), "its forward draws random numbers on the CPU"),
        (lambda x: {"x": x, "other": SimpleNamespace(x=x)}, "its result holds a SimpleNamespace, which is neither"),
        (lambda x: nn.Parameter(x), "its result holds a Parameter"),
    ],
)
def test_steps_that_a_replay_would_not_repeat(
    monkeypatch: pytest.MonkeyPatch, forward: Callable[[Tensor], Any], reason: str
) -> None:
    monkeypatch.setattr(capture_module, "_capture", lambda run, device, pool: (None, run()))
    x, state = torch.ones(2), torch.get_rng_state()
    with pytest.raises(CaptureError, match=f"^{reason}"):
        capture_module.capture(lambda leaves: forward(leaves[0]), [x], GraphPool())
    assert torch.equal(x, torch.ones(2)) and torch.equal(torch.get_rng_state(), state)


def test_errors_are_described_in_one_line() -> None:
    assert summary(ValueError("  \n one\ntwo")) == "ValueError: one" and summary(KeyError()) == "KeyError"
    assert len(summary(ValueError("x" * 1000), 200)) < 250
