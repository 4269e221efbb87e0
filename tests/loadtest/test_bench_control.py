"""The arithmetic of `make bench-control`, and that its instances say what the gateway reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway import wire
from loadtest.bench.control_result import bars, bucket_quantiles_ms, describe, quantiles_ms, row
from loadtest.bench.reporters import ReportingInstance


def figures(**changed: Any) -> dict[str, Any]:
    same = {"p50": 0.2, "p99": 0.4, "max": 9.0}
    names = ("decision_ms", "loop_lag_ms", "age_ms", "leader_work_ms", "leader_tick_ms")
    return {"decisions_per_s": 2000.0, "cpu_cores": 0.5, **dict.fromkeys(names, same), **changed}


def test_quantiles_are_in_milliseconds_and_of_nothing_there_are_none() -> None:
    assert quantiles_ms([0.001 * number for number in range(101)]) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    assert quantiles_ms([]) == {"p50": None, "p99": None, "max": None}


@pytest.mark.parametrize(
    ("counts", "p50", "p99"),
    [
        ([0, 0, 0, 0], None, None),
        ([10, 0, 0, 0], 0.5, 0.99),
        ([0, 10, 0, 0], 1.5, 1.99),
        ([50, 0, 50, 0], 1.0, 3.96),
        ([0, 0, 0, 10], 4.0, 4.0),
    ],
)
def test_quantiles_of_buckets_lie_within_the_bucket(counts: list[int], p50: float | None, p99: float | None) -> None:
    assert bucket_quantiles_ms((0.001, 0.002, 0.004), counts) == {"p50": p50, "p99": p99}


def test_a_row_has_the_age_at_the_worse_gateway() -> None:
    made = row(256, 2000.0, figures(), figures(age_ms={"p50": 1.0, "p99": 250.0}))
    assert (made["reports_per_s"], made["snapshot_age_ms_p99"]) == (2560, 250.0)
    assert made["decision_ms_p99"] == made["leader_tick_ms_p99"] == 0.4


def test_bars_are_held_against_the_largest_cluster_and_a_gateway_that_falls_behind_misses_one() -> None:
    slow = figures(decision_ms={"p50": 3.0, "p99": 5.0})
    small, large = row(16, 2000.0, slow, figures()), row(256, 500.0, figures(decisions_per_s=400.0), figures())
    assert [bar["met"] for bar in bars([small, large])] == [True, True, True, False]
    assert [bar["met"] for bar in bars([large, row(256, 2000.0, slow, figures())])] == [False, True, True, False]
    assert bars([row(256, 2000.0, figures(leader_work_ms={"p50": None, "p99": None}), figures())])[1]["met"] is None
    assert all(bar["met"] is None for bar in bars([]))


def test_the_table_shows_what_was_not_measured_as_a_dash() -> None:
    made = row(16, 500.0, figures(leader_work_ms={"p50": None, "p99": None}), figures())
    assert " - " in describe({"rows": [made], "bars": bars([made])})


def test_an_instance_of_the_benchmark_reports_as_a_llumlet_does_and_never_the_same_twice() -> None:
    instance = ReportingInstance(0)
    first, second = (wire.Report.from_json(json.loads(json.dumps(instance.report()))) for _ in range(2))
    assert second.sequence > first.sequence
    assert first.freeness_steps is not None
    assert 0 < first.freeness_steps < 160, "one in twenty is overloaded"
