"""What an injection costs the host: tiny models, whose tensors cost next to nothing, stock and injected, in pairs.

    python scripts/measure_host_cost.py                             # every tiny denoiser, a table
    python scripts/measure_host_cost.py flux sd3 --profile          # what the calls of two of them spend, by function
    python scripts/measure_host_cost.py --json benchmarks/host_cost_cpu.json

Runs on one thread of the CPU. A ratio is that of the fastest runs of both, of many that take turns: those that nothing
else on the machine slowed down; it is the median of several builds of the model.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from diffkern import inject_optimized_kernels
from diffkern.bench.steps import sharing_weights
from diffkern.verify import choices
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.model import Draw

#: Calls before the first pair: proofs, choices and their times.
_WARM_UP = 6
#: Calls of a run.
_CALLS = 5
#: How often a model is built: results lie elsewhere in memory each time, which makes small products up to 10 % slower.
_BUILDS = 5


def _seconds(model: nn.Module, arguments: dict[str, Any]) -> float:
    """Seconds of a call, of several in a row: so steps come, and the other model's code has left the caches."""
    began = time.perf_counter()
    for _ in range(_CALLS):
        model(**arguments)
    return (time.perf_counter() - began) / _CALLS


def measure(name: str, pairs: int, profile: bool) -> dict[str, Any]:
    """Times a model and its injected twin in turns, built several times; the figures of one row."""
    torch.manual_seed(0)
    built = [_measure_once(name, pairs, profile and number == 0) for number in range(_BUILDS)]
    return {"model": name, **{key: statistics.median(one[key] for one in built) for key in built[0]}}


def _measure_once(name: str, pairs: int, profile: bool) -> dict[str, float]:
    stock = DENOISERS[name].build()
    injected = sharing_weights(stock)  # where weights lie decides over more than what is measured
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = inject_optimized_kernels(injected)
        draw = Draw(torch.Generator().manual_seed(1), torch.device("cpu"), torch.float32)
        arguments = DENOISERS[name].inputs(draw, 8)
        with torch.no_grad():
            for _ in range(_WARM_UP):
                stock(**arguments), injected(**arguments)
            times = [(_seconds(stock, arguments), _seconds(injected, arguments)) for _ in range(pairs)]
            if profile:
                _print_profile(injected, arguments)
    before, after = zip(*times, strict=True)
    calls = report.calls().values()
    return {
        "stock_us": statistics.median(before) * 1e6,
        "injected_us": statistics.median(after) * 1e6,
        "ratio": min(after) / min(before),
        "fused": sum(counts["fused"] for counts in calls),
        "stock": sum(counts["stock"] for counts in calls),
    }


def _print_profile(model: nn.Module, arguments: dict[str, Any]) -> None:
    with cProfile.Profile() as profiler:
        for _ in range(20):
            model(**arguments)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Prints a row per model as it comes, and writes all of them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all if none is named")
    parser.add_argument("--pairs", type=int, default=20, help="runs of both in each build")
    parser.add_argument("--profile", action="store_true", help="what the injected calls spend, by function")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = sorted({*arguments.models} - {*DENOISERS})
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(DENOISERS)}")
    os.environ[choices.VARIABLE] = "0"  # each run times by itself
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':24} {'stock us':>9} {'injected':>9} {'ratio':>6} {'fused':>6} {'stock':>6}")
    for name in arguments.models or DENOISERS:
        row = measure(name, arguments.pairs, arguments.profile)
        rows.append(row)
        print(
            "{model:24} {stock_us:9.0f} {injected_us:9.0f} {ratio:6.2f} {fused:6} {stock:6}".format(**row), flush=True
        )
    ratios = [row["ratio"] for row in rows]
    good = sum(ratio <= 1.02 for ratio in ratios)
    print(f"median {statistics.median(ratios):.2f}; {good} of {len(ratios)} at most 1.02")
    if arguments.json:
        versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "python": sys.version.split()[0]}
        rounded = [
            {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ]
        arguments.json.write_text(json.dumps({"environment": versions, "models": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
