"""Providers that are asked before their turn because they were measured to be faster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from diffkern import inject_optimized_kernels
from diffkern.doctor import examine
from diffkern.providers import OPS, ORDER, preferences, registry, select
from diffkern.providers.preferences import PREFERENCES, Preference

CPU, FLOAT32 = torch.device("cpu"), (torch.float32,)
EAGER_NORM = Preference("rms_norm", "eager", "cpu", "64x2048: 3 us against 4 us, benchmarks/none.json")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Preference]]:
    """A table for the test alone."""
    table: list[Preference] = []
    monkeypatch.setattr(preferences, "PREFERENCES", table)
    registry.reset()
    yield table
    registry.reset()


def test_the_table_is_about_what_there_is_and_names_its_figures() -> None:
    for entry in PREFERENCES:
        assert entry.op in OPS and entry.provider in ORDER
        assert "benchmarks/" in entry.figures


def test_a_preferred_provider_serves_and_the_choice_says_why(measured: list[Preference]) -> None:
    first = select("rms_norm", CPU, FLOAT32)
    measured.append(EAGER_NORM)
    registry.reset()
    choice = select("rms_norm", CPU, FLOAT32)
    assert (choice.provider, choice.declined, choice.is_fallback) == ("eager", (), False)
    assert choice.describe() == f"eager first for rms_norm: {EAGER_NORM.figures}"
    assert select("layer_norm", CPU, FLOAT32).provider == first.provider
    # Whoever names a provider gets that one.
    assert select("rms_norm", CPU, FLOAT32, first.provider).preferences == ()


def test_one_that_cannot_serve_is_as_if_it_were_not_there(measured: list[Preference]) -> None:
    usual = select("rms_norm", CPU, FLOAT32)
    measured.append(Preference("rms_norm", "triton", "cpu", "none"))
    registry.reset()
    assert select("rms_norm", CPU, FLOAT32) == usual


def test_an_entry_holds_for_its_device_and_capability_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Preference("qk_norm_rope", "triton", "cuda", "none", capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda", 0)
    assert entry.holds("qk_norm_rope", gpu)
    assert not entry.holds("rope", gpu)
    assert not entry.holds("qk_norm_rope", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not entry.holds("qk_norm_rope", gpu)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not entry.holds("qk_norm_rope", gpu)


def test_report_and_doctor_name_the_measurement(measured: list[Preference]) -> None:
    measured.append(EAGER_NORM)
    registry.reset()
    report = inject_optimized_kernels(nn.RMSNorm(32, eps=1e-6), strict=True)
    (site,) = report.patched
    assert site.provider == "eager" and EAGER_NORM.figures in site.reason
    assert examine().preferences["cpu"] == (str(EAGER_NORM),)


def test_plain_pytorch_gains_where_its_library_computes_a_product_with_its_activation() -> None:
    gpu, half = torch.device("cuda", 0), (torch.bfloat16,)
    assert select("linear_gelu", gpu, half, "eager").gains
    assert not select("linear_gelu", gpu, FLOAT32, "eager").gains
    assert not select("linear_gelu", CPU, half, "eager").gains
    assert not select("rms_norm", gpu, half, "eager").gains
