"""``import diffkern`` costs torch's import and little more, and touches nothing optional."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = ("diffusers", "transformers", "triton", "kernels", "rich", "typer", "accelerate", "matplotlib")


def run(code: str, **environment: str) -> str:
    """Runs Python code in a fresh interpreter and returns what it prints."""
    import os

    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, **environment}
    ).stdout


def test_import_pulls_in_nothing_optional() -> None:
    # torch itself may import some of these; only what diffkern adds counts.
    code = (
        "import sys, torch; before = set(sys.modules); import diffkern, diffkern.ops;"
        f"print(sorted((set(sys.modules) - before) & set({OPTIONAL!r})))"
    )
    assert run(code).strip() == "[]"


def test_importing_the_matching_tables_pulls_in_no_model_library() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import diffkern.matching;"
        "print(sorted((set(sys.modules) - before) & {'diffusers', 'transformers'}))"
    )
    assert run(code).strip() == "[]"


@pytest.mark.parametrize(
    "stub",
    [
        "sys.modules['kernels'] = None",
        "sys.modules['kernels'] = type(sys)('kernels')",
        "sys.modules['triton'] = None",
        "sys.modules['triton'] = type(sys)('triton')",
        "sys.modules['diffusers'] = None",
        "sys.modules['transformers'] = None; sys.modules['accelerate'] = None",
    ],
)
def test_dk66_dk75_a_missing_or_broken_optional_package_never_breaks_the_import(stub: str) -> None:
    code = (
        "import sys, torch\n"  # torch first: it has to cope with these by itself
        f"{stub}\n"
        "import diffkern\n"
        "model = torch.nn.Sequential(torch.nn.LayerNorm(64))\n"
        "report = diffkern.inject_optimized_kernels(model)\n"
        "x = torch.randn(3, 64)\n"
        "assert len(report.patched) == 1, report.to_dict()\n"
        "torch.testing.assert_close(model(x), torch.nn.functional.layer_norm(x, (64,)))\n"
        "print('fine')"
    )
    assert run(code).strip() == "fine"


def test_dk75_a_file_named_triton_in_the_working_directory(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    Path(f"{tmp_path}/triton.py").write_text("# not the triton you look for\n")
    monkeypatch.chdir(str(tmp_path))
    code = (
        "import torch, diffkern\n"
        "from diffkern.providers import explain\n"
        "reason = explain('rms_norm', torch.device('cpu'), (torch.float32,))['triton']\n"
        "assert reason, 'triton claims to be there'\n"
        "print('fine')"
    )
    assert run(code).strip() == "fine"
