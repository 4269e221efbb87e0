"""The benchmark's arithmetic: it must find the gap with the move, and not take chance for a slope."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.colocated import ColocatedSample, Windows, figures, worst_step_ratio
from loadtest.bench.measures import (
    NotMeasured,
    Points,
    Sample,
    Slope,
    gaps_within,
    last_before,
    least_squares_slope,
    quantile,
    rank_slope,
    row,
    time_move,
    usual_gap,
)
from loadtest.bench.migration import FULL, interleaved
from loadtest.bench.result import build_result, describe, write_result


def build_arrivals(gaps_ms: Sequence[float], tokens_an_event: int = 1) -> list[tuple[float, int]]:
    arrivals, now_s = [(10.0, tokens_an_event)], 10.0
    for number, gap_ms in enumerate(gaps_ms, 2):
        now_s += gap_ms / 1000
        arrivals.append((now_s, number * tokens_an_event))
    return arrivals


def build_sample(length: int, pause_ms: float, method: str = "live", step_ms: float = 10.0) -> Sample:
    arrivals = build_arrivals([step_ms] * 8 + [pause_ms + step_ms] + [step_ms] * 8)
    result = {"output_tokens": 9, "final_ms": 4.0, "duration_ms": 50.0, "stages": 2, "bytes_sent": 1024}
    return Sample(length, method, length + 3, time_move(arrivals, 9), result, 7, [], 8)


def test_the_pause_is_the_gap_with_the_move_less_the_usual_gap() -> None:
    arrivals = build_arrivals([8] * 8 + [30] + [12] * 10)
    timing = time_move(arrivals, 9)
    assert timing.move_gap_ms == pytest.approx(30)
    assert timing.usual_gap_ms == pytest.approx(12)
    assert timing.pause_ms == pytest.approx(18)
    assert [timing.source_gap_ms, timing.destination_gap_ms] == pytest.approx([8, 12])
    assert last_before(arrivals, 9) == pytest.approx(10.064)


def test_events_with_several_tokens_are_counted_by_token() -> None:
    arrivals = build_arrivals([10] * 9 + [50] + [10] * 9, tokens_an_event=3)
    assert time_move(arrivals, 30).move_gap_ms == pytest.approx(50)


@pytest.mark.parametrize("output_tokens", [0, 1, 8, 12, 20, 21])
def test_a_move_with_too_little_on_either_side_is_not_measured(output_tokens: int) -> None:
    arrivals = build_arrivals([10] * 19)
    with pytest.raises(NotMeasured):
        time_move(arrivals, output_tokens)


def test_neither_tokens_that_arrive_together_nor_a_stall_change_the_usual_gap() -> None:
    assert usual_gap([20, 0] * 10) == pytest.approx(10)
    assert usual_gap([10] * 20 + [700] + [10] * 20) == pytest.approx(10)


def test_a_stream_in_one_burst_is_not_measured() -> None:
    with pytest.raises(NotMeasured, match="bursts"):
        time_move(build_arrivals([0.1] * 30), 15)


def test_a_window_takes_only_whole_gaps() -> None:
    arrivals = build_arrivals([10, 20, 30, 40])
    assert gaps_within(arrivals, 10.005, 10.065) == pytest.approx([20, 30])


def test_quantiles_lie_between_the_nearest_ranks() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([5], 0.9) == 5
    assert quantile(list(range(11)), 0.1) == 1


FITS = [least_squares_slope, rank_slope]


@pytest.mark.parametrize("fit", FITS)
def test_an_interval_holds_the_true_slope_as_often_as_it_says(fit: Callable[[Points], Slope]) -> None:
    generator = random.Random(3)
    hits = 0
    for _ in range(300):
        slope = fit([(n, 0.002 * n + generator.gauss(20, 5)) for n in (256, 1024, 4096, 16384) for _ in range(5)])
        hits += slope.low <= 2.0 <= slope.high
    assert 0.92 < hits / 300 < 0.98


@pytest.mark.parametrize("fit", FITS)
def test_a_slope_is_told_from_zero_only_where_there_is_one(fit: Callable[[Points], Slope]) -> None:
    noise = [(n, 20.0 + repeat) for n in (256, 4096, 16384) for repeat in range(5)]
    assert fit(noise).is_zero
    assert not fit([(n, value + 0.001 * n) for n, value in noise]).is_zero


def test_a_stall_does_not_move_the_slope_by_ranks() -> None:
    stalled = [(n, 20.0 + repeat) for n in (256, 4096, 16384) for repeat in range(5)]
    stalled[-1] = (16384, 900.0)
    assert rank_slope(stalled).per_1000_tokens == pytest.approx(0, abs=1e-4)
    assert least_squares_slope(stalled).per_1000_tokens > 5


@pytest.mark.parametrize("fit", FITS)
def test_a_slope_over_one_length_is_not_measured(fit: Callable[[Points], Slope]) -> None:
    with pytest.raises(NotMeasured):
        fit([(256, 1.0), (256, 2.0), (256, 3.0)])


def build_colocated() -> ColocatedSample:
    source = Windows([10, 10, 10.5, 10.5], [11, 11, 90], [8, 8], [10])
    destination = Windows([5, 5], [], [], [])
    return ColocatedSample(8192, source, destination, bytes=1, window_ms=100, pause_ms=30, destination_gap_ms=10)


def test_the_step_ratio_is_that_of_the_medians_and_has_a_control() -> None:
    sample = build_colocated()
    assert figures([sample], "source") == {
        "step_ratio": pytest.approx(11 / 10.25, abs=1e-3),
        "control_ratio": 1.05,
        "mean_step_ratio": pytest.approx(112 / 3 / 10.25, abs=1e-3),
        "engine_step_ratio": 1.25,
        "step_ms_p50_without": 10.25,
        "step_ms_p50_with": 11,
    }
    assert figures([sample], "destination")["step_ratio"] is None
    assert worst_step_ratio([sample]) == figures([sample], "source")["step_ratio"]
    assert worst_step_ratio([]) is None


def test_a_row_has_what_was_promised() -> None:
    samples = [build_sample(256, pause_ms) for pause_ms in (5.0, 7.0, 100.0)] + [build_sample(256, 40.0, "blocking")]
    values = row(256, samples, [build_colocated()])
    assert values["tokens"] == 256
    assert [values["pause_ms_p50"], values["pause_ms_max"]] == pytest.approx([7, 100])
    assert values["blocking_copy_ms_p50"] == pytest.approx(40)
    assert values["recompute_ms_p50"] is None
    assert values["decode_step_ms_p50"] == pytest.approx(10)
    assert (values["stages"], values["bytes"]) == (2, 1024)
    assert values["colocated_step_ratio"] == pytest.approx(11 / 10.25, abs=1e-3)
    assert values["beside_others"] == {"pause_ms_p50": 30, "pause_steps_p50": 3, "repeats": 1}
    assert values["repeats"] == {"live": 3, "blocking": 1, "recompute": 0}


def build_document(live_ms: float, recompute_ms: float) -> dict[str, Any]:
    samples = [
        sample
        for length in (256, 16384)
        for sample in (
            *(build_sample(length, live_ms + repeat) for repeat in range(4)),
            build_sample(length, recompute_ms, "recompute"),
        )
    ]
    return build_result(samples, [], ["live at 256: too late"], {"command": "test"})


def verdicts(result: dict[str, Any]) -> list[bool | None]:
    return [bar["met"] for bar in result["bars"]]


def test_the_bars_are_judged_by_what_was_measured() -> None:
    assert verdicts(build_document(live_ms=12, recompute_ms=2000)) == [True, True, True, None, None]
    assert verdicts(build_document(live_ms=30, recompute_ms=1000)) == [False, True, False, None, None]


def test_the_result_is_json_and_fits_on_a_terminal(tmp_path: Path) -> None:
    result = build_document(live_ms=12, recompute_ms=2000)
    path = tmp_path / "results" / "migration.json"
    write_result(path, result)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert "16384" in describe(result)


def test_every_run_of_the_plan_is_made_and_no_length_comes_in_one_piece() -> None:
    runs = interleaved(FULL)
    for method in ("live", "blocking", "recompute"):
        counted = dict.fromkeys(getattr(FULL, method), 0)
        for planned in runs:
            if planned.method == method:
                counted[planned.length] += 1
        assert counted == getattr(FULL, method)
    first_round, last_round = runs[: len(runs) // 4], runs[-len(runs) // 4 :]
    assert {256, 16384} <= {planned.length for planned in first_round} & {planned.length for planned in last_round}
