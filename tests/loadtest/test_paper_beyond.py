"""Figures 12 and 16, faults, sweeps, other traces: their runs, their tables, and the plots."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from loadtest.paper.figures import FIGURES
from loadtest.paper.figures_beyond import FIGURES_BEYOND, SEEDS_BEYOND
from loadtest.paper.papers_points import papers_points
from loadtest.paper.plots import draw_all
from loadtest.paper.rows import Job, Row, run
from loadtest.paper.stalls import run as run_stalls
from loadtest.paper.tables_beyond import SECTIONS, describe_beyond
from loadtest.paper.variants import VARIANTS
from loadtest.paper.workloads import arrivals
from loadtest.workloads.workload import WorkloadError

SMALL = 20


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Some of each figure's runs, with few requests on two instances."""
    found = []
    for name, make in FIGURES_BEYOND.items():
        if name == "16":
            continue
        jobs = [job for job in make(1, True) if job.policy in ("infaas++", "kvferry-base", "kvferry")]
        kinds = {(job.policy, job.variant, job.report_interval_s): job for job in reversed(jobs)}
        found += [run(dataclasses.replace(job, requests=SMALL, instances=2)) for job in list(kinds.values())[:8]]
    measured = {"stall_mean_ms": 0.1, "stall_p99_ms": 0.2, "step_mean_ms": 40.0, "dispatch_p99_ms": 0.1}
    measured |= {"scheduler_threads": 1, "scheduler_busy_share": 0.5}
    found += [dataclasses.asdict(job) | measured for job in FIGURES_BEYOND["16"](1, True)]
    return found


def test_every_figure_has_a_table_and_every_run_a_name_of_its_own(rows: list[Row]) -> None:
    assert set(SECTIONS) == set(FIGURES_BEYOND) <= set(FIGURES)
    for name in FIGURES_BEYOND:
        jobs = FIGURES[name](6, False)
        assert len({job.key for job in jobs}) == len(jobs)
        assert max(job.seed for job in jobs) <= SEEDS_BEYOND.get(name, 3)
    text = "\n".join(describe_beyond(rows))
    assert text.count("### ") == len(SECTIONS)
    assert "| one crash |" in text
    assert "| 500 ms | kvferry |" in text
    assert "| 256 | 2,000 | central | 0.1 |" in text


def test_no_run_loses_a_request(rows: list[Row]) -> None:
    assert all(row["requests_finished"] == SMALL for row in rows if row["figure"] != "16")


def test_fragmentation_is_told_over_time(rows: list[Row]) -> None:
    for row in rows:
        if row["figure"] == "12":
            spans = row["fragmentation_by_10_s_share"]
            assert len(spans) == -(-(int(row["duration_s"]) + 1) // 10)
            assert all(0 <= share <= 1 for share in spans)


def test_a_variant_changes_one_thing() -> None:
    job = Job("headroom", "M-M", "", 15.0, 1.0, "kvferry", 1, requests=200, high_priority_share=0.3, instances=2)
    usual = run(job)
    assert usual == run(dataclasses.replace(job, variant="")) | {"variant": ""}
    for variant in ("one crash", "reports lost, 30 %", "target load 400 tokens", "threshold 160 steps"):
        assert variant in VARIANTS
        found = run(dataclasses.replace(job, variant=variant))
        assert found["requests_finished"] == 200
        assert found["request_mean_s"] != usual["request_mean_s"], variant


def test_three_classes_are_drawn_as_they_are_asked_for_and_leave_lengths_and_times_alone() -> None:
    three = arrivals("S-S", rate_rps=2, count=2000, seed=1, high_priority_share=0.15, highest_priority_share=0.05)
    none = arrivals("S-S", rate_rps=2, count=2000, seed=1)
    counts = Counter(one.priority for one in three)
    assert 230 < counts[1] < 370
    assert 60 < counts[2] < 140
    assert [dataclasses.replace(one, priority=0) for one in three] == none


def test_a_recorded_trace_keeps_its_pattern_at_the_rate_that_is_asked_for() -> None:
    slow, fast = (arrivals("azure2023_code", rate_rps=rate, count=900, seed=2) for rate in (2.0, 8.0))
    assert slow[-1].at_s == pytest.approx(4 * fast[-1].at_s) == pytest.approx(899 / 2)
    assert slow[500].at_s == pytest.approx(4 * fast[500].at_s)
    assert arrivals("azure2023_code", rate_rps=2.0, count=900, seed=1)[0].at_s == slow[0].at_s == 0.0
    with pytest.raises(WorkloadError, match="has 9 parts"):
        arrivals("azure2023_code", rate_rps=2.0, count=900, seed=10)


def test_lengths_without_times_are_drawn_from_the_recorded_ones_and_alike_ones_are_alike() -> None:
    drawn = arrivals("sharegpt_10k_lengths", rate_rps=5.0, count=100, seed=1)
    assert drawn == arrivals("sharegpt_10k_lengths", rate_rps=5.0, count=100, seed=1)
    assert len({one.prompt_tokens for one in drawn}) > 30
    alike = arrivals("alike", rate_rps=5.0, count=20, seed=1)
    assert {(one.prompt_tokens, one.output_tokens) for one in alike} == {(256, 256)}


@pytest.mark.parametrize("policy", ["central", "kvferry"])
def test_a_scheduler_is_measured_in_the_time_that_its_code_takes(policy: str) -> None:
    found = run_stalls(policy, 4, 30.0, 1, measured_s=0.5)
    assert found["steps_measured"] > 20
    assert 0 < found["stall_mean_ms"] < found["step_mean_ms"]
    assert 0 < found["scheduler_busy_share"] < 1


def test_a_central_scheduler_with_more_work_than_time_makes_every_step_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.paper.stalls.time.thread_time_ns", iter(range(0, 1 << 60, 20_000_000)).__next__)
    found = run_stalls("central", 8, 2.0, 1, measured_s=1.0)
    assert found["scheduler_busy_share"] > 0.9
    assert found["stall_mean_ms"] > 8 * 20 - found["step_mean_ms"] - 20


def test_the_papers_points_are_those_of_its_figures() -> None:
    points = papers_points()
    assert points["15", "", "llumnix", "prefill_p99_s"][0] == (10.44, 11.425)
    assert len({key[1] for key in points if key[0] == "11"}) == 7


def test_the_same_rows_give_the_same_plots(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before, after = draw_all(rows, tmp_path / "a"), draw_all(rows, tmp_path / "b")
    assert [path.name for path in before] == ["figure-12.svg", "figure-16.svg"]
    assert [path.read_bytes() for path in before] == [path.read_bytes() for path in after]
    assert "fragmented, % of all memory" in before[0].read_text()
