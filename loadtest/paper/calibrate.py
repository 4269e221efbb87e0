"""Finds the loads T and M for this simulator: ``python -m loadtest.paper.calibrate``; takes some twenty minutes.

A rate that is heavy for one engine is light for another one, and where INFaaS++ has no queue nobody has anything to
gain. So a trace's load is the factor on the paper's highest rate at which INFaaS++'s P99 prefill, as a geometric mean
over the tuning seeds, is what the paper measured there (T), and a tenth of that (M, before the knee).

That mean jumps about, also downwards, by a factor of two between neighbouring rates: which few requests get stuck
behind a large one is chance. So factors a step apart are run until both lie between them, and a line is laid through
the logarithms of them all. What was run is kept, and not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from loadtest.paper.gains import BASELINE
from loadtest.paper.parameters import LOADS, PAPERS_P99_PREFILL_S, TOP_RATES_RPS, TUNING_SEEDS
from loadtest.paper.rows import Job, run
from loadtest.progress import Progress

RESULT = Path("docs/results/calibration.json")
SHARES: Mapping[str, float] = {"T": 1.0, "M": 0.1}
"""Of the paper's P99."""
STEP = 0.1
FACTOR_MAX = 3.0

Points = dict[float, float]
"""Factor -> P99 in seconds."""


def scan(wanted_s: Collection[float], points: Points, measure: Callable[[float], float], first: float) -> None:
    """Measure upwards from ``first`` until the highest is passed, and downwards until the lowest is."""
    factor = first
    while points.setdefault(factor, measure(factor)) < max(wanted_s):
        factor = round(factor + STEP, 3)
        if factor > FACTOR_MAX:
            raise ValueError(f"no factor up to {FACTOR_MAX} gives a P99 of {max(wanted_s)} s")
    factor = first
    while points.setdefault(factor, measure(factor)) > min(wanted_s):
        factor = round(factor - STEP, 3)
        if factor <= 0:
            raise ValueError(f"no factor gives a P99 of {min(wanted_s)} s")


def factor_for(wanted_s: float, points: Points) -> float:
    """By least squares."""
    slope, begin = statistics.linear_regression(list(points), [math.log(value) for value in points.values()])
    return (math.log(wanted_s) - begin) / slope


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.paper.calibrate", description=__doc__)
    parser.add_argument("--traces", default=",".join(TOP_RATES_RPS), help="comma-separated")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--loads", default=",".join(SHARES), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=len(TUNING_SEEDS), help="so many of the tuning seeds")
    flags = parser.parse_args()
    runs: dict[str, float] = json.loads(flags.output.read_text()) if flags.output.exists() else {}
    seeds = TUNING_SEEDS[: flags.seeds]
    stops_at = time.monotonic() + flags.stop_after_s
    with Progress().step("INFaaS++ on the tuning seeds") as step:
        for trace in flags.traces.split(","):

            def measure(factor: float, trace: str = trace) -> float:
                for seed in seeds:
                    name = f"{trace} {factor:.3f} {seed}"
                    if name not in runs:
                        if time.monotonic() >= stops_at:
                            raise TimeoutError
                        step.update(name)
                        row = run(Job("", trace, "", TOP_RATES_RPS[trace] * factor, 1.0, BASELINE, seed))
                        runs[name] = row["prefill_p99_s"]
                        flags.output.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")
                return statistics.geometric_mean(runs[f"{trace} {factor:.3f} {seed}"] for seed in seeds)

            points: Points = {}
            wanted = {load: SHARES[load] * PAPERS_P99_PREFILL_S[trace] for load in flags.loads.split(",")}
            try:
                scan(wanted.values(), points, measure, LOADS["policy.md"][trace])
            except TimeoutError:
                break
            found = {load: factor_for(value, points) for load, value in wanted.items()}
            print(f"{trace}: " + ", ".join(f"{load} {factor:.3f}" for load, factor in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
