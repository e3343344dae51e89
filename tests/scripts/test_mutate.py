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


def test_what_kills_a_mutation_and_what_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "PRELOADED", ())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "code_under_test.py").write_text(_CODE)
    (tmp_path / "test_code.py").write_text(_TESTS)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    guard = ("x < 0", "False")
    expected = [
        (guard, "test_negative", "killed", ""),
        (guard, "test_positive", "survived", "1 passed"),
        (("x < 0", "x <"), "test_positive", "broken", "error"),  # nothing can be collected
        (("return", "pass"), "test_positive", "broken", "the old text is in code_under_test.py 2 times"),
        (("x > 0", "x"), "test_positive", "broken", "the old text is in code_under_test.py 0 times"),
        (("x < 0", "x < 0"), "test_positive", "broken", "the new text is the old one"),
        (guard, "test_that_fails_anyway", "broken", "fails without the edit"),
    ]
    mutations = [
        mutate.Mutation("a guard", (mutate.Edit("code_under_test.py", *edit),), (f"test_code.py::{test}",))
        for edit, test, *_ in expected
    ]
    results = {result.mutation: result for result in mutate.run(tmp_path, mutations, jobs=1)}
    for mutation, (_, _, outcome, detail) in zip(mutations, expected, strict=True):
        assert results[mutation].outcome == outcome, results[mutation]
        assert detail in results[mutation].detail
    assert (tmp_path / "code_under_test.py").read_text() == _CODE


def test_an_entry_with_a_word_too_few_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text('[[mutation]]\nguard = "a guard"\nfile = "a.py"\nold = "x"\ntest = "t"\n')
    with pytest.raises(ValueError, match=r"a guard.*look at new"):
        mutate.read([path])


def test_every_mutation_of_this_project_can_be_made() -> None:
    assert mutate.problems(mutate.read(sorted(mutate.LISTS.glob("*.toml")))) == []
