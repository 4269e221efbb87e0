"""Workloads have the distributions that they say, and the same draws for everyone."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from loadtest.workloads.workload import DATA, TRACES, Arrival, WorkloadError, generate, read_trace


def quantiles(values: list[int]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(ordered[int(len(ordered) * share)] for share in (0.5, 0.8, 0.95, 0.99))


@pytest.mark.parametrize(
    ("trace", "prompt", "output"),
    [
        ("S-S", (128, 38, 113, 413, 1464), (128, 38, 113, 413, 1464)),
        ("M-M", (256, 32, 173, 1288, 4208), (256, 32, 173, 1288, 4208)),
        ("L-L", (512, 55, 582, 3113, 5166), (512, 55, 582, 3113, 5166)),
        ("ShareGPT", (306, 74, 348, 1484, 3388), (500, 487, 781, 988, 1234)),
        ("BurstGPT", (830, 582, 1427, 2345, 3549), (271, 243, 434, 669, 964)),
    ],
)
def test_lengths_have_the_mean_and_the_quantiles_of_the_papers_table_1(
    trace: str, prompt: tuple[int, ...], output: tuple[int, ...]
) -> None:
    drawn = [arrival for seed in range(4) for arrival in generate(trace, rate_rps=1, count=10_000, seed=seed)]
    for values, stated in (
        ([arrival.prompt_tokens for arrival in drawn], prompt),
        ([arrival.output_tokens for arrival in drawn], output),
    ):
        found = (statistics.fmean(values), *quantiles(values))
        assert found == pytest.approx(stated, rel=0.2), (trace, found)


@pytest.mark.parametrize("trace", ["S-S", "M-M", "L-L"])
def test_every_drawn_list_asks_for_as_many_tokens(trace: str) -> None:
    """Near the knee a few percent more or less are the difference between no queue and a hopeless one."""
    means = []
    for seed in range(8):
        drawn = generate(trace, rate_rps=1, count=2_000, seed=seed)
        means += [
            statistics.fmean(one.prompt_tokens for one in drawn),
            statistics.fmean(one.output_tokens for one in drawn),
        ]
    assert max(means) / min(means) < 1.04, means


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_gaps_have_the_rate_and_the_coefficient_of_variation(cv: float) -> None:
    arrivals = generate("S-S", rate_rps=5, count=40_000, seed=3, cv=cv)
    gaps = [second.at_s - first.at_s for first, second in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_the_rate_scales_the_gaps_and_nothing_else() -> None:
    slow = generate("M-M", rate_rps=1, count=500, seed=7, high_priority_share=0.1)
    fast = generate("M-M", rate_rps=4, count=500, seed=7, high_priority_share=0.1)
    for one, other in zip(slow, fast, strict=True):
        assert one.at_s == pytest.approx(other.at_s * 4)
        assert (one.prompt_tokens, one.output_tokens, one.priority) == (
            other.prompt_tokens,
            other.output_tokens,
            other.priority,
        )
    assert 20 < sum(arrival.priority for arrival in slow) < 90


def test_another_seed_gives_another_workload_and_the_same_seed_the_same() -> None:
    assert generate("L-L", rate_rps=2, count=50, seed=1) == generate("L-L", rate_rps=2, count=50, seed=1)
    assert generate("L-L", rate_rps=2, count=50, seed=1) != generate("L-L", rate_rps=2, count=50, seed=2)


def test_no_request_is_longer_than_an_instance_can_hold() -> None:
    for trace in TRACES:
        assert all(
            arrival.prompt_tokens + arrival.output_tokens < 12_800
            for arrival in generate(trace, rate_rps=1, count=2_000, seed=0)
        )


def test_recorded_traces_are_read_whole_and_can_be_played_faster() -> None:
    conversation = read_trace(DATA / "azure2023_conv.csv")
    assert len(conversation) == 19_366
    assert read_trace(DATA / "azure2023_conv.csv", speed=2, count=2)[1] == Arrival(4.314579 / 2, 396, 109)


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s,input_tokens\n0,1\n",
        "arrival_s,input_tokens,output_tokens\n0,1,x\n",
        "arrival_s,input_tokens,output_tokens\n5,1,1\n4,1,1\n",
        "arrival_s,input_tokens,output_tokens\n0,0,1\n",
        "arrival_s,input_tokens,output_tokens\nnan,1,1\n",
    ],
)
def test_a_trace_with_a_fault_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=r"trace\.csv, line [23]"):
        read_trace(path)


def test_what_cannot_be_generated_is_refused() -> None:
    for wrong in ({"trace": "X"}, {"rate_rps": 0}, {"cv": 0}, {"high_priority_share": 2}):
        with pytest.raises(WorkloadError):
            generate(**{"trace": "S-S", "rate_rps": 1, "count": 1, "seed": 0, **wrong})  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(Path("there-is-none.csv"))
