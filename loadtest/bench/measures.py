"""The benchmark's arithmetic, without any I/O: pauses out of arrival times, quantiles, slopes, rows of the result."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.bench.colocated import ColocatedSample, worst_step_ratio

Arrivals = Sequence[tuple[float, int]]
"""(seconds, tokens so far) of each event that brought tokens."""

METHODS = ("live", "blocking", "recompute")
GAPS_AT_ONCE = 8
STEP_MS_MIN = 1.0
"""No step here is so short: what seems to be waited together, and arrived in one burst."""
CONFIDENCE = 0.95


class NotMeasured(RuntimeError):
    """A run went otherwise than it has to for its figures to mean anything."""


@dataclass(frozen=True, slots=True)
class MoveTiming:
    """One move as the client saw it. Gaps are between events, of which one usually brings one token."""

    move_gap_ms: float
    """The gap that contains the move."""
    usual_gap_ms: float
    """The usual one of the stream's other gaps (:func:`usual_gap`)."""
    pause_ms: float
    """What the move adds: ``move_gap_ms`` less ``usual_gap_ms``."""
    source_gap_ms: float
    destination_gap_ms: float
    """The usual gap after the move, so the destination's decode step as a client sees it."""


def time_move(arrivals: Arrivals, output_tokens: int) -> MoveTiming:
    """``output_tokens``: how many the source has sent. Raises NotMeasured if too little came from either side."""
    first = _first_after(arrivals, output_tokens)
    gaps_ms = gaps(arrivals)
    before_ms, after_ms = gaps_ms[: max(0, first - 1)], gaps_ms[first:]
    if min(len(before_ms), len(after_ms)) < GAPS_AT_ONCE:
        raise NotMeasured(f"{first} events before the move and {len(arrivals) - first} after it are too few")
    move_gap_ms = gaps_ms[first - 1]
    usual_gap_ms = statistics.median([*_means(before_ms), *_means(after_ms)])
    if usual_gap_ms < STEP_MS_MIN:
        raise NotMeasured("tokens came in bursts: the machine is too busy")
    return MoveTiming(
        move_gap_ms=move_gap_ms,
        usual_gap_ms=usual_gap_ms,
        pause_ms=move_gap_ms - usual_gap_ms,
        source_gap_ms=usual_gap(before_ms),
        destination_gap_ms=usual_gap(after_ms),
    )


def usual_gap(gaps_ms: Sequence[float]) -> float:
    """The median over means of eight neighbours.

    On few cores two tokens often arrive together, which a median of single gaps would take for half of a step or for
    twice one; and a mean of all would carry every stall.
    """
    return statistics.median(_means(gaps_ms))


def _means(gaps_ms: Sequence[float]) -> list[float]:
    return [statistics.fmean(gaps_ms[start : start + GAPS_AT_ONCE]) for start in range(len(gaps_ms) - GAPS_AT_ONCE + 1)]


def _first_after(arrivals: Arrivals, output_tokens: int) -> int:
    return next((index for index, (_, total) in enumerate(arrivals) if total > output_tokens), len(arrivals))


def last_before(arrivals: Arrivals, output_tokens: int) -> float:
    """When the last event of the source arrived, in seconds."""
    return arrivals[_first_after(arrivals, output_tokens) - 1][0]


def gaps(arrivals: Arrivals) -> list[float]:
    """Milliseconds between neighbours."""
    return [1000 * (after - before) for (before, _), (after, _) in itertools.pairwise(arrivals)]


def gaps_within(arrivals: Arrivals, begin_s: float, end_s: float) -> list[float]:
    """The gaps that lie in a window as a whole."""
    return gaps([arrival for arrival in arrivals if begin_s <= arrival[0] <= end_s])


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a figure over length, in its unit for 1,000 tokens, with the bounds of its 95 % confidence interval."""

    per_1000_tokens: float
    low: float
    high: float

    @property
    def is_zero(self) -> bool:
        """Whether it cannot be told from zero."""
        return self.low <= 0.0 <= self.high


def least_squares_slope(points: Points) -> Slope:
    """Over all repeats; the interval is Student's. Raises NotMeasured for fewer than two lengths or three points."""
    freedom = _check(points) - 2
    lengths, values = zip(*points, strict=True)
    fit = statistics.linear_regression(lengths, values)
    residuals = [value - fit.slope * length - fit.intercept for length, value in points]
    variation = sum((length - statistics.fmean(lengths)) ** 2 for length in lengths)
    error = math.sqrt(sum(residual**2 for residual in residuals) / freedom / variation)
    reach = _student(freedom) * error
    return Slope(1000 * fit.slope, 1000 * (fit.slope - reach), 1000 * (fit.slope + reach))


def rank_slope(points: Points) -> Slope:
    """The median of the slopes between any two points (Theil and Sen), which a few stalls of the machine do not move.

    The interval follows from the variance of Kendall's rank statistic, with repeats at one length as ties.
    """
    count = _check(points)
    slopes = sorted(
        (right[1] - left[1]) / (right[0] - left[0])
        for left, right in itertools.combinations(points, 2)
        if left[0] != right[0]
    )
    ties = Counter(length for length, _ in points).values()
    variance = (_kendall(count) - sum(_kendall(tied) for tied in ties)) / 18
    reach = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(variance)
    low = max(0, math.floor((len(slopes) - reach) / 2) - 1)
    high = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return Slope(1000 * statistics.median(slopes), 1000 * slopes[low], 1000 * slopes[high])


def _kendall(count: int) -> int:
    return count * (count - 1) * (2 * count + 5)


def _student(freedom: int) -> float:
    """The two-sided quantile of Student's distribution, by Cornish and Fisher: exact to 1 % from 5 degrees on."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _check(points: Points) -> int:
    if len({length for length, _ in points}) < 2 or len(points) < 3:
        raise NotMeasured("a slope needs two lengths and three points")
    return len(points)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured move."""

    length: int
    """The length that was aimed at; ``tokens`` is the true one at the move."""
    method: str
    tokens: int
    timing: MoveTiming
    result: dict[str, Any]
    """The gateway's answer: the MigrationResult, with the gateway's own ``pause_ms`` and ``token_gap_ms``."""
    computed_tokens: int
    """What the destination's first step had to compute: of a copied sequence, the tail that filled no block."""
    gaps_ms: list[float]
    """All gaps of the stream, in order; ``gaps_ms[move_index]`` is the one with the move."""
    move_index: int


def spread(values: Sequence[float]) -> dict[str, float]:
    """p10, p50, p90 and the largest."""
    figures = {f"p{share}": quantile(values, share / 100) for share in (10, 50, 90)}
    return {name: round(value, 3) for name, value in (*figures.items(), ("max", max(values)))}


def row(length: int, samples: Sequence[Sample], colocated: Sequence[ColocatedSample]) -> dict[str, Any]:
    """What one length comes to; ``None`` where something was not measured."""
    by_method = {method: [sample for sample in samples if sample.method == method] for method in METHODS}
    pauses_ms = {method: [sample.timing.pause_ms for sample in by_method[method]] for method in METHODS}
    live = by_method["live"]
    beside_ms = [(beside.pause_ms, beside.destination_gap_ms) for beside in colocated]
    beside_steps = [pause / step for pause, step in beside_ms if pause is not None and step is not None]
    return {
        "tokens": length,
        "repeats": {method: len(by_method[method]) for method in METHODS},
        "pause_ms_p50": _median(pauses_ms["live"]),
        "pause_ms_max": round(max(pauses_ms["live"]), 3) if live else None,
        "blocking_copy_ms_p50": _median(pauses_ms["blocking"]),
        "recompute_ms_p50": _median(pauses_ms["recompute"]),
        "decode_step_ms_p50": _median([sample.timing.destination_gap_ms for sample in live]),
        "pause_steps_p50": _median([sample.timing.pause_ms / sample.timing.destination_gap_ms for sample in live], 4),
        "computed_tokens_p50": _median([sample.computed_tokens for sample in live]),
        "final_ms_p50": _median([sample.result["final_ms"] for sample in live]),
        "first_step_ms_p50": _median([sample.timing.move_gap_ms - sample.result["final_ms"] for sample in live]),
        "duration_ms_p50": _median([sample.result["duration_ms"] for sample in live]),
        "stages": _median([sample.result["stages"] for sample in live]),
        "bytes": _median([sample.result["bytes_sent"] for sample in live]),
        "spread_ms": {method: spread(pauses_ms[method]) for method in METHODS if pauses_ms[method]},
        "beside_others": {
            "pause_ms_p50": _median([pause for pause, _ in beside_ms if pause is not None]),
            "pause_steps_p50": _median(beside_steps, 4),
            "repeats": len(beside_steps),
        },
        "colocated_step_ratio": worst_step_ratio(colocated),
    }


def _median(values: Sequence[float], digits: int = 3) -> float | None:
    return round(statistics.median(values), digits) if values else None
