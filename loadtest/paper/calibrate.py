"""Finds the loads T and M for this simulator: ``python -m loadtest.paper.calibrate``; takes about half an hour.

A rate that is heavy for one engine is light for another one, and where INFaaS++ has no queue nobody has anything to
gain. So a trace's load is the factor on the paper's highest rate at which INFaaS++'s P99 prefill, as a geometric mean
over the tuning seeds, is what the paper measured there (T), and a tenth of that (M, before the knee). Between two
factors that were run the logarithm is taken to be linear. What was run is kept, and not run again.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from loadtest.paper.gains import BASELINE
from loadtest.paper.parameters import LOADS, PAPERS_P99_PREFILL_S, TOP_RATES_RPS, TUNING_SEEDS
from loadtest.paper.rows import Job, run
from loadtest.progress import Progress

RESULT = Path("docs/results/calibration.json")
SHARES: Mapping[str, float] = {"T": 1.0, "M": 0.1}
"""Of the paper's P99."""
STEP = 0.06
"""Between two factors while none is known on the other side of what is looked for; later half of that."""
RUNS_MAX = 16
"""Factors for one load: it is not found beyond."""

Points = dict[float, float]
"""Factor -> P99 in seconds."""


def find(wanted_s: float, points: Points, measure: Callable[[float], float], first: float) -> float:
    """The factor at which the P99 is ``wanted_s``. ``points`` gets what is measured for it."""
    if not points:
        points[first] = measure(first)
    for _ in range(RUNS_MAX):
        factors = sorted(points)
        above = bisect.bisect(factors, 0.0, key=lambda factor: points[factor] - wanted_s)
        if above == 0:
            next_factor = factors[0] - STEP
        elif above == len(factors):
            next_factor = factors[-1] + STEP
        elif factors[above] - factors[above - 1] > STEP / 2 + 1e-6:
            next_factor = (factors[above - 1] + factors[above]) / 2
        else:
            low, high = factors[above - 1], factors[above]
            share = math.log(wanted_s / points[low]) / math.log(points[high] / points[low])
            return low + share * (high - low)
        next_factor = round(next_factor, 3)
        points[next_factor] = measure(next_factor)
    raise ValueError(f"no factor gives a P99 of {wanted_s} s; tried {sorted(points)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.paper.calibrate", description=__doc__)
    parser.add_argument("--traces", default=",".join(TOP_RATES_RPS), help="comma-separated")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no run after so long")
    flags = parser.parse_args()
    runs: dict[str, float] = json.loads(flags.output.read_text()) if flags.output.exists() else {}
    stops_at = time.monotonic() + flags.stop_after_s
    with Progress().step("INFaaS++ on the tuning seeds") as step:
        for trace in flags.traces.split(","):

            def measure(factor: float, trace: str = trace) -> float:
                for seed in TUNING_SEEDS:
                    name = f"{trace} {factor:.3f} {seed}"
                    if name not in runs:
                        if time.monotonic() >= stops_at:
                            raise TimeoutError
                        step.update(name)
                        row = run(Job("", trace, "", TOP_RATES_RPS[trace] * factor, 1.0, BASELINE, seed))
                        runs[name] = row["prefill_p99_s"]
                        flags.output.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")
                return statistics.geometric_mean(runs[f"{trace} {factor:.3f} {seed}"] for seed in TUNING_SEEDS)

            points: Points = {}
            try:
                found = {
                    load: find(share * PAPERS_P99_PREFILL_S[trace], points, measure, LOADS["policy.md"][trace])
                    for load, share in SHARES.items()
                }
            except TimeoutError:
                break
            print(f"{trace}: " + ", ".join(f"{load} {factor:.3f}" for load, factor in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
