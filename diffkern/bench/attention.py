"""Implementations of attention on given shapes: time, memory and error of those that are here, and why not the others.

``diffkern bench attention`` is written with this. Nothing is downloaded: a kernel of the Hub takes part only if it
is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diffkern.attention import BACKENDS, AttentionCall, Backend, UnavailableError, accuracy, find_backend

if TYPE_CHECKING:
    from rich.table import Table

MASKS = ("none", "bool", "additive")
BASELINE = "native"

_SHAPE = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)(?:/(\d+))?x(\d+)")


@dataclass(frozen=True)
class Shape:
    """Sizes of a call, written ``BxSxHxD``, ``BxS/TxHxD`` with other keys, ``BxSxH/GxD`` with grouped queries.

    ``queries`` and ``keys`` are lengths; ``heads`` are those of the queries, ``kv_heads`` those of keys and values.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads a shape.

        Raises:
            ValueError: it is not written like one, or its heads do not divide.
        """
        match = _SHAPE.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(f"{text!r} is no shape: write batch x queries[/keys] x heads[/kv heads] x head size")
        batch, queries, keys, heads, kv_heads, head_dim = match.groups()
        shape = cls(*map(int, (batch, queries, keys or queries, heads, kv_heads or heads, head_dim)))
        if not all(asdict(shape).values()) or shape.heads % shape.kv_heads:
            raise ValueError(f"{text!r} is no shape: sizes are at least 1, and kv heads divide heads")
        return shape

    def __str__(self) -> str:
        keys = "" if self.keys == self.queries else f"/{self.keys}"
        kv_heads = "" if self.kv_heads == self.heads else f"/{self.kv_heads}"
        return f"{self.batch}x{self.queries}{keys}x{self.heads}{kv_heads}x{self.head_dim}"

    def call(
        self,
        device: torch.device,
        dtype: torch.dtype,
        mask: str = "none",
        causal: bool = False,
        dropout: float = 0.0,
        backward: bool = False,
    ) -> AttentionCall:
        """Random arguments of this shape; a mask hides a tenth of the keys of each sample from all queries.

        Raises:
            ValueError: there is no such mask.
        """
        if mask not in MASKS:
            raise ValueError(f"mask={mask!r}: choose one of {', '.join(MASKS)}")
        generator = torch.Generator("cpu").manual_seed(0)

        def random(length: int, heads: int) -> torch.Tensor:
            x = torch.randn(self.batch, length, heads, self.head_dim, generator=generator)
            return x.to(device, dtype).requires_grad_(backward)

        visible = None
        if mask != "none":
            visible = torch.arange(self.keys).expand(self.batch, 1, 1, self.keys) < max(1, self.keys * 9 // 10)
            if mask == "additive":
                visible = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)
            visible = visible.to(device)
        query = random(self.queries, self.heads)
        key, value = (random(self.keys, self.kv_heads) for _ in range(2))
        return AttentionCall(query, key, value, visible, dropout, causal)


@dataclass(frozen=True)
class Result:
    """One implementation on one shape.

    Attributes:
        milliseconds: Median time of a call, with its backward if that was asked for; None if it did not run.
        peak_bytes: Most memory it allocated besides its arguments; None where torch does not count.
        error: Relative error of the output against float64, without dropout.
        reason: Why it did not run, or "".
    """

    shape: str
    backend: str
    milliseconds: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    reason: str = ""


def run(call: AttentionCall, shape: str, names: Iterable[str] = ()) -> list[Result]:
    """Measures one call, which results call ``shape``, on every implementation that needs no download, fastest first.

    ``names``, of backends or of kernels on the Hub, are taken in their place.

    Raises:
        ValueError: a name is no backend.
        UnavailableError: a kernel cannot be loaded.
    """
    device = call.query.device
    backends = [find_backend(name, device) for name in names] or [b for b in BACKENDS.values() if not b.downloads]
    results = [_measured(backend, call, shape) for backend in backends]
    return sorted(results, key=lambda result: (result.milliseconds is None, result.milliseconds or 0.0))


def _measured(backend: Backend, call: AttentionCall, shape: str) -> Result:
    refusal = backend.missing() or backend.refusal(call.signature())
    if refusal is not None:
        return Result(shape, backend.name, reason=refusal)
    try:
        backend.load()
        (error,) = accuracy.errors(call, (backend.compute,))
        milliseconds = 1000 * accuracy.seconds(backend.compute, call)
        return Result(shape, backend.name, milliseconds, accuracy.peak_bytes(backend.compute, call), error)
    except UnavailableError as unavailable:
        return Result(shape, backend.name, reason=str(unavailable))
    except Exception as failure:  # whatever a foreign kernel raises is the reason why it did not run
        return Result(shape, backend.name, reason=f"failed: {str(failure).splitlines()[0]}")


def table(results: Sequence[Result], title: str) -> Table:
    """The results to print with rich; the speed-up is that over what PyTorch chooses by itself."""
    from rich import box
    from rich.table import Table

    rendered = Table(title=title, box=box.SIMPLE, padding=(0, 1), title_justify="left")
    rendered.add_column("backend", no_wrap=True)
    for column in ("ms", "speed-up", "peak MiB", "error"):
        rendered.add_column(column, justify="right")
    rendered.add_column("why not", overflow="fold")
    baseline = next((r.milliseconds for r in results if r.backend == BASELINE), None)
    for result in results:
        time = result.milliseconds
        rendered.add_row(
            result.backend,
            "" if time is None else f"{time:.3f}",
            "" if time is None or baseline is None else f"{baseline / time:.2f}x",
            "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.1f}",
            "" if result.error is None else f"{result.error:.1e}",
            result.reason,
        )
    return rendered


def plot(results: Iterable[Result], title: str, path: Path) -> None:
    """Draws the time of every implementation that ran as a bar, by shape, and writes a PNG."""
    from diffkern.bench.results import bars

    ran = [(f"{result.shape} {result.backend}", result.milliseconds) for result in results if result.milliseconds]
    bars([name for name, _ in ran], [ms for _, ms in ran], [f"{ms:.3f} ms" for _, ms in ran], title, path)
