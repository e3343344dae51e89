"""A patch stays fused only where that takes less time; costs are given here, in the place of a clock."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.models.embeddings import PixArtAlphaTextProjection
from torch import nn

from diffkern import KernelConfig, inject_optimized_kernels, use_provider
from diffkern.injection import patching
from diffkern.injection.state import PatchState
from diffkern.rewrite import FusedSite
from diffkern.verify import gain
from diffkern.verify.gain import Cost
from tests.rewrite.modules import block, leaves

NAMES = "x, scale, shift, gate, y"
BODY = "n = self.norm(x) * (1 + scale) + shift\nreturn n + gate * y"
TIMED = KernelConfig(measure=True)


class Clock:
    """Says what calls take: a pair of costs for a fused computation and its stock, and a cost for a question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fused: float, stock: float, question: float = 0.0) -> None:
        self.fused, self.stock, self.question, self.asked = fused, stock, question, 0
        monkeypatch.setattr(gain, "costs", self)

    def __call__(self, computations: Sequence[Callable[[], Any]], device: torch.device) -> list[Cost]:
        for compute in computations:
            compute()
        self.asked += 1
        guard = computations[0] is computations[1]
        times = (self.question,) * 2 if guard else (self.fused, self.stock)
        return [Cost(time, time) for time in times]


@pytest.mark.parametrize("gains", [True, False])
def test_a_norm_stays_fused_only_where_that_takes_less_time(monkeypatch: pytest.MonkeyPatch, gains: bool) -> None:
    clock = Clock(monkeypatch, fused=1.0 if gains else 3.0, stock=2.0)
    norm = nn.LayerNorm(32)
    report = inject_optimized_kernels(norm, config=TIMED)
    small, large = torch.randn(4, 32), torch.randn(400, 32)
    with torch.no_grad():
        for x in (small, small, small, large, large):
            torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (32,), norm.weight, norm.bias))
        assert clock.asked == 2, "each size once"
        assert torch.equal(norm(small), type(norm).forward(norm, small)) or gains
    counts = report.calls()[""]
    assert counts["fused"] == (6 if gains else 0)
    assert counts["stock_reasons"] == ({} if gains else {"fused it takes 3.0 us, as it is written 2.0 us: no gain": 6})


def test_modules_of_one_kind_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, fused=3.0, stock=2.0)
    norms, x = nn.Sequential(nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(32)), torch.randn(4, 32)
    report = inject_optimized_kernels(norms, config=TIMED)
    with torch.no_grad():
        norms(x)
    assert clock.asked == 1
    assert all(counts["stock"] == 1 for counts in report.calls().values()) and len(report.calls()) == 3
    inject_optimized_kernels(other := nn.LayerNorm(32), config=TIMED)
    with torch.no_grad():
        other(x)
    assert clock.asked == 2, "each injection times by itself where nothing is kept on disk"


def test_what_a_norm_takes_in_one_layout_says_nothing_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DIFFKERN_CHOICES", str(tmp_path))
    clock = Clock(monkeypatch, fused=3.0, stock=2.0)
    norm, x = nn.LayerNorm(16), torch.randn(2, 8, 16)
    report = inject_optimized_kernels(norm, config=TIMED)
    with torch.no_grad():
        norm(x)
        clock.fused = 1.0
        for _ in range(2):
            norm(x.transpose(0, 1))
        norm(x)
    assert clock.asked == 2 and report.calls()[""]["fused"] == 2


def test_what_an_inference_was_timed_at_says_nothing_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, fused=3.0, stock=2.0)
    norm, x = nn.LayerNorm(32), torch.randn(4, 32)
    module, given = block(NAMES, BODY), leaves(NAMES)
    reports = [inject_optimized_kernels(one, config=TIMED) for one in (norm, module)]
    with torch.no_grad():
        norm(x)
        for _ in range(3):
            module(**given)
    assert [report.calls()[""]["fused"] for report in reports] == [0, 0]
    norm(x).sum().backward()
    module(**{**given, "x": given["x"].requires_grad_()}).sum().backward()
    assert [report.calls()[""]["fused"] for report in reports] == [1, 2]


def test_a_norm_is_not_timed_where_a_provider_is_asked_for_or_gradients_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, fused=3.0, stock=2.0)
    norm, x = nn.LayerNorm(32), torch.randn(4, 32)
    report = inject_optimized_kernels(norm, config=TIMED)
    norm(x)
    with torch.no_grad(), use_provider("eager"):
        norm(x)
    named = nn.LayerNorm(32)
    inject_optimized_kernels(named, config=KernelConfig({"layer_norm": "eager"}, measure=True))
    with torch.no_grad():
        named(x)
    assert clock.asked == 0 and report.calls()[""]["fused"] == 2


@pytest.mark.parametrize(("question", "gains"), [(1.0, True), (3.0, False)])
def test_sites_share_what_the_guard_of_their_forward_takes_and_decide_in_the_first_call(
    monkeypatch: pytest.MonkeyPatch, question: float, gains: bool
) -> None:
    """Each of the two sites saves a microsecond."""
    clock = Clock(monkeypatch, fused=1.0, stock=2.0, question=question)
    module, given = block(NAMES, BODY), leaves(NAMES)
    report = inject_optimized_kernels(module, config=TIMED)
    with torch.no_grad():
        stock = type(module).forward(module, **given)
        results = [module(**given) for _ in range(4)]
    counts = report.calls()[""]
    assert all(torch.equal(result, results[0]) for result in results), "a second call has the bits of the first"
    assert counts["fused"] == (8 if gains else 0)
    if gains:
        return
    assert torch.equal(results[0], stock)
    reasons = counts["stock_reasons"]
    assert reasons.pop("none of its parts takes less time fused") == 3, "no guard is asked any more"
    assert sum(reasons.values()) == 2 and all("fused it takes 2.5 us" in reason for reason in reasons)
    larger = {name: leaf.repeat(1, 8, 1) if leaf.shape[1] == 40 else leaf for name, leaf in given.items()}
    clock.fused = 0.25
    with torch.no_grad():
        for _ in range(4):
            module(**larger)
    assert report.calls()[""]["fused"] == 8, "calls of another size are judged by themselves"


def test_a_forward_with_a_site_that_a_hook_turned_off_is_not_said_to_gain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch, fused=3.0, stock=2.0)
    module: Any = block(NAMES, BODY)
    report = inject_optimized_kernels(module, config=TIMED)
    handle = module.norm.register_forward_hook(lambda *call: None)
    with torch.no_grad():
        for _ in range(3):
            module(**leaves(NAMES))
        handle.remove()
        module(**leaves(NAMES))
    assert "none of its parts takes less time fused" not in report.calls()[""]["stock_reasons"]


def test_a_site_is_timed_beside_what_stock_would_run_and_not_beside_patched_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch, fused=1.0, stock=2.0)
    module = block(NAMES, BODY)
    inject_optimized_kernels(module, config=TIMED)
    ran: list[nn.Module] = []
    run_patch = patching._run_patch

    def watched(patch: Any, module: nn.Module, *call: Any) -> Any:
        ran.append(module)
        return run_patch(patch, module, *call)

    monkeypatch.setattr(patching, "_run_patch", watched)
    with torch.no_grad():
        module(**leaves(NAMES))
    assert ran == [module]


def test_a_caption_on_a_cpu_is_kept_only_where_to_check_it_takes_less_time_than_to_project_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, fused=3.0, stock=2.0)
    projection, caption = PixArtAlphaTextProjection(32, 64), torch.randn(2, 7, 32)
    report = inject_optimized_kernels(projection, config=TIMED)
    with torch.no_grad():
        results = [projection(caption) for _ in range(3)]
        assert clock.asked == 1 and all(torch.equal(result, results[0]) for result in results)
        assert results[0].data_ptr() != results[1].data_ptr(), "none is kept"
        assert report.calls()[""]["fused"] == 0
        clock.fused, longer = 1.0, torch.randn(2, 70, 32)
        results = [projection(longer) for _ in range(3)]
    assert results[0].data_ptr() == results[1].data_ptr() and report.calls()[""]["fused"] == 3


def test_a_call_that_is_known_to_gain_sees_another_class_forward_and_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, fused=1.0, stock=2.0)
    module, given = block(NAMES, BODY), leaves(NAMES)
    report = inject_optimized_kernels(module, config=TIMED)
    asked: list[Any] = []
    check_guards = PatchState.check_guards
    monkeypatch.setattr(PatchState, "check_guards", lambda *call: (asked.append(call), check_guards(*call))[1])
    with torch.no_grad():
        for _ in range(4):
            module(**given)
        assert len(asked) == 2 and report.calls()[""]["fused"] == 8, "from the third call on its sites are asked alone"
        traced = torch.jit.trace(module, tuple(given.values()))
        assert "diffkern" not in str(traced.inlined_graph)
        monkeypatch.setattr(type(module), "forward", lambda self, *call, **named: "another")
        assert module(**given) == "another"
    assert report.calls()[""]["stock_reasons"] == {"what its class computes was replaced after the injection": 1}


def test_norms_and_sites_are_timed_as_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def costs(computations: Sequence[Callable[[], Any]], device: torch.device) -> list[Cost]:
        ran.clear()
        computations[0]()
        seen.append(tuple(ran))
        return [Cost(1.0, 1.0), Cost(2.0, 2.0)]

    def watch(cls: Any, name: str) -> None:
        function = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args, **kwargs: (ran.append(name), function(*args, **kwargs))[1])

    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(gain, "costs", costs)
    watch(patching, "_run_patch")
    watch(FusedSite, "__call__")
    norm, module = nn.LayerNorm(32), block(NAMES, "return self.norm(x) * (1 + scale) + shift")
    inject_optimized_kernels(norm, config=TIMED)
    inject_optimized_kernels(module, config=TIMED)
    with torch.no_grad():
        norm(torch.randn(4, 32))
        assert seen == [("_run_patch",)]
        module(**leaves(NAMES))
    assert seen[1] == ("__call__",)


def test_an_attention_without_a_gain_asks_for_the_signature_of_its_processor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch, fused=3.0, stock=2.0)
    torch.manual_seed(0)
    attention: Any = Attention(32, heads=2, dim_head=16, qk_norm="rms_norm", rescale_output_factor=2.0)
    attention.requires_grad_(False)
    x = torch.randn(2, 40, 32)
    with torch.no_grad():
        stock = attention(x)
        report = inject_optimized_kernels(attention, config=TIMED)
        for _ in range(3):
            attention(x)
        asked: list[Any] = []
        signature = inspect.signature
        monkeypatch.setattr(inspect, "signature", lambda *call: (asked.append(call), signature(*call))[1])
        assert torch.equal(attention(x), stock) and not asked
        assert report.calls()[""]["stock_reasons"]["none of its parts takes less time fused"] >= 1
        attention.set_processor(AttnProcessor())
        result = attention(x)
        assert len(asked) == 1, "of a class that it had not asked for"
        assert torch.equal(result, Attention.forward(attention, x))
        monkeypatch.setattr(Attention, "forward", lambda self, *call: "another")
        assert attention(x) == "another"
        report.restore()
    assert "forward" not in vars(attention)
