"""Triton missing, broken, shadowed or without a GPU: a reason, no exception, and another provider serves."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import diffkern
from diffkern.providers.triton import PROVIDER
from diffkern.providers.triton.availability import unavailable_reason

_ROOT = Path(diffkern.__file__).parents[1]


def _run(script: str, path: Path, **environment: str) -> None:
    """Runs ``script`` in ``path`` with no GPU in sight."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=path,
        env=inherited | hidden | {"PYTHONPATH": str(_ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


_EAGER_SERVES = """
    import torch
    from diffkern.ops import rms_norm
    from diffkern.providers import select
    from diffkern.providers.triton import PROVIDER

    cpu, x = torch.device("cpu"), torch.randn(3, 16)
    torch.testing.assert_close(rms_norm(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-6))
    assert select("rms_norm", cpu, (x.dtype,)).provider != "triton"
"""


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ({"triton.py": "answer = 42"}, "rename the file if it is yours"),
        pytest.param(
            {"triton/__init__.py": "", "triton/language.py": "", "triton/runtime.py": ""},
            "version 3.6 or newer",
            marks=pytest.mark.exhaustive,
        ),
        (
            {"triton/__init__.py": "raise OSError('libtriton.so: cannot open')"},
            "importing Triton failed .OSError",
        ),
        pytest.param(
            {"triton/__init__.py": "raise SystemError"},
            "importing Triton failed .SystemError",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_broken_or_shadowed_triton_gives_a_reason(module: dict[str, str], reason: str, tmp_path: Path) -> None:
    for name, text in module.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    _run(
        f"""
        import re
        {textwrap.indent(textwrap.dedent(_EAGER_SERVES), " " * 8).strip()}
        for device in ("cpu", "cuda", "cuda:1", "xpu"):
            found = PROVIDER.unavailable_reason(torch.device(device))
            assert re.search({reason!r}, found), found
            assert "\\n" not in found, found
        """,
        tmp_path,
    )


def test_without_triton_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for device in ("cpu", "cuda", "xpu"):
        reason = unavailable_reason(torch.device(device))
        assert reason is not None
        assert "Triton is not installed" in reason
        assert "pip install triton" in reason
        assert ("only interprets" in reason) is (device == "cpu")


def test_without_a_gpu_driver_cpu_tensors_go_elsewhere(triton: ModuleType, tmp_path: Path) -> None:
    _run(
        _EAGER_SERVES
        + """
    from diffkern.providers import NoProviderError

    assert "no active GPU driver" in PROVIDER.unavailable_reason(torch.device("cuda"))
    assert "no active GPU driver" in PROVIDER.unavailable_reason(torch.device("xpu"))
    assert "TRITON_INTERPRET=1" in PROVIDER.unavailable_reason(cpu)
    try:
        rms_norm(x, provider="triton")
    except NoProviderError as error:
        assert "TRITON_INTERPRET=1" in str(error), error
    else:
        raise AssertionError("a CPU tensor reached a Triton kernel")
    """,
        tmp_path,
    )


def test_other_devices_are_refused_by_name() -> None:
    from diffkern.providers import Request

    refusal = PROVIDER.support["rms_norm"].refusal(Request("rms_norm", torch.device("mps"), frozenset({torch.float32})))
    assert refusal == "no rms_norm for mps (serves cpu, cuda, xpu)"


def test_triton_and_the_kernels_are_imported_at_first_use(triton: ModuleType, tmp_path: Path) -> None:
    _run(
        """
        import sys
        import torch
        before = set(sys.modules)
        import diffkern.ops, diffkern.providers.triton
        loaded = set(sys.modules) - before
        assert not [name for name in loaded if name.split(".")[0] == "triton"]
        assert "diffkern.providers.triton.norm_kernels" not in sys.modules

        diffkern.ops.rms_norm(torch.randn(2, 8), provider="triton")
        assert "diffkern.providers.triton.norm_kernels" in sys.modules
        """,
        tmp_path,
        TRITON_INTERPRET="1",
    )


def test_an_old_nvidia_gpu_is_refused_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.providers.triton import availability

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    reason = availability._capability_reason(torch.device("cuda", 0))
    assert reason is not None
    assert "needs compute capability 7.0, cuda:0 has 6.1" in reason
