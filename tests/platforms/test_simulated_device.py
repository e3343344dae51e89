"""Devices that no test machine has: by name alone, and simulated by PyTorch's stand-in for a backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import backend_registration

from diffkern import plan
from diffkern.attention import BACKENDS, AttentionCall
from diffkern.doctor import examine
from diffkern.providers import OPS, select


def test_the_cases_pass_on_a_simulated_device() -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no backends in Python")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "tests/platforms/simulated_cases.py", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout) and "skipped" not in done.stdout


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu", "privateuseone"])
@pytest.mark.parametrize("op", OPS)
def test_plain_pytorch_serves_where_nothing_else_does(kind: str, op: str) -> None:
    choice = select(op, torch.device(kind, 0), (torch.bfloat16,))
    if choice.provider == "eager":
        assert choice.is_fallback and all(reason for _, reason in choice.declined)
    else:
        assert (kind, choice.provider) == ("xpu", "triton")  # an Intel GPU is really there


def test_the_doctor_lists_the_devices_that_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    devices = {row.device for row in examine().rows}
    assert {"mps", "xpu:0", "xpu:1"} <= devices


def test_a_model_without_weights_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, as models are before they are loaded."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16))
    report = plan(model)
    assert [site.op for site in report.patched] == ["layer_norm", "rms_norm"]


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_attention_backends_of_cuda_refuse_other_devices(kind: str) -> None:
    x = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    signature = replace(AttentionCall(x, x, x).signature(), device=torch.device(kind))
    refused = {name for name, backend in BACKENDS.items() if backend.refusal(signature) is not None}
    assert {"flash", "sage", "xformers", "_native_cudnn", "_native_npu"} <= refused
    assert not {"native", "_native_math"} & refused
