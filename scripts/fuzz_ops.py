"""Calls every public op with random operands and compares with float64: `python scripts/fuzz_ops.py --seconds 60`.

Each case has a seed of its own, which a failure names: `--op rms_norm --seed 123 --cases 1` runs it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz.cases import GENERATORS
from tests.fuzz.check import Mismatch, run_case


def main() -> int:
    """Runs cases until time or number is up; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40), help="of the first case")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to stop")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="after how many cases to stop")
    parser.add_argument("--device", default="cpu", help="where the operands are: cpu or cuda")
    parser.add_argument("--op", action="append", choices=GENERATORS, help="only this op (may be given several times)")
    parser.add_argument("--budget", type=int, default=20_000, help="the most elements of an operand")
    parser.add_argument("--failures", type=int, default=1, help="after how many failures to stop")
    given = parser.parse_args()
    names = given.op or sorted(GENERATORS)
    print(f"seed {given.seed}", flush=True)
    stop, failures, done = time.monotonic() + given.seconds, 0, 0
    while done < given.cases and time.monotonic() < stop and failures < given.failures:
        seed = given.seed + done
        try:
            run_case(seed, names[seed % len(names)], given.device, given.budget)
        except Mismatch as error:
            failures += 1
            print(error, flush=True)
        done += 1
    print(f"{done} cases, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
