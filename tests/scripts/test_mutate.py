"""``scripts/mutate.py``: which mutations count as found, and that the tree itself is never edited."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import mutate

_CODE = "def absolute(x):\n    if x < 0:\n        return -x\n    return x\n"
_TESTS = """
from code_under_test import absolute

def test_negative():
    assert absolute(-2) == 2

def test_positive():
    assert absolute(3) == 3

def test_that_fails_anyway():
    assert absolute(-2) == 3
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutate, "PRELOADED", ())
    root = tmp_path / "project"
    root.mkdir()
    (root / "code_under_test.py").write_text(_CODE)
    (root / "test_code.py").write_text(_TESTS)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def mutation(old: str, new: str, *tests: str, file: str = "code_under_test.py") -> mutate.Mutation:
    return mutate.Mutation("a guard", file, old, new, tuple(f"test_code.py::{test}" for test in tests))


def outcomes(tree: Path, *mutations: mutate.Mutation) -> list[tuple[str, str]]:
    return [(result.outcome, result.detail) for result in mutate.run(tree, mutations, jobs=1)]


def test_a_test_that_fails_with_the_edit_kills_it_and_another_one_does_not(tree: Path) -> None:
    guard = "x < 0", "False"
    (killed, _), (survived, output) = outcomes(
        tree, mutation(*guard, "test_negative"), mutation(*guard, "test_positive")
    )
    assert (killed, survived) == ("killed", "survived")
    assert "1 passed" in output
    assert (tree / "code_under_test.py").read_text() == _CODE


@pytest.mark.parametrize(
    ("edit", "test", "reason"),
    [
        (("return", "pass"), "test_negative", "the old text is in code_under_test.py 2 times"),
        (("x > 0", "x"), "test_negative", "the old text is in code_under_test.py 0 times"),
        (("x < 0", "x < 0"), "test_negative", "the new text is the old one"),
        (("x < 0", "x <"), "test_negative", "error"),  # nothing can be collected
        (("x < 0", "False"), "test_that_fails_anyway", "fails without the edit"),
        (("x < 0", "False"), "test_that_is_not_there", "fails without the edit"),
    ],
)
def test_a_mutation_that_proves_nothing_says_why(tree: Path, edit: tuple[str, str], test: str, reason: str) -> None:
    ((outcome, detail),) = outcomes(tree, mutation(*edit, test))
    assert outcome == "broken"
    assert reason in detail


def test_an_entry_with_a_word_too_few_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text('[[mutation]]\nguard = "a guard"\nfile = "a.py"\nold = "x"\ntest = "t"\n')
    with pytest.raises(ValueError, match="a guard.*look at new"):
        mutate.read([path])


def test_every_mutation_of_this_project_can_be_made() -> None:
    wrong = []
    for entry in mutate.read(sorted(mutate.LISTS.glob("*.toml"))):
        for test in entry.tests:
            if not (mutate.ROOT / test.split("::")[0]).is_file():
                wrong.append(f"{entry.guard}: there is no {test}")
        try:
            entry.mutated(mutate.ROOT)
        except ValueError as error:
            wrong.append(f"{entry.guard}: {error}")
    assert wrong == []
