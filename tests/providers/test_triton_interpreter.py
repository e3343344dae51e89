"""The op tests on the Triton kernels without a GPU, in Triton's interpreter.

The interpreter is chosen when a kernel is defined, hence a process of its own. It is slow: the norms are tested
in full, and of the other families what reaches every kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Selection:
    """Files of ``tests/ops``, a ``-k`` expression, and how many tests that selects at least."""

    files: tuple[str, ...]
    expression: str
    least: int


_FAMILIES = {
    "norm": Selection(("norm_kernel_paths", "norm_values", "norm_autograd", "contract"), "triton", 60),
    "modulate": Selection(("modulate_kernel_paths",), "triton", 15),
    "activation": Selection(("activation",), "triton and not opcheck", 30),
    "group_norm": Selection(
        ("group_norm", "group_norm_channels"),
        "triton and (contiguous_reference or odd_views or folded or unet or every_number)",
        8,
    ),
    "rope": Selection(
        ("rope_values", "every_kernel", "attention_fp8"),
        "triton and not and_fp8"
        " and (also_on_nothing or different_pairings or own_table or fail_where_it_does or finite)",
        16,
    ),
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.exhaustive] * (f != "rope")) for f in _FAMILIES],
)
def test_the_op_tests_pass_in_the_interpreter(family: str, triton: ModuleType) -> None:
    selection = _FAMILIES[family]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"TRITON_INTERPRET": "1", "DIFFKERN_REQUIRE_PROVIDERS": "triton", "PYTHONWARNINGS": "ignore"}
    files = [f"tests/ops/test_{name}.py" for name in selection.files]
    options = ["--provider", "triton", "-k", selection.expression, "-q", "-m", "not gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, *options],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= selection.least, done.stdout
    assert "skipped" not in done.stdout, done.stdout
