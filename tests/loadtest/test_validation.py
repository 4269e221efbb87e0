"""The comparison of the simulator with real servers: its trace, its simulated side, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.sim.profile import Profile
from loadtest.validation import simulated
from loadtest.validation.comparison import RUNS, figures, mean_figures, table, verdicts, write_page
from loadtest.validation.workload import ENGINE, arrivals, rate_for

PROFILE = Profile("test", 5.0, 0.1, 0.0, 10.0, 0.5, 0.002, kv_bytes_per_token=2048, copy_bytes_per_s=2e6)


def test_the_trace_is_dense_enough_that_requests_wait_are_preempted_and_move() -> None:
    lengths = arrivals(1, 90, 1.0)
    trace = arrivals(1, 90, rate_for(PROFILE, lengths))
    assert [one.prompt_tokens for one in trace] == [one.prompt_tokens for one in lengths]
    assert max(one.prompt_tokens + one.output_tokens for one in trace) < ENGINE.sequence_tokens_max
    stayed, moved = (simulated.play(PROFILE, trace, moves) for moves in (False, True))
    assert stayed.failed == moved.failed == 0
    assert stayed.moves == 0
    assert moved.moves > 0
    assert stayed.preemptions > 0
    assert len(stayed.first_token_s) == 90
    assert len(stayed.gaps_s) == sum(one.output_tokens - 1 for one in trace)


def side(mean_ms: float, gap_ms: float, preemptions: float) -> dict[str, float]:
    return {
        "first_token_mean_ms": mean_ms,
        "first_token_p99_ms": 10 * mean_ms,
        "token_gap_mean_ms": gap_ms,
        "token_gap_p99_ms": 3 * gap_ms,
        "preemptions": preemptions,
        "migrations": 2,
        "failed": 0,
    }


def test_means_are_held_to_their_bar_and_differences_to_their_direction(tmp_path: Path) -> None:
    real = {RUNS[0]: side(100, 20, 9), RUNS[1]: side(80, 20.2, 4)}
    model = {RUNS[0]: side(110, 21, 6), RUNS[1]: side(120, 20.9, 3)}
    found = {one["what"]: one["is_met"] for one in verdicts(real, model)}
    assert found["first_token_mean_ms without migration"]
    assert not found["first_token_mean_ms with migration"]
    assert found["token_gap_mean_ms with migration"]
    assert not found["direction of first_token_mean_ms"]
    assert found["direction of preemptions"]
    assert found["direction of token_gap_mean_ms"]
    result: dict[str, Any] = {"real": real, "simulated": model, "verdicts": verdicts(real, model), "at": "now"}
    result |= {"workload": {"requests": 9, "rate_rps": 2.0, "repeats": 1}}
    result |= {"machine": {"cores": 2, "load_average_before": 0.5}}
    assert "| first token, mean | 100 ms | 110 ms | +10% | 80 ms | 120 ms | +50% |" in table(result)
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- validate-sim: begin -->\nold\n<!-- validate-sim: end -->\nAfter.\n")
    write_page(page, result)
    write_page(page, result)
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert "old" not in text
    assert text.count("| preemptions | 9 | 6 |") == 1


def test_figures_are_in_milliseconds_and_runs_are_averaged() -> None:
    seen = simulated.play(PROFILE, arrivals(2, 5, 1.0), False)
    found = figures(seen)
    assert found["first_token_mean_ms"] == pytest.approx(1000 * sum(seen.first_token_s) / 5, abs=0.001)
    assert mean_figures([side(1, 2, 3), side(3, 4, 5)]) == side(2, 3, 4)
