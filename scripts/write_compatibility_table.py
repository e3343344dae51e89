#!/usr/bin/env python3
"""Measures what other features make of a patched model, and writes docs/compatibility.json and the table made of it.

Rows that need a GPU are measured where there is one, and stay as they are elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.stateful.features import FEATURES, outcome, table  # noqa: E402

RESULTS, PAGE = ROOT / "docs" / "compatibility.json", ROOT / "docs" / "compatibility.md"
BEGIN = "<!-- compatibility table: begin (scripts/write_compatibility_table.py) -->\n"
END = "<!-- compatibility table: end -->\n"


def main() -> None:
    """Measures what this machine can, and replaces what is between the two marks."""
    torch.set_num_threads(1)
    # What is fused must not depend on how fast this machine is.
    os.environ |= {"DIFFKERN_MEASURE": "0", "DIFFKERN_CHOICES": "0"}
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    measured: dict[str, Any] = {}
    for feature in FEATURES:
        if feature.gpu and not torch.cuda.is_available():
            measured[feature.name] = results.get(feature.name, {})
            continue
        measured[feature.name] = row = {model: outcome(feature, model) for model in feature.models}
        if feature.gpu:
            row["where"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    RESULTS.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table(measured) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
