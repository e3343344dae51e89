#!/usr/bin/env python3
"""Checks every tiny denoiser in every tier, with and without CUDA graphs, against an untouched twin.

    python scripts/check_models_gpu.py [--device cpu] [--models ltx flux] [--seconds 280] [--json results.json]

A case is a model in one dtype and tier. It is called eight times, with other values each time and another shape in
between, as it was injected; then as often with ``cuda_graph=True`` over that; then it is restored. It fails if anything
raises, if ``exact`` is not stock to the bit, if ``fast`` is further from float64 than stock allows, if a graph gives
other bits than the fused calls, if the restored model is not stock to the bit, or if the device is not as it was.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffkern import KernelConfig, inject_optimized_kernels
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.model import Denoiser, Draw

#: The sizes of the eight calls.
SIZES = (8, 8, 8, 8, 12, 12, 12, 8)
#: What the error of a whole model may be of stock's: each of its ops keeps 1.05, their roundings add up by chance.
RATIO, SLACK = 1.5, 1e-6
#: Models that send each token to the experts of the largest scores: rounding alone sends some to others.
WITH_EXPERTS = {"hidream"}
#: What it may be in fp8, relative.
FP8_ERROR = 0.3
#: Every site runs fused here, also where models as small as these gain nothing.
UNTIMED = KernelConfig(measure=False)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Case:
    """The result of one model in one dtype and tier.

    Attributes:
        error: The largest relative error against float64, or None if there is no reference.
        stock_error: That of the twin.
        fused: How many sites ran fused.
        captured: How many of the eight calls were replayed from a graph.
        reasons: Why the others were not.
        problem: What is wrong, or "".
    """

    model: str
    dtype: str
    numerics: str
    error: float | None = None
    stock_error: float | None = None
    fused: int = 0
    captured: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        errors = "no reference" if self.error is None else f"error {self.error:.1e} (stock {self.stock_error:.1e})"
        outcome = f"FAILED: {self.problem}" if self.problem else "ok"
        why = "" if not self.reasons else f" [{max(self.reasons, key=lambda reason: self.reasons[reason])[:90]}]"
        name = f"{self.model:16} {self.dtype} {self.numerics:5}"
        return f"{name} {errors}, {self.fused} fused, {self.captured}/8 replayed{why}, {self.seconds:.1f} s: {outcome}"


class Model:
    """A tiny model in one dtype: what its untouched twin gives, and what float64 does."""

    def __init__(self, name: str, denoiser: Denoiser, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self.denoiser, self.device, self.dtype = name, denoiser, device, dtype
        self.module = denoiser.in_dtype(device, dtype)
        self.stock = self.outputs(copy.deepcopy(self.module))
        try:
            self.reference: list[list[Tensor]] | None = self.outputs(copy.deepcopy(self.module).double(), torch.float64)
        except (RuntimeError, ValueError, TypeError):  # a forward that is written for certain dtypes
            self.reference = None

    def outputs(self, module: nn.Module, dtype: torch.dtype | None = None) -> list[list[Tensor]]:
        """What eight calls give. The inputs are rounded to the dtype of the model, and then cast to ``dtype``."""
        results = []
        for seed, size in enumerate(SIZES):
            draw = Draw(torch.Generator().manual_seed(seed), self.device, self.dtype)
            arguments = self.denoiser.inputs(draw, size)
            if dtype is not None:
                arguments = torch.utils._pytree.tree_map(
                    lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == self.dtype else leaf,
                    arguments,
                )
            with torch.no_grad():
                result = module(**arguments, return_dict=False)
            results.append([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        return results

    def error(self, results: list[list[Tensor]]) -> float | None:
        """The largest relative error of a call; the median where a token that goes to another expert is a jump."""
        if self.reference is None:
            return None
        errors = [
            float((result.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))
            for call, reference in zip(results, self.reference, strict=True)
            for result, exact in zip(call, reference, strict=True)
        ]
        return statistics.median(errors) if self.name in WITH_EXPERTS else max(errors)


def check(model: Model, dtype: str, numerics: str) -> Case:
    """Runs one case."""
    case = Case(model.name, dtype, numerics)
    started = time.perf_counter()
    generator = _generator_state(model.device)
    try:
        case.problem = _run(model, case) or _unusable(model.device, generator) or ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).splitlines() or [""]
        case.problem = f"{type(error).__name__}: {lines[0][:160]} ({Path(place.filename).name}:{place.lineno})"
    case.seconds = time.perf_counter() - started
    return case


def _run(model: Model, case: Case) -> str | None:
    module = copy.deepcopy(model.module)
    fused = inject_optimized_kernels(module, numerics=case.numerics, config=UNTIMED, cuda_graph=False)
    results = model.outputs(module)
    case.fused = sum(count["fused"] > 0 for count in fused.calls().values())
    case.error, case.stock_error = model.error(results), model.error(model.stock)
    problem = _outside_contract(case, results, model.stock, case.error)
    graph = inject_optimized_kernels(module, numerics=case.numerics, config=UNTIMED, cuda_graph=True)
    replayed = model.outputs(module)
    if any(site.op == "cuda_graph" for site in graph.patched):
        count = next(iter(graph.calls().values()))
        case.captured, case.reasons = count["fused"], dict(count["stock_reasons"])
    else:
        case.reasons = {site.reason or "": 1 for site in graph.skipped if site.op == "cuda_graph"}
    # Other products may serve a graph than the first calls, so that nothing but the contract holds for both.
    reason = _outside_contract(case, replayed, model.stock, model.error(replayed))
    problem = problem or (reason and f"as a graph: {reason}")
    graph.restore()
    fused.restore()
    if not _equal(model.outputs(module), model.stock):
        problem = problem or "the restored model is not stock to the bit"
    return problem


def _outside_contract(
    case: Case, results: list[list[Tensor]], stock: list[list[Tensor]], error: float | None
) -> str | None:
    if case.numerics == "exact":
        return None if _equal(results, stock) else "exact is not stock to the bit"
    if not all(bool(leaf.isfinite().all()) for call in results for leaf in call):
        return "not finite"
    if error is None or case.stock_error is None:
        return None
    if case.numerics == "fp8":
        # Of a model whose stock error is that large, random weights leave nothing to compare.
        return f"the error in fp8 is {error:.2f}" if error > max(FP8_ERROR, RATIO * case.stock_error) else None
    if error > RATIO * case.stock_error + SLACK:
        return f"the error is {error / max(case.stock_error, 1e-30):.2f} times stock's"
    return None


def _equal(results: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    return all(
        len(call) == len(other) and all(map(torch.equal, call, other))
        for call, other in zip(results, others, strict=True)
    )


def _generator_state(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _unusable(device: torch.device, generator: Tensor | None) -> str | None:
    """What is wrong with the device after a case, or None."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return "the current stream is another one now"
    if torch.cuda.is_current_stream_capturing():
        return "a capture is going on"
    assert generator is not None
    torch.cuda.set_rng_state(generator, device)
    first = torch.randn(4, device=device)
    torch.cuda.set_rng_state(generator, device)
    if not torch.equal(first, torch.randn(4, device=device)):
        return "the generator of the GPU is not as it was"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Runs the cases that are asked for; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=DENOISERS, default=list(DENOISERS), metavar="MODEL")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp16"])
    parser.add_argument("--numerics", nargs="+", choices=("fast", "exact", "fp8"), default=["fast", "exact", "fp8"])
    parser.add_argument("--seconds", type=float, default=280.0, help="no case begins later than that")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    diffusers.utils.logging.set_verbosity_error()
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    started = time.perf_counter()
    cases, left = [], []
    # Half precision in the other dtype shows the same graphs: there only the default tier runs.
    wanted = [(dtype, tier) for dtype in options.dtypes for tier in options.numerics]
    if len(options.dtypes) > 1 and "fast" in options.numerics:
        wanted = [(dtype, tier) for dtype, tier in wanted if dtype == options.dtypes[0] or tier == "fast"]
    for dtype in options.dtypes:
        for name in options.models:
            tiers = [tier for other, tier in wanted if other == dtype]
            if time.perf_counter() - started > options.seconds:
                left.append(f"{name} {dtype}")
                continue
            try:
                model = Model(name, DENOISERS[name], device, DTYPES[dtype])
            except Exception as error:  # stock, that is
                print(f"{name:16} {dtype} is not run: stock raises {type(error).__name__}: {error}"[:200], flush=True)
                left.append(f"{name} {dtype}")
                continue
            for tier in tiers:
                cases.append(check(model, dtype, tier))
                print(cases[-1], flush=True)
    failed: list[Any] = [case for case in cases if case.problem]
    print(f"{len(cases)} cases, {len(failed)} failed, not run: {', '.join(left) or 'none'}")
    if options.json:
        results = {
            "torch": torch.__version__,
            "device": str(device),
            "not_run": left,
            "cases": list(map(asdict, cases)),
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
