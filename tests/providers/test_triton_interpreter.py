"""The op tests on the Triton kernels without a GPU, in Triton's interpreter.

The interpreter is chosen when a kernel is defined, hence the process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", ["layouts", "values or contract", "autograd or registration or paths"])
def test_the_op_tests_pass_in_the_interpreter(part: str, triton: ModuleType) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {
        "TRITON_INTERPRET": "1",
        "DIFFKERN_REQUIRE_PROVIDERS": "triton",
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/ops",
        "--provider",
        "triton",
        "-k",
        f"triton and ({part})",
    ]
    options = ["-q", "-m", "not gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 20
    assert "skipped" not in done.stdout, done.stdout
