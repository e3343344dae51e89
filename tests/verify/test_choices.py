"""Choices that times made are there in the next process, for the same device and versions alone."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffkern.verify import choices

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(choices.VARIABLE, str(tmp_path / "choices"))
    monkeypatch.setattr(choices, "_known", {})
    return tmp_path / "choices"


def test_a_choice_is_there_in_the_next_process(folder: Path) -> None:
    assert choices.recall(CPU, "site", torch.float32) is None
    choices.remember(CPU, "no gain", "site", torch.float32)
    assert choices.recall(CPU, "site", torch.float32) == "no gain"
    code = "import torch\nfrom diffkern.verify.choices import recall\n"
    code += "print(recall(torch.device('cpu'), 'site', torch.float32))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "no gain"
    (file,) = folder.iterdir()  # and nothing else that was written on the way
    assert json.loads(file.read_text()) == {"site | torch.float32": "no gain"}


def test_what_another_process_wrote_meanwhile_is_kept(folder: Path) -> None:
    choices.remember(CPU, "first", "a")
    (file,) = folder.iterdir()
    file.write_text(json.dumps({"a": "first", "b": "another"}))
    choices.remember(CPU, "second", "c")
    assert json.loads(file.read_text()) == {"a": "first", "b": "another", "c": "second"}


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": 1}'])
def test_a_damaged_file_is_as_good_as_none(folder: Path, content: str) -> None:
    choices.remember(CPU, "first", "a")
    (file,) = folder.iterdir()
    file.write_text(content)
    choices._known.clear()
    assert choices.recall(CPU, "a") is None
    choices.remember(CPU, "second", "a")
    assert json.loads(file.read_text()) == {"a": "second"}


def test_a_number_of_threads_has_its_own_file(folder: Path) -> None:
    threads = torch.get_num_threads()
    choices.remember(CPU, "with these", "a")
    try:
        torch.set_num_threads(threads + 1)
        assert choices.recall(CPU, "a") is None
    finally:
        torch.set_num_threads(threads)


def test_what_was_timed_in_another_way_is_timed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices.remember(CPU, "no gain", "a")
    assert choices.recall(CPU, "a") == "no gain"
    choices._machine.cache_clear()
    monkeypatch.setattr(choices, "_TIMING", choices._TIMING + 1)
    assert choices.recall(CPU, "a") is None
    choices._machine.cache_clear()


def test_where_nothing_can_be_written_the_process_remembers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file in the place of the folder")
    with caplog.at_level(logging.INFO):
        choices.remember(CPU, "slow", "a")
    assert choices.recall(CPU, "a") == "slow" and "choices are not kept" in caplog.text


def test_zero_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choices.VARIABLE, "0")
    choices.remember(CPU, "slow", "a")
    assert choices.recall(CPU, "a") is None and not folder.exists()
