"""The tests of specialised calls run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("specialize_cases.py")


def test_specialised_calls_compute_what_they_were_recorded_for_and_nothing_else() -> None:
    """Behind thousands of other tests a site is not specialised: its process must have done nothing else."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    run = subprocess.run(command, cwd=CASES.parents[2], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
