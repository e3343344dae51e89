#!/usr/bin/env python3
"""Counts what the rules find in every release of diffusers from 0.36 on; writes benchmarks/diffusers_releases.json.

python scripts/sweep_diffusers.py [--folder build/diffusers]

Downloads each release without its dependencies, unpacks it, and reads it in a process of its own. No model is built. A
file that does not import beside the installed packages is read by its syntax alone, and listed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.write_rewrite_coverage import (  # noqa: E402
    candidates_in,
    functions,
    is_forward,
    modules,
    survey,
)

RESULT = ROOT / "benchmarks" / "diffusers_releases.json"
OLDEST = (0, 36)
#: The exit code where no package index can be reached.
NO_NETWORK = 3


def releases() -> list[str]:
    """The releases that pip offers, the oldest first."""
    output = _pip("index", "versions", "diffusers").stdout
    versions = re.findall(r"\b\d+\.\d+\.\d+\b", output.partition("Available versions:")[2].partition("\n")[0])
    return sorted([version for version in versions if _number(version) >= OLDEST], key=_number)


def unpacked(version: str, folder: Path) -> Path:
    """Downloads and unpacks a release, unless it is there."""
    target = folder / version
    if not target.is_dir():
        wheels = folder / "wheels"
        _pip("download", "--no-deps", "--only-binary", ":all:", "-d", str(wheels), f"diffusers=={version}")
        with zipfile.ZipFile(next(wheels.glob(f"diffusers-{version}-*.whl"))) as wheel:
            wheel.extractall(target)
    return target


def read_release(folder: Path) -> dict[str, Any]:
    """Reads an unpacked release in a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--read", str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def read_here(folder: Path) -> dict[str, Any]:
    """Reads the release that this process imports, which must be the one of a folder."""
    import diffusers

    if not Path(str(diffusers.__file__)).is_relative_to(folder):
        raise SystemExit(f"diffusers comes from {diffusers.__file__}, not from {folder}")
    found = survey()
    covered: dict[str, set[str]] = {}
    for candidate in found:
        if candidate.rule is not None:
            covered.setdefault(candidate.rule, set()).add(_class_of(candidate.module, candidate.function))
    imported = list(modules("diffusers.models"))
    classes = {_class_of(module.__name__, f"{owner.__name__}.") for module in imported
               for owner, _ in functions(module) if owner is not None}  # fmt: skip
    return {
        "candidates": Counter(candidate.kind for candidate in found),
        "fused": Counter(candidate.kind for candidate in found if candidate.rule is not None),
        "rules": Counter(candidate.rule for candidate in found if candidate.rule is not None),
        "by syntax alone": _by_syntax(folder, {module.__name__ for module in imported}),
        "covered": {rule: sorted(names) for rule, names in covered.items()},
        "classes": sorted(classes),
    }


def _by_syntax(folder: Path, imported: set[str]) -> dict[str, int]:
    """Files that do not import, with the number of their candidates."""
    found = {}
    root = folder / "diffusers" / "models"
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        if name in imported or "flax" in name:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_forward(node.name)]
        found[name] = len({(one.kind, key) for node in bodies for key, one in candidates_in(node, None, name, "")})
    return found


def lost(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The classes in which a rule finds nothing any more, each with what became of it."""
    there = set(after["classes"])
    return [
        f"{rule}: {name}" + ("" if name in there else " (the class is gone)")
        for rule, names in sorted(before["covered"].items())
        for name in names
        if name not in after["covered"].get(rule, ())
    ]


def _class_of(module: str, function: str) -> str:
    return f"{module.removeprefix('diffusers.models.')}.{function.partition('.')[0]}"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, capture_output=True, text=True)


def main() -> None:
    """Reads all releases, and writes the result."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "diffusers", help="where releases are kept")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(json.dumps(read_here(arguments.read)))
        return
    results: dict[str, dict[str, Any]] = {}
    try:
        versions = releases()
    except subprocess.CalledProcessError:
        print("pip cannot list the releases of diffusers here")
        sys.exit(NO_NETWORK)
    for version in versions:
        results[version] = read_release(unpacked(version, arguments.folder.resolve()).resolve())
        print(version, dict(results[version]["rules"]), flush=True)
    for before, after in itertools.pairwise(versions):
        results[after]["lost"] = lost(results[before], results[after])
    for result in results.values():
        del result["classes"], result["covered"]
    RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
