"""Requests without an end, at a rate: for a load test, which stops when its time is up and not after so many."""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.workloads.workload import DATA, TRACES, Arrival, WorkloadError, generate, read_trace

CHUNK = 1_000
"""Requests that are drawn at a time."""
RECORDED = ("azure2023_conv", "azure2023_code")
"""Real requests with their times."""
LENGTHS = ("sharegpt_10k_lengths",)
"""Real lengths, without times."""
NAMES = (*TRACES, *RECORDED, *LENGTHS)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a workload is made to fit a machine and a model."""

    length_scale: float = 1.0
    tokens_max: int | None = None
    """Prompt and output together: what is longer gets a shorter prompt, and then a shorter output."""

    def apply(self, arrival: Arrival) -> Arrival:
        prompt = max(1, round(arrival.prompt_tokens * self.length_scale))
        output = max(1, round(arrival.output_tokens * self.length_scale))
        if self.tokens_max is not None:
            prompt = max(1, min(prompt, self.tokens_max - output))
            output = max(1, min(output, self.tokens_max - prompt))
        return replace(arrival, prompt_tokens=prompt, output_tokens=output)


def supply(
    name: str, *, rate_rps: float, seed: int, cv: float = 1.0, high_priority_share: float = 0.0
) -> Iterator[Arrival]:
    """One of ``NAMES``, or a CSV file as ``read_trace`` takes. Recorded times are stretched to the rate, keep their
    pattern, and begin again where they end. Raises WorkloadError before the first request."""
    if name in TRACES:
        return _generated(name, rate_rps, seed, cv, high_priority_share)
    if rate_rps <= 0 or not 0 <= high_priority_share <= 1:
        raise WorkloadError("A rate must be positive, and a share lie between 0 and 1.")
    if name in LENGTHS:
        return _with_times(_read_lengths(DATA / f"{name}.csv"), rate_rps, seed, cv, high_priority_share)
    if name in RECORDED or Path(name).suffix == ".csv":
        rows = read_trace(DATA / f"{name}.csv" if name in RECORDED else Path(name))
        return _recorded(rows, name, rate_rps, seed, high_priority_share)
    raise WorkloadError(f"There is no workload {name!r}; there are {', '.join(NAMES)}, and CSV files.")


def _generated(name: str, rate_rps: float, seed: int, cv: float, share: float) -> Iterator[Arrival]:
    def chunks() -> Iterator[Arrival]:
        begins_s = 0.0
        for number in itertools.count():
            last_s = 0.0
            for one in chunk(number):
                last_s = one.at_s
                yield replace(one, at_s=begins_s + one.at_s)
            begins_s += last_s

    def chunk(number: int) -> list[Arrival]:
        # A seed of its own each: the same figures under another name would repeat the first ones.
        of_chunk = random.Random(f"{seed} {number}").randrange(1 << 32)
        return generate(name, rate_rps=rate_rps, count=CHUNK, seed=of_chunk, cv=cv, high_priority_share=share)

    chunk(0)  # Raises what is wrong now.
    return chunks()


def _recorded(rows: Sequence[Arrival], name: str, rate_rps: float, seed: int, share: float) -> Iterator[Arrival]:
    if len(rows) < 2 or rows[-1].at_s <= rows[0].at_s:
        raise WorkloadError(f"{name} has no pattern of arrivals: fewer than two requests, or all at once.")
    first_s, mean_gap_s = rows[0].at_s, (rows[-1].at_s - rows[0].at_s) / (len(rows) - 1)
    speed = mean_gap_s * rate_rps
    chance = random.Random(f"{seed} classes")

    def rounds() -> Iterator[Arrival]:
        for number in itertools.count():
            begins_s = number * len(rows) / rate_rps
            for row in rows:
                priority = int(chance.random() < share)
                yield replace(row, at_s=begins_s + (row.at_s - first_s) / speed, priority=priority)

    return rounds()


def _with_times(
    lengths: Sequence[tuple[int, int]], rate_rps: float, seed: int, cv: float, share: float
) -> Iterator[Arrival]:
    if cv <= 0:
        raise WorkloadError("A CV must be positive.")
    gaps, classes = random.Random(f"{seed} gaps"), random.Random(f"{seed} classes")

    def rounds() -> Iterator[Arrival]:
        at_s = 0.0
        for prompt, output in itertools.cycle(lengths):
            at_s += gaps.gammavariate(1 / cv**2, cv**2) / rate_rps
            yield Arrival(at_s, prompt, output, int(classes.random() < share))

    return rounds()


def _read_lengths(path: Path) -> list[tuple[int, int]]:
    with path.open(newline="") as file:
        return [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
