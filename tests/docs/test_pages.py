"""The pages lead to files that exist, and name every variable that the package reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diffkern.build.installed import KERNELS_VARIABLE
from diffkern.providers.registry import ENVIRONMENT_VARIABLE
from setup_kernels import ARCH_VARIABLES, BUILD_VARIABLE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)", prose)
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_every_variable_of_the_environment_is_described() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    for variable in (ENVIRONMENT_VARIABLE, KERNELS_VARIABLE, BUILD_VARIABLE, *ARCH_VARIABLES.values()):
        assert f"| `{variable}` |" in page


def test_the_cards_that_nothing_ran_on_say_so_first() -> None:
    for card in ("a100", "t4", "mi300"):
        page = (ROOT / "docs" / "gpus" / f"{card}.md").read_text(encoding="utf-8")
        assert "**Not run on this card" in page.split("##")[0]
