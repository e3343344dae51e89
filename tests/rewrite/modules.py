"""Modules whose forwards are written in a test, with their source where Python looks for it."""

from __future__ import annotations

import itertools
import linecache
import textwrap
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.rewrite import Rewriter, Rewritten

SIZE = 32
_numbers = itertools.count()


class Block(nn.Module):
    """The children that forwards of tests use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(SIZE, eps=1e-5)
        self.rms_norm = nn.RMSNorm(SIZE, eps=1e-6)
        self.proj = nn.Linear(SIZE, SIZE)
        self.act = nn.SiLU()
        self.mode = "plain"
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.3, 0.4)

    def clobber(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def block(parameters: str, body: str, dtype: torch.dtype = torch.float32, **namespace: Any) -> nn.Module:
    """Returns a block of a class of its own whose ``forward(self, <parameters>)`` has this body."""
    source = f"class Written(Block):\n    def forward(self, {parameters}):\n"
    source += textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8) + "\n"
    return written(source, **namespace)["Written"]().to(dtype).eval().requires_grad_(False)


def written(source: str, **namespace: Any) -> dict[str, Any]:
    """Executes source that ``inspect`` finds again, and returns its globals."""
    name = f"<written {next(_numbers)}>"
    source = f"import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n{source}"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"Block": Block, "__name__": __name__, **namespace}
    exec(compile(source, name, "exec"), scope)
    return scope


def leaves(names: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random arguments by name: scales, shifts, gates ``[2, 1, D]``, with a 2 at the end ``[2, D]``; others rows."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"scale": (2, 1, SIZE), "shift": (2, 1, SIZE), "gate": (2, 1, SIZE)}
    shapes.update({f"{name}2": (2, SIZE) for name in ("scale", "shift", "gate")})
    return {
        name: torch.randn(shapes.get(name, (2, 40, SIZE)), generator=generator).to(dtype)
        for name in (part.strip() for part in names.split(","))
    }


def rewritten(module: nn.Module, numerics: str = "fast") -> Rewritten:
    """Returns the rewritten forward, which must exist."""
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten), found
    return found


def rules(found: Rewritten) -> list[str]:
    """The rules of the sites, by line."""
    return [site.plan.rule.name for site in sorted(found.sites, key=lambda site: site.plan.line)]
