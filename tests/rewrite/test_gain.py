"""A site stays fused only where that is faster, by what was measured on its own operands; costs are given here."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import nn

from diffkern import KernelConfig, inject_optimized_kernels, use_provider
from diffkern.cache import derived
from diffkern.graph.capture import replay_time
from diffkern.rewrite import Rewriter
from diffkern.verify import choices, gain
from diffkern.verify.gain import Cost, Prepared, costs, costs_of, reason_without_gain
from diffkern.verify.isolation import MEASURING
from tests.rewrite.modules import block, leaves

NAMES = "x, scale, shift, gate, y"
BODY = "n = self.norm(x) * (1 + scale) + shift\nreturn n + gate * y"


@pytest.mark.parametrize(
    ("fused", "stock", "gains_as_calls", "gains_as_replays"),
    [
        # A gated residual of 6 tokens of 32 numbers on a CPU: two adds of torch are done before one op of ours begins.
        (Cost(27.0, 27.0), Cost(4.5, 4.5), False, False),
        # The query and key of 70 tokens there.
        (Cost(340.2, 340.2), Cost(835.3, 835.3), True, True),
        # Small operands on a GPU: fewer kernels, but the host takes longer to launch them.
        (Cost(60.0, 15.0), Cost(40.0, 25.0), False, True),
        # Large ones: the GPU decides either way.
        (Cost(60.0, 210.0), Cost(40.0, 400.0), True, True),
        (Cost(20.0, 403.0), Cost(40.0, 400.0), True, True),
        (Cost(20.0, 409.0), Cost(40.0, 400.0), False, False),
        # Steps of Stable Diffusion 1.5 on a slow host, in two layouts.
        (Cost(32300.0, 9000.0), Cost(32000.0, 12000.0), True, True),
        (Cost(32000.0, 12000.0), Cost(32300.0, 9000.0), False, False),
        # A host that gains more than clocks are wrong by.
        (Cost(20.0, 15.0), Cost(40.0, 12.0), True, False),
    ],
)
def test_what_a_step_waits_for_decides(fused: Cost, stock: Cost, gains_as_calls: bool, gains_as_replays: bool) -> None:
    assert (not reason_without_gain(fused, stock, replayed=False)) == gains_as_calls
    assert (not reason_without_gain(fused, stock, replayed=True)) == gains_as_replays


def test_the_reason_has_both_costs() -> None:
    assert reason_without_gain(Cost(27.0, 27.0), Cost(4.5, 4.5), False) == (
        "fused it takes 27.0 us, as it is written 4.5 us: no gain"
    )
    assert reason_without_gain(Cost(60.0, 15.0), Cost(40.0, 25.0), False) == (
        "fused it takes 15.0 us (host 60.0 us), as it is written 25.0 us (host 40.0 us): no gain"
    )


def test_computations_have_turns_and_each_is_warmed_up_first() -> None:
    order: list[str] = []
    found = costs([lambda: order.append("a"), lambda: order.append("b")], torch.device("cpu"))
    assert order[:4] == ["a", "b", "a", "b"] and order[4:].index("b") < len(order) - 5
    assert all(0 < cost.host == cost.device for cost in found)


def test_what_takes_long_is_called_twice_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "_LONG", 0.0)
    order: list[str] = []
    found = costs([lambda: order.append("a"), lambda: order.append("b")], torch.device("cpu"))
    assert order == ["a", "b", "a", "b"] and all(0 < cost.host == cost.device for cost in found)


class _Gpu:
    """A GPU with a clock of its own, and a host that takes its time, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1000) -> None:
        self.host, self.free, self.most, self.queue = 0.0, 0.0, most, list[float]()
        self.worked = 0.0
        gpu = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.at = 0.0

            def record(self, stream: object) -> None:
                self.at = max(gpu.free, gpu.host)

            def query(self) -> bool:
                return gpu.host >= self.at

            def synchronize(self) -> None:
                gpu.finish()

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(gain.time, "perf_counter", lambda: self.host)
        monkeypatch.setattr(gain.time, "thread_time", lambda: self.worked)
        monkeypatch.setattr(gain, "finish", lambda device: self.finish())
        for name, value in {
            "Event": Event,
            "_sleep": lambda cycles: self.launch(0.0, cycles / 2e9),
            "current_stream": lambda device: None,
            "device": lambda device: nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def launch(self, host: float, device: float, interrupted: float = 0.0) -> None:
        self.worked += host
        self.host += host + interrupted
        self.queue = [end for end in self.queue if end > self.host]
        if len(self.queue) >= self.most:
            self.host = self.queue[-self.most]
        self.free = max(self.free, self.host) + device
        self.queue.append(self.free)

    def finish(self) -> None:
        self.host = max(self.host, self.free)

    def step(self, host: float, device: float, interrupted: float = 0.0) -> Callable[[], None]:
        def compute() -> None:
            for _ in range(100):
                self.launch(host / 100, device / 100, interrupted / 100)

        return compute


def test_a_slow_host_is_not_in_the_time_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step of Stable Diffusion 1.5 on an H200: the host takes 32 ms, and the GPU 12, or 9 in channels last."""
    gpu = _Gpu(monkeypatch)
    steps = gpu.step(0.0321, 0.009), gpu.step(0.032, 0.012), gpu.step(0.4, 0.1)
    for number, expected in (
        (2, [(32100, 9000), (32000, 12000)]),
        (3, [(32100, 9000), (32000, 12000), (400000, 100000)]),
    ):
        found = costs(steps[:number], torch.device("cuda"))
        assert [(round(cost.host), round(cost.device)) for cost in found] == expected
    few = costs([gpu.step(0.0001, 0.00005), gpu.step(0.00005, 0.0001)], torch.device("cuda"))
    assert [(round(cost.host), round(cost.device)) for cost in few] == [(100, 50), (50, 100)]


def test_a_host_is_not_slower_for_the_work_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a norm of HunyuanDiT on a host with other load: 560 us where the host computes for 60, and the GPU for 28."""
    gpu = _Gpu(monkeypatch)
    found = costs([gpu.step(60e-6, 28e-6, 500e-6), gpu.step(119e-6, 119e-6)], torch.device("cuda"))
    assert [(round(cost.host), round(cost.device)) for cost in found] == [(60, 28), (119, 119)]


def test_what_a_step_looks_at_once_is_in_no_call_that_a_gpu_is_timed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """As feed-forwards of Stable Diffusion 3 in fp8: 545 us of host that looked at the weights of all layers."""
    paused: list[bool] = []
    with monkeypatch.context() as on_gpu:
        gpu = _Gpu(on_gpu)
        costs([lambda: (paused.append(derived._checks_paused.get()), gpu.launch(1e-5, 1e-5))], torch.device("cuda"))
    assert paused and all(paused)
    paused.clear()
    costs([lambda: paused.append(derived._checks_paused.get())], torch.device("cpu"))
    assert paused and not any(paused)


def test_a_step_of_more_kernels_than_a_queue_holds_is_timed_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch, most=40)
    steps = gpu.step(0.05, 0.009), gpu.step(0.05, 0.012)
    found = costs(steps, torch.device("cuda"))
    assert [round(cost.host) for cost in found] == [50000] * 2 and all(cost.device > 25000 for cost in found)
    ready: list[str] = []
    replays: list[float | None] = [9000.0, 12000.0]
    both = [
        Prepared(partial(ready.append, name), step, lambda at=at: ready.append("replay") or replays[at])
        for at, (name, step) in enumerate(zip("ab", steps, strict=True))
    ]
    found = costs(both, torch.device("cuda"))
    assert [(round(cost.host), cost.device) for cost in found] == [(50000, 9000.0), (50000, 12000.0)]
    assert ready[-4:] == ["a", "replay", "b", "replay"]
    replays[1] = None
    assert costs(both, torch.device("cuda"))[0].device > 25000, "one of them cannot be captured"
    gpu.most, asked = 1000, len(ready)
    assert [round(cost.device) for cost in costs(both, torch.device("cuda"))] == [9000, 12000]
    assert "replay" not in ready[asked:]


def test_a_long_call_that_a_gpu_computes_all_the_time_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ran = _Gpu(monkeypatch), list[int]()
    found = costs([lambda: (ran.append(1), gpu.launch(0.1, 0.9))], torch.device("cuda"))
    assert len(ran) == 2 and round(found[0].device) == 1_000_000


def test_what_prepares_a_turn_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, layouts = _Gpu(monkeypatch), list[str]()

    def computation(layout: str, device: float) -> Prepared:
        def compute() -> None:
            assert layouts[-1] == layout
            gpu.launch(0.03, device)

        return Prepared(lambda: (layouts.append(layout), gpu.launch(0.02, 0.02)), compute)

    both = computation("last", 0.008), computation("first", 0.012)
    found = costs(both, torch.device("cuda"))
    assert [(round(cost.host), round(cost.device)) for cost in found] == [(30000, 8000), (30000, 12000)]
    costs([Prepared(lambda: layouts.append("a"), lambda: layouts.append("b"))], torch.device("cpu"))
    assert layouts[-4:] == ["a", "b"] * 2


@pytest.mark.gpu
def test_the_events_of_a_gpu_leave_a_slow_host_out() -> None:
    x = torch.zeros(1 << 20, device="cuda")

    def slow() -> None:
        x.add_(1)
        worked = time.thread_time()
        while time.thread_time() - worked < 0.02:
            pass
        x.add_(1)

    (found,) = costs([slow], x.device)
    assert found.device < 2_000 < 20_000 <= found.host


@pytest.mark.gpu
def test_a_replay_takes_what_the_gpu_does_and_leaves_nothing() -> None:
    x = torch.ones(1 << 24, device="cuda")

    def compute() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = y * 2.0
        return y

    compute()
    gc.collect()  # what earlier tests have left goes now, and not meanwhile
    before = torch.cuda.memory_allocated()
    took = replay_time(compute, x.device)
    # 20 times 64 MiB are read and written; no memory does that at 30 TB/s.
    assert took is not None and took > 20 * 2 * (1 << 26) / 30e6
    assert replay_time(lambda: x.sum().item(), x.device) is None
    assert torch.cuda.memory_allocated() == before and float(compute()[0]) == 2.0**20


class Given:
    """Costs that the test says, by whether the operands are large, in the place of a clock. Both computations run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, small: bool, large: bool) -> None:
        self.small, self.large, self.asked = small, large, 0
        monkeypatch.setattr(gain, "costs", self)

    def __call__(self, computations: Sequence[Callable[[], Any]], device: torch.device) -> list[Cost]:
        results = [compute() for compute in computations]
        if computations[0] is computations[1]:  # a guard, whose share costs nothing here
            return [Cost(0.0, 0.0)] * 2
        torch.testing.assert_close(results[0], results[1])
        self.asked += 1
        gains = self.large if results[0].numel() > 1 << 12 else self.small
        return [Cost(1.0, 1.0), Cost(2.0, 2.0)] if gains else [Cost(3.0, 3.0), Cost(2.0, 2.0)]


def larger(given: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf.repeat(1, 8, 1) if leaf.shape[1] == 40 else leaf for name, leaf in given.items()}


def test_a_site_without_a_gain_runs_its_expression_where_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Given(monkeypatch, small=False, large=True)
    module = block(NAMES, BODY)
    found: Any = Rewriter(replayed=False).rewrite(module)
    small = leaves(NAMES)
    large = larger(small)
    reasons: list[str | None] = []
    for site in found.sites:
        site.observer = lambda module, reason: None if get_ident() in MEASURING else reasons.append(reason)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(found.function(module, **small), module(**small))
        assert clock.asked == 2 and [site.fused_calls for site in found.sites] == [0, 0]
        assert all(reason and reason.endswith("as it is written 2.0 us: no gain") for reason in reasons)
        for _ in range(3):
            torch.testing.assert_close(found.function(module, **large), module(**large))
    assert clock.asked == 4 and [site.fused_calls for site in found.sites] == [3, 3]


def test_an_error_while_a_site_is_timed_leaves_the_call_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(computations: Sequence[Callable[[], Any]], device: torch.device) -> list[Cost]:
        raise torch.OutOfMemoryError("no memory for copies")

    monkeypatch.setattr(gain, "costs", raises)
    module = block(NAMES, BODY)
    found: Any = Rewriter(replayed=False).rewrite(module)
    with torch.no_grad():
        torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert [site.fused_calls for site in found.sites] == [1, 1]


def test_nothing_is_timed_where_gradients_are_wanted_or_a_provider_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Given(monkeypatch, small=False, large=False)
    module = block(NAMES, BODY)
    found: Any = Rewriter(replayed=False).rewrite(module)
    found.function(module, **leaves(NAMES))
    named: Any = Rewriter(provider="eager", replayed=False).rewrite(module)
    with torch.no_grad():
        named.function(module, **leaves(NAMES))
        with use_provider("eager"):
            found.function(module, **leaves(NAMES))
        unmeasured: Any = Rewriter().rewrite(module)
        unmeasured.function(module, **leaves(NAMES))
    assert clock.asked == 0 and all(site.fused_calls for site in (*named.sites, *unmeasured.sites))


def test_sites_of_modules_that_compute_alike_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Given(monkeypatch, small=False, large=False)
    rewriter, modules = Rewriter(replayed=False), (block(NAMES, BODY), block(NAMES, BODY))
    found: Any = [rewriter.rewrite(module) for module in modules]
    assert found[0] is not found[1], "their forwards are two functions, of one text"
    with torch.no_grad():
        for module, one in zip(modules, found, strict=True):
            one.function(module, **leaves(NAMES))
    assert clock.asked == 2 and all(site.idle_calls == 1 for one in found for site in one.sites)


@pytest.mark.parametrize("gains", [False, True])
def test_what_was_timed_once_is_not_timed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gains: bool) -> None:
    monkeypatch.setenv(choices.VARIABLE, str(tmp_path))
    clock = Given(monkeypatch, small=gains, large=gains)
    module = block(NAMES, BODY)
    for _ in range(3):
        found: Any = Rewriter(replayed=False).rewrite(module)
        with torch.no_grad():
            torch.testing.assert_close(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
        assert clock.asked == 2 and [site.fused_calls for site in found.sites] == [int(gains)] * 2
        choices._known.clear()  # as in another process
    assert costs_of("1.00 2.00 3.00 4.00") == [Cost(1.0, 2.0), Cost(3.0, 4.0)]
    assert costs_of("") is costs_of("1 2 3") is costs_of("no gain at all ?") is None


def test_an_injection_times_unless_it_is_strict_or_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, timed in (
        ({"config": KernelConfig(measure=True)}, True),
        ({"config": KernelConfig(measure=True), "strict": True}, False),
        ({"config": KernelConfig(measure=True), "verify": False}, False),
        ({"config": KernelConfig(measure=False)}, False),
        ({}, False),
    ):
        clock = Given(monkeypatch, small=False, large=False)
        module: nn.Module = block(NAMES, BODY)
        report = inject_optimized_kernels(module, **options)  # type: ignore[arg-type]
        with torch.no_grad():
            stock = type(module).forward(module, **leaves(NAMES))
            result = module(**leaves(NAMES))
        counts = report.calls()[""]
        if timed:
            assert torch.equal(result, stock) and counts["stock"] == 2
            assert clock.asked == 3, "two sites, and the norm in the stock forward"
            assert "no gain" in report.summary()
        else:
            assert clock.asked == counts["stock"] == 0


def test_large_operands_are_timed_where_a_gpu_has_room_for_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the queries of Wan 14B, 335 MB, on a card of 80 GB and on one of 8 GB that a model fills."""
    for free, too_large in ((40 << 30, False), (2 << 30, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
        assert gain.is_too_large(335 << 20, torch.device("cuda")) == too_large
        assert not gain.is_too_large(100 << 20, torch.device("cuda"))
    assert gain.is_too_large(335 << 20, torch.device("cpu"))


@pytest.mark.gpu
def test_large_operands_gain_on_a_gpu_and_the_clock_leaves_the_generator_alone() -> None:
    module = block(NAMES, BODY).cuda()
    report = inject_optimized_kernels(module, config=KernelConfig(measure=True))
    given = {name: leaf.cuda().repeat(1, 4096 if leaf.shape[1] == 40 else 1, 1) for name, leaf in leaves(NAMES).items()}
    state = torch.cuda.get_rng_state()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(**given), type(module).forward(module, **given))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert report.calls()[""]["fused"] > 0, report.calls()
