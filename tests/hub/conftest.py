"""A loopback Hub, empty caches, and a process that has loaded no kernel yet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffkern.hub import loader, resolve
from diffkern.providers import hub as hub_provider
from diffkern.providers import registry
from tests.hub.server import LoopbackHub

pytest.importorskip("kernels", reason="the kernels package is not installed")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """The Hub of this test, for the clients in this process."""
    from huggingface_hub import constants

    for variable in ("DIFFKERN_HUB", "USE_HUB_KERNELS", "DIFFKERN_LOCK", "HF_HUB_OFFLINE", "DIFFKERN_PROVIDER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # no proxy of the user's reaches the server of this process
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template[template.index("/{") :])
        new_process()
        yield server
    new_process()


def new_process() -> None:
    """Forgets what this process has loaded, as if it were a new one."""
    loader._loaded.clear()
    resolve._answers.clear()
    hub_provider._layers.clear()
    hub_provider._providers.clear()
    registry.get_provider.cache_clear()
    registry.reset()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets ``HF_HUB_OFFLINE`` for the clients in this process, which begins anew."""
    from huggingface_hub import constants

    def switch() -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        new_process()

    return switch


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def process(hub: LoopbackHub, tmp_path: Path) -> Run:
    """Starts Python in a process of its own that knows the loopback Hub by ``HF_ENDPOINT`` alone."""

    def start(code: str, **environment: str) -> subprocess.Popen[str]:
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": str(ROOT),
            "KERNELS_CACHE": str(tmp_path / "cache"),
            "XDG_CACHE_HOME": str(tmp_path / "state"),
            **environment,
        }
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | settings,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def result(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """Waits for a process, which must succeed; returns what it printed."""
    out, error = process.communicate(timeout=seconds)
    assert process.returncode == 0, error
    return out.strip()
