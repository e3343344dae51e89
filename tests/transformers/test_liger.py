"""Liger: its flags, what is said where it cannot run, and its kernels in Triton's interpreter and on a GPU."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diffkern import InjectionError, inject_optimized_kernels, plan
from diffkern.providers import liger
from diffkern.providers.liger import Flags
from tests.transformers.models import build, inputs, logits

_CASES = "tests/transformers/liger_cases.py"


def test_the_flags_and_their_defaults_are_those_of_liger() -> None:
    assert Flags.of(True) == Flags(True, True, False, True, True)
    assert Flags.of(None) is None and Flags.of(False) is None
    assert Flags.of({"rope": False}) == Flags(rope=False)
    assert Flags.of({"cross_entropy": True}) == Flags(cross_entropy=True, fused_linear_cross_entropy=False)
    package = importlib.util.find_spec("liger_kernel")
    if package is not None and package.submodule_search_locations:  # importing that takes seconds
        source = Path(package.submodule_search_locations[0]) / "transformers" / "monkey_patch.py"
        (function,) = (
            node
            for node in ast.parse(source.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name == "apply_liger_kernel_to_llama"
        )
        names = [argument.arg for argument in function.args.args][: len(function.args.defaults)]
        theirs = dict(zip(names, map(ast.literal_eval, function.args.defaults), strict=True))
        assert {name: theirs[name] for name in vars(Flags())} == vars(Flags())


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"rop": True}, "liger has no flag 'rop': its flags are rope, swiglu"),
        ({"rope": "yes"}, "pass True, or a dict of rope"),
        ("rope", "pass True, or a dict of rope"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": True}, "two ways to one loss"),
    ],
)
def test_mistakes_are_answered(wish: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(build("llama"), liger=wish)


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert liger.unavailable_reason(torch.device("cuda")) == (
        "the package liger-kernel is not installed: pip install liger-kernel"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs here")
def test_where_it_cannot_run_the_report_says_so_and_all_else_is_fused() -> None:
    model, batch = build("llama"), inputs("llama")
    stock = logits(model, batch)
    report = inject_optimized_kernels(model, liger=True)
    (failed,) = report.failed
    assert failed.op == "liger" and ("not installed" in failed.reason or "Triton" in failed.reason)
    assert {site.provider for site in report.patched} <= {"compiled", "triton", "eager"}
    torch.testing.assert_close(logits(model, batch), stock, rtol=1e-4, atol=1e-5)
    with pytest.raises(InjectionError, match="strict injection refused"):
        inject_optimized_kernels(build("llama"), liger=True, strict=True)


def _run(device: str, least: int, *options: str) -> None:
    """Runs the cases in a process of their own: the interpreter is chosen when a kernel is defined."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["LIGER_DEVICE"] = device
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", _CASES, "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= least, done.stdout


@pytest.fixture
def package() -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed")


@pytest.mark.exhaustive
def test_the_cases_pass_in_the_interpreter(package: None, triton: ModuleType) -> None:
    _run("cpu", 19)


@pytest.mark.gpu
def test_the_cases_pass_on_a_gpu(package: None) -> None:
    _run("cuda", 38)
