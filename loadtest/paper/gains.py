"""How many times better than INFaaS++: geometric means over traces, seed by seed, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadtest.paper.rows import Row

BASELINE = "infaas++"
FLOOR = 1e-3
"""What is less, or nothing at all, counts as this: a gain over nothing would have no bound."""
T_975 = (math.inf, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 %, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Gain:
    """``low`` and ``high``: 95 % confidence of the mean over seeds; ``None`` with one seed."""

    mean: float
    low: float | None
    high: float | None
    seeds: int
    by_trace: dict[str, float]


def gain(rows: Sequence[Row], load: str, policy: str, metric: str, baseline: str = BASELINE) -> Gain | None:
    """Of figure 11's rows at that load; only seeds for which both have every trace."""
    found = {
        (row["policy"], row["seed"], row["trace"]): row[metric]
        for row in rows
        if row["figure"] == "11" and row["load"] == load
    }
    traces = sorted({trace for _, _, trace in found})
    seeds = [
        seed
        for seed in sorted({seed for _, seed, _ in found})
        if all((one, seed, trace) in found for one in (policy, baseline) for trace in traces)
    ]
    if not seeds:
        return None

    def log_ratio(seed: int, trace: str) -> float:
        before, after = found[baseline, seed, trace], found[policy, seed, trace]
        return math.log(max(before or 0.0, FLOOR) / max(after or 0.0, FLOOR))

    means = [statistics.fmean(log_ratio(seed, trace) for trace in traces) for seed in seeds]
    low, high = interval(means)
    by_trace = {trace: math.exp(statistics.fmean(log_ratio(seed, trace) for seed in seeds)) for trace in traces}
    return Gain(
        math.exp(statistics.fmean(means)),
        math.exp(low) if low is not None else None,
        math.exp(high) if high is not None else None,
        len(seeds),
        by_trace,
    )


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    t = T_975[min(len(values) - 1, len(T_975) - 1)]
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return middle - half, middle + half


def mean_of(rows: Iterable[Row], metric: str, chosen: Callable[[Row], bool]) -> float | None:
    values = [row[metric] for row in rows if chosen(row) and row.get(metric) is not None]
    return statistics.fmean(values) if values else None
