#!/usr/bin/env python3
"""Takes guards and fixes out, one at a time, and checks that the test that watches over each of them fails.

A list of mutations is a file ``scripts/mutations/*.toml``:

    [[mutation]]
    guard = "what is taken out, in one sentence"
    file = "diffkern/cache/base.py"
    old = "the text in the file, which must be there once"
    new = "the text without the guard"
    test = "tests/cache/test_base.py::test_that_must_fail"   # or a list of them: one must fail

Where two guards stand behind each other, ``also = [{file = ..., old = ..., new = ...}]`` takes out the others with it.
``gpu = true`` marks a mutation whose test needs a GPU. The edits are made in copies of the tree, never in the tree
itself, and nothing is built: an edit in ``csrc`` is one for tests that read the sources. Every test must pass without
the edit, and a test that cannot even be collected with it proves nothing.

    python scripts/mutate.py                  all
    python scripts/mutate.py --only text      those whose guard, file or test contains "text"
    python scripts/mutate.py --list           only says which there are

The exit code is 1 if a mutation survives, or cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "scripts" / "mutations"

#: What git ignores and the tests need nevertheless: kernels that take minutes to build.
IGNORED_BUT_NEEDED = ("diffkern/_kernels",)

#: Imported once, in the process that all runs are forked from: most of what a short test takes.
PRELOADED = ("torch", "pytest", "hypothesis", "transformers", "peft", "accelerate", "diffusers.models.transformers")

TIMEOUT = 300.0

_FIELDS = {"guard", "file", "old", "new", "test"}
_PASSED, _FAILED, _TIMED_OUT = 0, 1, -1


@dataclass(frozen=True)
class Edit:
    """One text in a file, and what takes its place."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Makes the edit.

        Raises:
            ValueError: it cannot be made; the message says why.
        """
        path = root / self.file
        if not path.is_file():
            raise ValueError(f"there is no file {self.file}")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"the old text is in {self.file} {count} times: it must be there once")
        if self.old == self.new:
            raise ValueError("the new text is the old one")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Mutation:
    """The edits that take a guard out, and the tests of which at least one must fail with them."""

    guard: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    gpu: bool = False

    @contextlib.contextmanager
    def made(self, root: Path) -> Iterator[None]:
        """Makes the edits for a while.

        Raises:
            ValueError: one of them cannot be made; then none is.
        """
        files = {root / edit.file for edit in self.edits}
        originals = {path: path.read_text(encoding="utf-8") for path in files if path.is_file()}
        try:
            for edit in self.edits:
                edit.apply(root)
            yield
        finally:
            for path, text in originals.items():
                path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Result:
    """What became of a mutation: ``"killed"``, ``"survived"``, ``"broken"`` (it proves nothing) or ``"skipped"``."""

    mutation: Mutation
    outcome: str
    detail: str = ""
    seconds: float = 0.0


def read(paths: Sequence[Path]) -> list[Mutation]:
    """Reads lists of mutations.

    Raises:
        ValueError: an entry has a field too many or too few.
    """
    mutations = []
    for path in paths:
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", []):
            if wrong := (set(entry) ^ _FIELDS) - {"also", "gpu"}:
                raise ValueError(f"{path.name}, {entry.get('guard', 'without guard')!r}: look at {', '.join(wrong)}")
            edits = [Edit(entry["file"], entry["old"], entry["new"]), *(Edit(**edit) for edit in entry.get("also", []))]
            tests = [entry["test"]] if isinstance(entry["test"], str) else entry["test"]
            mutations.append(Mutation(entry["guard"], tuple(edits), tuple(tests), entry.get("gpu", False)))
    return mutations


def copy_tree(source: Path, target: Path) -> None:
    """Copies what git knows or would add, and the built kernels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
    for name in IGNORED_BUT_NEEDED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)


def _pytest(tree: str, arguments: list[str], output: str, gpus: str | None) -> None:
    """Runs in a process of its own, which sees these GPUs; all with None."""
    if gpus is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    os.chdir(tree)
    sys.path.insert(0, tree)
    os.environ["PYTHONPATH"] = tree  # for the processes that tests start
    sys.dont_write_bytecode = True  # an edit within a second leaves a file's time and size as they were
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", *arguments])
    Path(output).write_text(text.getvalue(), encoding="utf-8")
    sys.exit(int(code))


class Runner:
    """Copies of a tree, and test runs in them."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self._trees: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            copy_tree(root, folder / f"tree{job}")
            self._trees.put(folder / f"tree{job}")
        # What the server has imported may have asked the GPU for something, and then no process made of it can.
        self._gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(list(PRELOADED))
        self._fresh = multiprocessing.get_context("spawn")

    @contextlib.contextmanager
    def tree(self) -> Iterator[Path]:
        """Lends a copy that no other run uses."""
        tree = self._trees.get()
        try:
            yield tree
        finally:
            self._trees.put(tree)

    def test(self, tree: Path, mutation: Mutation) -> tuple[int, str]:
        """Runs the tests of a mutation in a copy; returns pytest's exit code and the end of its output."""
        output = tree.with_suffix(".txt")
        output.unlink(missing_ok=True)
        arguments = [*mutation.tests, *(["-m", "gpu"] if mutation.gpu else [])]
        process: Any
        if mutation.gpu:
            process = self._fresh.Process(target=_pytest, args=(str(tree), arguments, str(output), self._gpus))
        else:
            process = self._forks.Process(target=_pytest, args=(str(tree), arguments, str(output), ""))
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
            return _TIMED_OUT, f"not done after {TIMEOUT:.0f} s"
        lines = output.read_text(encoding="utf-8").strip().splitlines() if output.exists() else ["the process died"]
        return process.exitcode if process.exitcode is not None else 2, " | ".join(lines[-3:])


def run(root: Path, mutations: Sequence[Mutation], jobs: int) -> Iterator[Result]:
    """Makes every mutation and runs its tests, without and with it."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        runner = Runner(root, Path(folder), jobs)
        groups: dict[tuple[str, ...], list[Mutation]] = {}
        for mutation in mutations:
            groups.setdefault(mutation.tests, []).append(mutation)
        for results in pool.map(lambda group: _run_group(runner, group), groups.values()):
            yield from results


def _run_group(runner: Runner, group: list[Mutation]) -> list[Result]:
    """Mutations that the same tests watch over: those must pass without any of them, which is asked once."""
    with runner.tree() as tree:
        if group[0].gpu and not _has_gpu():
            return [Result(mutation, "skipped", "needs a GPU") for mutation in group]
        code, output = runner.test(tree, group[0])
        if code != _PASSED:
            return [Result(mutation, "broken", f"fails without the edit: {output}") for mutation in group]
        return [_run_one(runner, tree, mutation) for mutation in group]


def _run_one(runner: Runner, tree: Path, mutation: Mutation) -> Result:
    started = time.perf_counter()
    try:
        with mutation.made(tree):
            code, output = runner.test(tree, mutation)
    except ValueError as error:
        return Result(mutation, "broken", str(error))
    outcome = {_PASSED: "survived", _FAILED: "killed"}.get(code, "broken")
    return Result(mutation, outcome, "" if outcome == "killed" else output, time.perf_counter() - started)


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or shutil.which("rocm-smi") is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the lists; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only mutations whose guard, files or tests contain this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time (default: cores)")
    parser.add_argument("--list", action="store_true", help="list the mutations and check that they can be made")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    mutations = [mutation for path in sorted(LISTS.glob("*.toml")) for mutation in read([path])]
    if options.only:
        mutations = [mutation for mutation in mutations if options.only in str(mutation)]
    if options.list:
        return _list(mutations)
    # One thread each: the runs already fill the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    for result in run(ROOT, mutations, max(1, options.jobs)):
        results.append(result)
        print(f"{result.outcome:8} {result.seconds:5.1f} s  {result.mutation.guard}", flush=True)
        if result.detail:
            print(f"{'':19}{result.detail}", flush=True)
    if options.json:
        data = [asdict(result.mutation) | {"outcome": result.outcome, "detail": result.detail} for result in results]
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    counts = {
        kind: sum(result.outcome == kind for result in results) for kind in ("killed", "survived", "broken", "skipped")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(bool(counts["survived"] or counts["broken"]))


def problems(mutations: Sequence[Mutation]) -> list[str]:
    """What keeps mutations from being made here."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for path in {edit.file for mutation in mutations for edit in mutation.edits}:
            if (ROOT / path).is_file():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, tree / path)
        found = []
        for mutation in mutations:
            missing = [test for test in mutation.tests if not (ROOT / test.split("::")[0]).is_file()]
            found += [f"{mutation.guard}: there is no {test}" for test in missing]
            try:
                with mutation.made(tree):
                    pass
            except ValueError as error:
                found.append(f"{mutation.guard}: {error}")
    return found


def _list(mutations: Sequence[Mutation]) -> int:
    for mutation in mutations:
        print(f"{mutation.edits[0].file}: {mutation.guard}\n    {', '.join(mutation.tests)}")
    wrong = problems(mutations)
    print("\n".join([f"{len(mutations)} mutations, {len(wrong)} problems", *wrong]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
