"""Every launch happens on the device of the tensors, and a launch with nothing to do does not happen.

There is no second GPU to compute on here, so stand-ins see what would be launched, and where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from diffkern.providers.triton import PROVIDER
from diffkern.providers.triton.launching import device_guard
from tests.ops.kernel_calls import CALLS

CPU = torch.device("cpu")
MODULES = ("activation", "add_norm_silu_pad", "fp8", "group_norm", "linear_attention", "norm", "rope")


class _Launches:
    """Stands in for the guard and for kernels: the devices guarded now, and those at each launch."""

    def __init__(self) -> None:
        self.guarded: list[torch.device] = []
        self.at_launch: list[list[torch.device]] = []

    @contextlib.contextmanager
    def guard(self, device: torch.device) -> Iterator[None]:
        self.guarded.append(device)
        yield
        self.guarded.pop()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.at_launch.append(list(self.guarded))


@pytest.fixture
def launches(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> _Launches:
    seen = _Launches()
    for name in MODULES:
        module = import_module(f"diffkern.providers.triton.{name}")
        monkeypatch.setattr(module, "device_guard", seen.guard)
        for kernel in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, seen)
    return seen


def test_every_triton_op_is_called() -> None:
    assert set(CALLS) >= set(PROVIDER.support)


@pytest.mark.parametrize("op", sorted(PROVIDER.support))
def test_every_launch_is_guarded_by_the_device_of_its_tensors(op: str, launches: _Launches) -> None:
    CALLS[op](PROVIDER.kernel(op, CPU), 2, "cpu")
    # Statistics and values; text and image; before and behind products.
    two = op in ("group_norm_silu", "joint_qk_norm_rope", "linear_attention")
    assert launches.at_launch == [[CPU]] * (2 if two else 1)


@pytest.mark.parametrize("op", sorted(PROVIDER.support))
def test_nothing_is_launched_for_inputs_without_elements(op: str, launches: _Launches) -> None:
    CALLS[op](PROVIDER.kernel(op, CPU), 0, "cpu")
    assert launches.at_launch == []


def test_the_guard_makes_the_second_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *error: object) -> None:
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with device_guard(torch.device("cuda:1")):
        assert entered == [torch.device("cuda:1")]
    assert entered == [torch.device("cuda:1"), "left"]
    for current in (torch.device("cuda:0"), CPU):
        with device_guard(current):
            assert len(entered) == 2
