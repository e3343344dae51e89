"""Every block of Python and every ``diffkern`` command in the pages runs, or says above itself why it does not.

Those are parsed at least. Of other commands (make, pip, scripts) the files, options, extras and targets must be there.

The Python blocks of a page run in one namespace, in their order, which begins with what such pages take for granted: a
tiny ``pipe`` and ``model``, their ``report``, and the public functions.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import diffkern
from diffkern.cli import app
from tests.injection.models import tiny_ltx
from tests.transformers.models import build

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>(?:not run|example): ?[^\n]*) ?-->\n)?```(?P<kind>\w+)\n(?P<code>.*?)```", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One block of code of a page; ``mark`` says why no test here runs it, or is empty."""

    page: Path
    line: int
    kind: str
    code: str
    mark: str

    def commands(self) -> list[str]:
        """The commands of a shell block: where it shows output, commands have a ``$`` before them."""
        prompted = [line[2:] for line in self.code.splitlines() if line.startswith("$ ")]
        return [line for line in prompted or self.code.splitlines() if line and not line.startswith("#")]


def _blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = _BLOCK.finditer(text)
    return [Block(page, text.count("\n", 0, m.start("code")), m["kind"], m["code"], m["mark"] or "") for m in found]


BLOCKS = [block for page in PAGES for block in _blocks(page)]
PYTHON = {page: [b for b in BLOCKS if b.page == page and b.kind == "python"] for page in PAGES}
COMMANDS = sorted(
    {(command, not block.mark) for block in BLOCKS if block.kind == "console" for command in block.commands()}
)


def test_blocks_are_of_known_kinds() -> None:
    assert {block.kind for block in BLOCKS} <= {"python", "console", "text", "mermaid"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_overlooked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"(?m)^[ >]*(?:```|~~~)", text)
    assert len(fences) == 2 * sum(block.page == page for block in BLOCKS)
    examples = [block for block in BLOCKS if block.page == page and block.mark.startswith("example")]
    assert not examples or page.name in ("README.md", "hub.md"), "test_readme and tests/hub/test_docs.py run examples"
    assert re.findall(r"(?m)^(?: {4}|\t)[^ ]", re.sub(r"(?s)```.*?```", "", text)) == []


@pytest.mark.parametrize("page", [p for p, b in PYTHON.items() if b], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page", **{name: getattr(diffkern, name) for name in diffkern.__all__}}
    if any("pipe" in block.code or "model" in block.code for block in PYTHON[page]):
        pipe = SimpleNamespace(components={"transformer": tiny_ltx()})
        namespace |= {"pipe": pipe, "model": build("llama"), "report": diffkern.inject_optimized_kernels(pipe)}
    for number, block in enumerate(PYTHON[page]):
        # In a file of its own: what is read as the source of a model's forward must have one.
        file = tmp_path / f"block_{number}.py"
        file.write_text(block.code, encoding="utf-8")
        code = compile(ast.parse(block.code), str(file), "exec")
        if not block.mark:
            exec(code, namespace)


def test_the_rewritten_forward_is_the_one_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "how-it-works.md"
    [shown] = [block.code for block in BLOCKS if block.page == page and block.kind == "text"]
    test_the_python_of_a_page_runs(page, tmp_path, monkeypatch)
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(("command", "runs"), COMMANDS, ids=lambda value: str(value).split("  ")[0])
def test_a_command_runs_or_could(command: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["bash", "-n", "-c", command], check=True)
    words = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), shlex.split(command, comments=True)))
    if words[0] == "diffkern":
        _parse(words[1:])
        if runs:
            monkeypatch.chdir(ROOT)
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, result.output
    elif words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    elif "pip" in words:
        extras = re.findall(r"\.\[([\w,]+)\]", command)
        known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(f"\n{extra} = [" in known for names in extras for extra in names.split(","))
    else:
        _check_files(words)


def _parse(arguments: list[str]) -> None:
    """Reads a command line of diffkern's; nothing runs."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("diffkern", list(arguments))
    while rest := [*context._protected_args, *context.args]:
        name, command, arguments = context.command.resolve_command(context, rest)
        context = command.make_context(name, arguments, parent=context)
        if not hasattr(command, "resolve_command"):
            assert context.args == []
            return
    pytest.fail("names no command")


def _check_files(words: list[str]) -> None:
    """The script that a command names is here and knows the options."""
    scripts = [word for word in words if word.endswith((".py", ".sh")) or word.startswith("tests/")]
    assert scripts or words[0] in ("cd", "ln")
    for script in scripts:
        [path] = [found for folder in ("", "examples/ltx_video") if (found := ROOT / folder / script).exists()]
        if path.is_file():
            options = [word for word in words[words.index(script) :] if word.startswith("--")]
            text = path.read_text(encoding="utf-8").replace("_", "-")
            assert [option for option in options if option.strip("-").split("=")[0] not in text] == []


def test_most_blocks_run() -> None:
    """A mark is for what needs a GPU, a network or an hour."""
    marked = [block for block in BLOCKS if block.mark.startswith("not run")]
    assert all(len(block.mark) > len("not run: ") + 8 for block in marked)
    assert len(marked) <= 12
