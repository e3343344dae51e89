"""``scripts/check_gpu.sh``: which steps run for which cards, and what is said of failures.

The interpreter is a stand-in that writes down what it is asked for: no test machine has both vendors' cards.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "scripts" / "check_gpu.sh"


def run(
    tmp_path: Path, platform: str, *steps: str, failing: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script; returns what it did and the commands that it gave to the interpreter."""
    asked, interpreter = tmp_path / "asked", tmp_path / "python"
    interpreter.write_text(
        "#!/usr/bin/env bash\n"
        f'[[ "$*" == *torch.version.hip* ]] && {{ echo {platform}; exit; }}\n'
        f'echo "$HIP_PLATFORM $*" | tr "\\n" " " >> {asked}; echo >> {asked}\n'
        + (f'[[ "$*" == *{failing}* ]] && {{ echo "it broke"; exit 3; }}\n' if failing else "")
        + "exit 0\n",
        encoding="utf-8",
    )
    interpreter.chmod(0o755)
    environment = os.environ | {"PYTHON": str(interpreter), "HIP_PLATFORM": ""}
    command = ["bash", str(_SCRIPT), str(tmp_path / "out"), *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, asked.read_text(encoding="utf-8").splitlines() if asked.exists() else []


def test_an_amd_card_is_built_tested_and_measured_by_one_command(tmp_path: Path) -> None:
    done, asked = run(tmp_path, "rocm")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = ("describe_environment", "build --rocm", "doctor", "-m gpu", "benchmark_rmsnorm", "bench ops")
    expected += ("bench attention",) * 3 + ("generate_video",)
    assert len(asked) == len(expected)
    for command, part in zip(asked, expected, strict=True):
        assert part in command and command.startswith("amd "), command
    assert "sanitize" not in done.stdout


def test_the_sanitizer_is_for_nvidia_cards(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "rocm", "sanitize")
    assert done.returncode == 2 and "for NVIDIA cards" in done.stderr


def test_a_step_that_fails_shows_the_end_of_its_log_and_the_others_run(tmp_path: Path) -> None:
    done, asked = run(tmp_path, "cuda", "build", "ops", failing="--cuda")
    assert done.returncode == 1 and "it broke" in done.stdout
    assert any("bench ops" in command for command in asked)


@pytest.mark.parametrize("steps", [["bild"], ["build", "everything"]])
def test_an_unknown_step_is_answered_with_the_known_ones(tmp_path: Path, steps: list[str]) -> None:
    done, _ = run(tmp_path, "cuda", *steps)
    assert done.returncode == 2 and "environment, build, test" in done.stderr
