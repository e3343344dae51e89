#!/usr/bin/env python3
"""Everything that this machine can check; writes what ran, and the counts, into benchmarks/test_all.json."""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "test_all.json"
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "hypothesis")

#: The exit code of scripts/sweep_diffusers.py where no package index can be reached.
NO_NETWORK = 3
#: What is run, each with its arguments of pytest.
SUITES = {
    "tests": ["-m", "not gpu"],
    "long random sequences": ["-m", "exhaustive", "tests/stateful"],
    "tests that take minutes": ["-m", "exhaustive", "--ignore=tests/stateful", "tests"],
} | ({"tests of a GPU": ["-m", "gpu"]} if torch.cuda.is_available() else {})


def run_suite(arguments: list[str], folder: Path) -> tuple[int, dict[str, Any]]:
    """Runs pytest; returns its exit code and counts."""
    log = folder / "junit.xml"
    started = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--maxschedchunk=1", f"--junitxml={log}", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    suite = next(ElementTree.parse(log).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return code, counts | {"seconds": round(time.perf_counter() - started)}


def run_mutations(folder: Path) -> tuple[int, dict[str, Any]]:
    """Runs scripts/mutate.py; returns its exit code, counts, and what is not killed."""
    log = folder / "mutations.json"
    started = time.perf_counter()
    code = subprocess.run([sys.executable, "scripts/mutate.py", "--json", str(log)], cwd=ROOT, check=False).returncode
    results = json.loads(log.read_text(encoding="utf-8"))
    counts: dict[str, Any] = {
        outcome: sum(result["outcome"] == outcome for result in results)
        for outcome in ("killed", "survived", "broken", "skipped")
    }
    left = [result["guard"] for result in results if result["outcome"] in ("survived", "broken")]
    return code, counts | {"not killed": left, "seconds": round(time.perf_counter() - started)}


def run_sweep(_: Path) -> tuple[int, str]:
    """Reads every release of diffusers, if there is a network; returns the exit code and what happened."""
    code = subprocess.run([sys.executable, "scripts/sweep_diffusers.py"], cwd=ROOT, check=False).returncode
    return (0, "no package index here") if code == NO_NETWORK else (code, "failed" if code else "read")


def main() -> int:
    """Runs everything, also after a failure; returns the worst exit code."""
    parts: dict[str, Callable[[Path], tuple[int, Any]]] = {
        **{name: functools.partial(run_suite, arguments) for name, arguments in SUITES.items()},
        "mutations": run_mutations,
        "releases of diffusers": run_sweep,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=parts, help="only this part (may be given several times)")
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        for name in parser.parse_args().only or parts:
            code, found = parts[name](Path(folder))
            codes.append(code)
            record(name, found)
    print(RESULT.read_text(encoding="utf-8"))
    return max(codes)


def record(name: str, found: Any) -> None:
    """Writes what a part found beside what the others found when they ran last, with the commit that it ran on."""
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    results[name] = {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
        "result": found,
    }
    RESULT.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
