"""The command line: what ``doctor`` says, and how ``build`` ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from diffkern.cli import app
from diffkern.doctor import examine
from diffkern.providers import OPS, ORDER


def invoke(*arguments: str, **environment: str) -> Result:
    """Runs a command on a terminal of 80 columns."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1", **environment})


def test_doctor_fits_80_columns_and_lists_every_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFKERN_PROVIDER", raising=False)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert {line.split()[0] for line in result.output.splitlines() if line.startswith("  ") and line[2] != " "} >= {
        *ORDER
    }
    assert "DIFFKERN_PROVIDER" not in result.output
    assert invoke("doctor", "--quiet").output == ""


def test_doctor_gives_only_reasons_that_something_can_be_done_about() -> None:
    rows = examine().rows
    assert not any(f"has no {op}" in row.reason for row in rows for op in OPS)
    assert not any("for cpu (serves" in row.reason for row in rows if row.device == "cpu" and row.ops)
    eager = [row for row in rows if row.provider == "eager"]
    assert all(row.ops == OPS and row.reason == "" for row in eager)


@pytest.mark.parametrize(
    ("value", "said"), [("eager", "every op runs on eager"), ("eagre", "no provider"), ("auto", "the default")]
)
def test_doctor_says_that_a_provider_is_forced(value: str, said: str) -> None:
    result = invoke("doctor", "--json", DIFFKERN_PROVIDER=value)
    (setting,) = (line for line in json.loads(result.output)["settings"] if line.startswith("DIFFKERN_PROVIDER="))
    assert value in setting and said in setting


def test_doctor_says_what_is_switched_off() -> None:
    variables = ("DIFFKERN_REWRITE", "DIFFKERN_MEASURE", "DIFFKERN_CHOICES")
    said = json.loads(invoke("doctor", "--json", **dict.fromkeys(variables, "0")).output)["settings"]
    assert [line.partition(" is set, so ")[0] for line in said] == [f"{variable}=0" for variable in variables]
    assert json.loads(invoke("doctor", "--json", **dict.fromkeys(variables, "1")).output)["settings"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--cpu", "--arch", "sm_90"], 2, "--cpu builds for none"),
        pytest.param(["--arch", "foo"], None, "arch", marks=pytest.mark.exhaustive),  # builds what it can
        (["--cuda", "--rocm", "--arch", "foo"], None, "diffkern build: "),
    ],
)
def test_build_fails_when_an_architecture_that_was_named_cannot_be_built(
    arguments: list[str], code: int | None, message: str, tmp_path: Path
) -> None:
    result = invoke("build", *arguments, "--output", str(tmp_path / "kernels"))
    assert result.exit_code in ((1, 2) if code is None else (code,))  # foo is wrong, and no compiler is another reason
    assert message in result.output


def test_build_says_in_one_line_that_the_output_cannot_be_written(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    result = invoke("build", "--cpu", "--output", str(occupied / "kernels"))
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith("diffkern build: ")
