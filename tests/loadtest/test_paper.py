"""The paper's experiments: which runs, what a gain is, and what the page says."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from gateway.cli.command import main
from loadtest.paper.calibrate import factor_for, scan
from loadtest.paper.evaluation import describe, write_page
from loadtest.paper.figures import FIGURES, QUICK_FIGURES
from loadtest.paper.gains import gain, interval
from loadtest.paper.rows import Job, Row, key_of, read_rows, run, run_all, write_rows

SMALL = Job("11", "S-S", "T", 60.0, 1.0, "kvferry", 7, requests=60)


def rows(gains: dict[tuple[int, str], float]) -> list[Row]:
    """Of seeds and traces: how many times better than INFaaS++ ours is."""
    found = []
    for (seed, trace), better in gains.items():
        for policy, value in (("infaas++", 8.0), ("kvferry", 8.0 / better)):
            job = dataclasses.asdict(dataclasses.replace(SMALL, trace=trace, policy=policy, seed=seed))
            found.append(job | {"prefill_p99_s": value})
    return found


def test_a_gain_is_the_geometric_mean_over_traces_and_seeds() -> None:
    found = gain(rows({(1, "S-S"): 2, (1, "L-S"): 8, (2, "S-S"): 4, (2, "L-S"): 16}), "T", "kvferry", "prefill_p99_s")
    assert found is not None
    assert found.mean == pytest.approx(math.sqrt(32))
    assert found.by_trace == pytest.approx({"S-S": math.sqrt(8), "L-S": math.sqrt(128)})
    assert found.seeds == 2
    assert found.low is not None
    assert found.high is not None
    assert found.low < 4 < 8 < found.high


def test_a_seed_counts_only_when_all_its_traces_are_there() -> None:
    some = rows({(1, "S-S"): 2, (1, "L-S"): 2, (2, "S-S"): 50})
    found = gain(some, "T", "kvferry", "prefill_p99_s")
    assert found is not None
    assert (found.seeds, found.low) == (1, None)
    assert found.mean == pytest.approx(2)
    assert gain(some, "M", "kvferry", "prefill_p99_s") is None


def test_a_confidence_interval_is_students() -> None:
    assert interval([1.0]) == (None, None)
    assert interval([0.0, 2.0]) == pytest.approx((1 - 12.71, 1 + 12.71))


def test_a_load_is_where_the_baselines_p99_would_be_the_papers() -> None:
    """The measured curve jumps about; what it is measured at lies around both loads."""
    points: dict[float, float] = {}
    jumps = iter([1.2, 0.8] * 20)
    scan((50.0, 5.0), points, lambda factor: math.exp(10 * (factor - 1)) * next(jumps), first=1.2)
    assert min(points.values()) <= 5 < 50 <= max(points.values())
    for wanted_s in (50.0, 5.0):
        assert factor_for(wanted_s, points) == pytest.approx(1 + math.log(wanted_s) / 10, abs=0.05)


def test_each_figure_has_its_runs_and_the_quick_ones_are_few() -> None:
    counts = {name: len(make(6, False)) for name, make in FIGURES.items()}
    assert counts["11T"] == 6 * 7 * 4 + 2 * 7
    for make in FIGURES.values():
        jobs = make(6, False)
        assert len({job.key for job in jobs}) == len(jobs)
    assert sum(len(FIGURES[name](1, True)) for name in QUICK_FIGURES) <= 40


def test_a_run_is_a_row_that_is_found_again_and_gives_the_same_once_more(tmp_path: Path) -> None:
    jobs = [SMALL, dataclasses.replace(SMALL, policy="infaas++", high_priority_share=0.5)]
    found: list[Row] = []
    run_all(jobs, 1, found.append)
    assert found[0] == run(SMALL)
    assert found[0]["requests_finished"] == 60
    assert "high_request_mean_s" in found[1]
    path = tmp_path / "results" / "paper.json"
    write_rows(path, found, {"at": "now"})
    again = read_rows(path)
    assert {key_of(row) for row in again} == {job.key for job in jobs}
    assert read_rows(tmp_path / "none.json") == []
    page = tmp_path / "evaluation.md"
    page.write_text("Before.\n<!-- tables: begin -->\nold tables\n<!-- tables: end -->\nAfter.\n")
    write_page(page, again, path)
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("\nAfter.\n")
    assert "old tables" not in text


def test_the_tables_say_what_was_asked_for_and_whether_it_was_met() -> None:
    names = dict.fromkeys(run(dataclasses.replace(SMALL, requests=5)), 1.0)
    some = [names | row for row in rows({(1, "S-S"): 9, (1, "L-S"): 1.1})]
    text = describe(some)
    assert "kvferry at T: P99 prefill | 7 | 3.15 | not met" in text
    assert "| 1.10 (L-S) | not met |" in text
    assert describe([]) == "No rows yet."


def test_the_command_simulates_a_file_and_prints_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"{index / 10},{20 + index},{10 + index}" for index in range(30)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n")
    arguments = ["simulate", "--trace", str(trace), "--instances", "2", "--policy", "late-binding"]
    assert main([*arguments, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["requests_finished"] == 30
    assert figures["policy"] == "late-binding"
    assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    assert "first token, s" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["requests_finished"] == 30
    assert main(["simulate", "--trace", "no-such", "--requests", "3"]) == 2
    assert "There is no trace" in capsys.readouterr().err
    assert main([*arguments, "--sequence-tokens", "20"]) == 2
