"""The pages lead to files that exist, and name every variable that the package reads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from diffkern.build.installation import ARCH_VARIABLES, BUILD_VARIABLE
from diffkern.build.installed import KERNELS_VARIABLE
from diffkern.cli import app
from diffkern.providers.registry import ENVIRONMENT_VARIABLE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def _commands() -> list[str]:
    blocks = (block for page in PAGES for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.S))
    lines = (line.removeprefix("$ ") for block in blocks for line in block.splitlines())
    return sorted({line for line in lines if line.startswith("diffkern ")})


@pytest.mark.parametrize("line", _commands())
def test_every_command_of_the_pages_has_these_options(line: str) -> None:
    """The command line is parsed, and nothing runs."""
    command = typer.main.get_command(app)
    name, *arguments = shlex.split(line, comments=True)
    context = command.make_context(name, arguments)
    while rest := [*context._protected_args, *context.args]:
        name, command, arguments = context.command.resolve_command(context, rest)
        context = command.make_context(name, arguments, parent=context)
        if not hasattr(command, "resolve_command"):
            assert context.args == []
            return
    pytest.fail("names no command")


def test_every_variable_of_the_environment_is_described() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    for variable in (ENVIRONMENT_VARIABLE, KERNELS_VARIABLE, BUILD_VARIABLE, *ARCH_VARIABLES.values()):
        assert f"| `{variable}` |" in page


def test_the_cards_that_nothing_ran_on_say_so_first() -> None:
    for card in ("a100", "t4", "mi300"):
        page = (ROOT / "docs" / "gpus" / f"{card}.md").read_text(encoding="utf-8")
        assert "**Not run on this card" in page.split("##")[0]
