"""The matrix of tiny denoisers: every model runs in stock, and the runner says what it finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts import check_models_gpu
from scripts.check_models.denoisers import DENOISERS


@pytest.mark.parametrize("name", ["ltx2", "flux"])
def test_a_model_keeps_its_contracts_on_the_cpu(name: str, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--models", name, "--dtypes", "bf16", "--numerics", "exact"]
    assert check_models_gpu.main([*arguments, "--json", str(results)]) == 0
    (case,) = json.loads(results.read_text())["cases"]
    assert (case["model"], case["captured"], case["reasons"]) == (name, 0, {"its inputs are not all on one GPU": 8})


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = check_models_gpu.Model("prior", DENOISERS["prior"], torch.device("cpu"), torch.bfloat16)
    wrong = nn.LayerNorm.forward
    assert not check_models_gpu.check(model, "bf16", "fast").problem
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: wrong(self, x) * 1.5)
    assert "times stock's" in check_models_gpu.check(model, "bf16", "fast").problem
