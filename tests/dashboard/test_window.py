"""Percentiles and rates of the last minute."""

from __future__ import annotations

import pytest

from gateway.counters import Counters
from gateway.dashboard.window import LASTS_S, Window, quantile

BOUNDS = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0], 0.5, 0.5),
        ([0, 0, 10, 0], 0.5, 3.0),
        ([5, 5, 0, 0], 0.5, 1.0),
        ([0, 0, 0, 3], 0.99, 4.0),  # Beyond the last bound nothing more is known.
        ([90, 0, 10, 0], 0.95, 3.0),
    ],
)
def test_a_quantile_lies_within_its_bucket(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile(BOUNDS, counts, share) == expected


def test_only_what_came_since_somebody_looks_counts_and_only_the_last_minute() -> None:
    counters = Counters()
    gaps = counters.distribution("event_gap_seconds", model="m")
    gaps.observe(5.0, 1_000)
    window = Window(counters)
    window.begin()
    shown = window.look(tokens=1_000_000, now=0.0)
    assert (shown["tokens_per_s"], shown["gap_ms"]["count"]) == (None, 0)
    gaps.observe(0.04, 100)
    shown = window.look(tokens=1_000_500, now=5.0)
    assert shown["tokens_per_s"] == 100
    assert (shown["gap_ms"]["count"], 30 <= shown["gap_ms"]["p50"] <= 50) == (100, True)
    for second in range(6, 6 + int(2 * LASTS_S)):
        shown = window.look(tokens=1_000_500, now=float(second))
    assert (shown["tokens_per_s"], shown["gap_ms"]["count"], shown["lasts_s"]) == (0, 0, LASTS_S)


def test_a_model_that_is_no_more_counts_nothing_back() -> None:
    counters = Counters()
    counters.distribution("event_gap_seconds", model="m").observe(0.01, 50)
    window = Window(counters)
    window.look(tokens=50, now=0.0)
    counters.keep("model", lambda model: False)
    shown = window.look(tokens=0, now=4.0)
    assert (shown["tokens_per_s"], shown["gap_ms"]["count"]) == (0, 0)
