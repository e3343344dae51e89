"""The count of modulations and gated sums in ComfyUI's models."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts.comfyui_sites import GATED, document, survey
from scripts.write_rewrite_coverage import MODULATED, document_of_comfyui
from tests.comfyui import native

PAGE = Path(__file__).parents[2] / "docs" / "comfyui-models.md"
SOURCE = '''
import torch
from torch import nn

def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

def apply_gate(gate, x, parts=None):
    if parts is None:
        return gate * x
    for start, end in parts:
        x[:, start:end] *= gate
    return x

def rotate_rope(x, scale):
    return x + x * scale

class Layer(nn.Module):
    def forward(self, x, y, shift, scale, gate, parts=None):
        """Two modulations, one by a nested function, and two sums."""
        def again(x, norm, s, t):
            return norm(x) * (1 + s) + t

        y = self.proj(modulate(self.norm(x), shift, scale))
        x = x + apply_gate(gate, y, parts)
        z = again(x, self.norm2, scale, shift)
        x.addcmul_(self.proj(z), gate)
        for start, end in parts:
            x[:, start:end].mul_(1 + scale)
        return rotate_rope(x, scale)
'''


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Kind, rule and reason of each site of a package with one file."""
    package, module = ModuleType("tests.sites"), ModuleType("tests.sites.file")
    package.__file__, package.__path__ = "<sites>", []
    linecache.cache["<sites of a file>"] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), "<sites of a file>")
    exec(compile(SOURCE, "<sites of a file>", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "tests.sites", package)
    monkeypatch.setitem(sys.modules, "tests.sites.file", module)
    monkeypatch.setattr("scripts.comfyui_sites.modules", lambda name: iter([module]))
    found = sorted(survey("tests.sites"), key=lambda place: place.line)
    assert all(place.path == "file.Layer.forward" for place in found)
    return [(place.kind, place.rule, place.one_kernel or place.reason) for place in found]


def test_each_call_of_a_helper_is_a_site_and_the_helper_is_none(places: list[tuple[str, str, str]]) -> None:
    one_kernel = "`addcmul_` writes the sum in one pass, which is what the op does"
    assert places == [
        (MODULATED, "norm, modulation", ""),
        (GATED, "residual, norm, modulation", ""),
        (MODULATED, "residual, norm, modulation", ""),
        (GATED, "", one_kernel),
        (MODULATED, "", "no rule knows this spelling"),
    ]


def test_the_page_counts_what_it_lists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    both = next(line for line in text.splitlines() if line.startswith("| both |"))
    sites, fused, once, left = (int(cell) for cell in both.strip("| ").split(" | ")[1:])
    assert sites == fused + once + left and fused + once >= 260
    assert text.partition("## Not fused")[2].count("\n| `") == once + left
    assert document("0", []).count("| 0 | 0 | 0 | 0 |") == 3


@pytest.mark.usefixtures("comfyui")
def test_the_page_is_that_of_this_comfyui() -> None:
    """After a change of rules: python scripts/write_rewrite_coverage.py --comfyui FOLDER"""
    from comfyui_version import __version__

    if f"ComfyUI {__version__}." not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page is of another version")
    assert document_of_comfyui(native.ROOT) == PAGE.read_text(encoding="utf-8")
