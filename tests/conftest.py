"""Providers, devices and markers for the whole suite.

A test that takes ``provider`` and ``device`` runs once for each provider on the CPU and, marked ``gpu``, once
for each on CUDA. GPU tests run only when asked for: ``pytest -m gpu``. A provider that is not there on this
machine is skipped with its own reason, or fails the test if ``DIFFKERN_REQUIRE_PROVIDERS`` (comma-separated)
names it. Triton serves the CPU only in its interpreter, as ``tests/providers/test_triton_interpreter.py``
does: ``TRITON_INTERPRET=1 pytest tests/ops --provider triton``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch

from diffkern.providers.registry import ORDER, get_provider

# The same examples on every run: a failure in CI must be one that a developer can see again.
hypothesis.settings.register_profile(
    "diffkern",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("diffkern")


#: Tests that take minutes each.
_LONGEST = ("tests/stateful/test_machine.py", "tests/providers/test_triton_interpreter.py", "tests/examples/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--provider",
        action="append",
        choices=ORDER,
        help="test only this provider (may be given several times)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("DIFFKERN_MEASURE", "0")  # what a test finds must not depend on how fast the machine is
    os.environ.setdefault("DIFFKERN_CHOICES", "0")  # nor on what another test found, or leave anything behind
    config.addinivalue_line("markers", "gpu: needs a CUDA or ROCm GPU; runs only if the -m expression names it")
    config.addinivalue_line("markers", "sanitize: runs each kernel path once, briefly enough for compute-sanitizer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in "gpu", "exhaustive":
        deselected = [item for item in items if item.get_closest_marker(mark)]
        if deselected and mark not in config.option.markexpr:
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
    if "exhaustive" in config.option.markexpr:  # of several processes none shall begin what takes minutes at the end
        items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    devices = [pytest.param("cuda", marks=pytest.mark.gpu)]
    if not any(mark.name == "gpu" for mark in metafunc.definition.iter_markers()):
        devices.insert(0, pytest.param("cpu"))
    if "provider" in metafunc.fixturenames:
        # The Hub serves nothing unless it is asked; tests/hub asks.
        names = metafunc.config.getoption("provider") or [name for name in ORDER if name != "hub"]
        pairs = [
            pytest.param(name, *device.values, marks=device.marks, id=f"{name}-{device.values[0]}")
            for device in devices
            for name in names
            if (name, device.values[0]) != ("triton", "cpu") or os.environ.get("TRITON_INTERPRET") == "1"
        ]
        metafunc.parametrize(("provider", "device"), pairs, indirect=["provider"], scope="session")
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices, scope="session")


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest, device: str) -> str:
    """Name of the provider under test, which serves ``device``."""
    name: str = request.param
    reason = get_provider(name).unavailable_reason(torch.device(device))
    if reason is not None:
        if name in os.environ.get("DIFFKERN_REQUIRE_PROVIDERS", "").split(","):
            pytest.fail(f"DIFFKERN_REQUIRE_PROVIDERS names {name}, but on {device}: {reason}")
        pytest.skip(f"{name} on {device}: {reason}")
    return name


@pytest.fixture(autouse=True)
def the_same_numbers_on_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def ranges_as_the_compiler_takes_them() -> Iterator[None]:
    """Makes the interpreter refuse what Triton's compiler refuses: a range whose length is no power of two."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    lenient = builder.create_make_range

    def strict(self: Any, ret_ty: Any, start: int, stop: int) -> Any:
        if (stop - start) & (stop - start - 1):
            raise ValueError(f"arange's range must be a power of 2, not {stop - start}")
        return lenient(self, ret_ty, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_make_range", strict)
        yield


@pytest.fixture(scope="session")
def triton() -> ModuleType:
    """Triton; without it the test is skipped, or fails if ``DIFFKERN_REQUIRE_TOOLCHAINS`` names it."""
    try:
        importlib.import_module("triton.language")
    except ImportError as error:
        if "triton" in os.environ.get("DIFFKERN_REQUIRE_TOOLCHAINS", "").split(","):
            pytest.fail(f"DIFFKERN_REQUIRE_TOOLCHAINS names triton: {error}")
        pytest.skip(f"Triton is not installed: {error}")
    return importlib.import_module("triton")
