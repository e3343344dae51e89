"""The example of the README prints what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from diffkern.providers.compiled import PROVIDER as COMPILED

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def without_errors(text: str) -> list[str]:
    """The lines, without measured errors, which differ a little from one processor to the next."""
    return re.sub(r"\d\.\de-\d\d", "N", text).splitlines()


def test_the_example_prints_what_the_page_says() -> None:
    if COMPILED.unavailable_reason(torch.device("cpu")) is not None:
        pytest.skip("the page shows what compiled kernels print")
    example = README.split("<!-- example: begin")[1].split("<!-- example: end -->")[0]
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", example, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert without_errors(printed.getvalue()) == without_errors(output)
