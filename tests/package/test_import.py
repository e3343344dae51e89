"""``import diffkern`` costs torch's import and little more, and touches nothing optional."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = ("diffusers", "transformers", "triton", "kernels", "rich", "typer", "accelerate", "matplotlib")


def run(code: str, **environment: str) -> str:
    """Runs Python code in a fresh interpreter and returns what it prints."""
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


def test_a_folder_named_like_the_package_does_not_hide_the_installed_one(tmp_path: Path) -> None:
    (tmp_path / "diffkern").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if subprocess.run([sys.executable, "-c", "import diffkern"], cwd=tmp_path.parent, env=environment).returncode:
        pytest.skip("diffkern is not installed in this environment")
    code = "import diffkern; print(diffkern.inject_optimized_kernels.__name__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "inject_optimized_kernels"


def test_public_names_come_at_their_first_use_and_torch_with_them() -> None:
    code = (
        "import sys, diffkern, diffkern.hub; print('torch' in sys.modules, end=' ')\n"
        "assert set(diffkern.__all__) <= set(dir(diffkern))\n"
        "assert all(getattr(diffkern, name) is not None for name in diffkern.__all__)\n"
        "from diffkern.injection import plan; assert diffkern.plan is plan\n"
        "assert not hasattr(diffkern, 'injekt'); print('torch' in sys.modules)"
    )
    assert run(code).split() == ["False", "True"]


def test_importing_the_matching_tables_pulls_in_no_model_library() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import diffkern.matching;"
        "print(sorted((set(sys.modules) - before) & {'diffusers', 'transformers'}))"
    )
    assert run(code).strip() == "[]"


@pytest.mark.parametrize(
    "replacement",
    [
        *[
            pytest.param(code, marks=pytest.mark.exhaustive)
            for code in (
                "sys.modules['kernels'] = None",
                "sys.modules['triton'] = None",
                "sys.modules['diffusers'] = None",
            )
        ],
        "sys.modules['kernels'] = type(sys)('kernels')",
        "sys.modules['triton'] = type(sys)('triton')",
        "sys.modules['transformers'] = None; sys.modules['accelerate'] = None",
    ],
)
def test_a_missing_or_broken_optional_package_never_breaks_the_import(replacement: str) -> None:
    code = (
        "import sys, torch\n"  # torch first: it has to cope with these by itself
        f"{replacement}\n"
        "import diffkern\n"
        "model = torch.nn.Sequential(torch.nn.LayerNorm(64))\n"
        "report = diffkern.inject_optimized_kernels(model)\n"
        "x = torch.randn(3, 64)\n"
        "assert len(report.patched) == 1, report.to_dict()\n"
        "torch.testing.assert_close(model(x), torch.nn.functional.layer_norm(x, (64,)))\n"
        "assert not any('liger' in name for name in sys.modules), 'nothing is trained by Liger'\n"
        "print('fine')"
    )
    assert run(code).strip() == "fine"


def test_a_file_named_triton_in_the_working_directory(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
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
