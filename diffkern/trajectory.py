"""How far a short run of a denoiser in fp8 ends from stock's, and which layers to leave in their dtype."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.bench.steps import first_tensor
from diffkern.hub.config import KernelConfig
from diffkern.injection import inject_optimized_kernels
from diffkern.injection.fp8_fusion import OP, kind_of

#: Steps of a run: differences have grown by then, and a run takes no longer than the proofs.
STEPS = 4
#: Decibels below which a run is called poor: differences are visible from about here.
POOR = 30.0
#: How many kinds of layers are named.
_NAMED = 3


@dataclass(frozen=True)
class Trajectory:
    """What became of a short run.

    Attributes:
        steps: Of the run; 1 where a model's output is no change of its input.
        psnr: Peak signal-to-noise ratio of its end against that of stock, in decibels.
        without: Of a poor run, the same with one kind of layer left in its dtype, by the pattern that names it, the
            one that helps most first.
    """

    steps: int
    psnr: float
    without: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"after {self.steps} step{'s' if self.steps > 1 else ''}: {self.psnr:.1f} dB against stock"
        if self.psnr >= POOR or not self.without:
            return text
        named = dict(list(self.without.items())[:_NAMED])
        each = ", ".join(f"{pattern} ({psnr:.1f} dB without it)" for pattern, psnr in named.items())
        return f"{text}, which may be seen. Most comes from {each}: KernelConfig(fp8_exclude={list(named)})"


def follow(model: nn.Module, inputs: Mapping[str, Any], config: KernelConfig) -> Trajectory:
    """Runs a few Euler steps of a denoiser stock and in fp8, and if they end far apart, without each kind of layer.

    The steps change the first tensor of the inputs, which are keyword arguments of one call.
    """
    name = next(name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point())

    def run() -> tuple[Tensor, int]:
        arguments = copy.deepcopy(dict(inputs))
        x = arguments[name]
        with torch.no_grad():
            for _ in range(STEPS):
                y = first_tensor(model(**arguments))
                if y.shape != x.shape:
                    return y.clone(), 1
                arguments[name] = x = x - y / STEPS
        return x, STEPS

    def in_fp8(*exclude: str) -> tuple[float, list[str]]:
        own = replace(config, fp8_exclude=(*config.fp8_exclude, *exclude))
        report = inject_optimized_kernels(model, numerics="fp8", config=own, cuda_graph=False)
        try:
            kinds = dict.fromkeys(kind_of(site.path) for site in report.patched if site.op == OP)
            return _psnr(run()[0], stock), list(kinds)
        finally:
            report.restore()

    stock, steps = run()
    psnr, kinds = in_fp8()
    without = {kind: in_fp8(kind)[0] for kind in kinds} if psnr < POOR else {}
    return Trajectory(steps, psnr, dict(sorted(without.items(), key=lambda item: -item[1])))


def _psnr(y: Tensor, stock: Tensor) -> float:
    """The range of stock's values over the root mean square of the difference, in decibels."""
    y, stock = y.double(), stock.double()
    difference = float((y - stock).square().mean().sqrt())
    peak = float(stock.max() - stock.min())
    return math.inf if difference == 0 else 20 * math.log10(peak / difference) if peak > 0 else -math.inf
