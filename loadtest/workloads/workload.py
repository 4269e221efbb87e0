"""A workload: the same requests for every policy that is compared, and only the gaps between them scaled to a rate."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.workloads import lengths
from loadtest.workloads.lengths import Fixed, PowerLaw, Quantiles

DATA = Path(__file__).parent / "data"

Lengths = PowerLaw | Quantiles | Fixed


class WorkloadError(Exception):
    """What is wrong with a workload's name, figures or file, in a sentence for its user."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """``at_s`` is counted from the workload's start; ``priority`` is the class, 0 normal, higher is more protected."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths that are drawn."""

    prompt: Lengths
    output: Lengths


TRACES: Mapping[str, Trace] = {
    "ShareGPT": Trace(lengths.SHAREGPT_PROMPT, lengths.SHAREGPT_OUTPUT),
    "BurstGPT": Trace(lengths.BURSTGPT_PROMPT, lengths.BURSTGPT_OUTPUT),
    "S-S": Trace(lengths.SHORT, lengths.SHORT),
    "M-M": Trace(lengths.MEDIUM, lengths.MEDIUM),
    "L-L": Trace(lengths.LONG, lengths.LONG),
    "S-L": Trace(lengths.SHORT, lengths.LONG),
    "L-S": Trace(lengths.LONG, lengths.SHORT),
    "alike": Trace(lengths.ALIKE, lengths.ALIKE),
}
"""The seven of the paper's figure 11, and one in which no request differs from another."""


def generate(
    trace: str,
    *,
    rate_rps: float,
    count: int,
    seed: int,
    cv: float = 1.0,
    high_priority_share: float = 0.0,
    highest_priority_share: float = 0.0,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> list[Arrival]:
    """``count`` requests at ``rate_rps`` a second in the mean. ``cv`` is the coefficient of variation of the gaps
    (gamma: 1 is a Poisson process, more is burstier). The same seed gives the same lengths, classes and pattern of
    arrivals at any rate. ``lengths``: of prompt and output, from which is drawn instead of the trace's distributions.
    """
    if trace not in TRACES and lengths is None:
        raise WorkloadError(f"There is no trace {trace!r}; there are {', '.join(TRACES)}.")
    if rate_rps <= 0 or cv <= 0 or count < 0:
        raise WorkloadError("A rate and a CV must be positive, and a count not negative.")
    if min(high_priority_share, highest_priority_share) < 0 or high_priority_share + highest_priority_share > 1:
        raise WorkloadError("A share lies between 0 and 1.")
    # Apart, so that a change of one leaves the others as they were.
    parts = ("prompts", "outputs", "gaps", "classes")
    for_prompts, for_outputs, for_gaps, for_classes = (random.Random(f"{seed} {part}") for part in parts)
    if lengths is None:
        chosen = TRACES[trace]
        drawn = list(zip(chosen.prompt.draw(for_prompts, count), chosen.output.draw(for_outputs, count), strict=True))
    else:
        drawn = for_prompts.choices(lengths, k=count)
    arrivals, at_s = [], 0.0
    for prompt, output in drawn:
        at_s += for_gaps.gammavariate(1 / cv**2, cv**2) / rate_rps
        luck = for_classes.random()
        priority = 1 if luck < high_priority_share else 2 if luck < high_priority_share + highest_priority_share else 0
        arrivals.append(Arrival(at_s, prompt, output, priority))
    return arrivals


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Rows of ``input_tokens,output_tokens``."""
    with path.open(newline="") as file:
        return [(int(row["input_tokens"]), max(1, int(row["output_tokens"]))) for row in csv.DictReader(file)]


def read_trace(path: Path, *, speed: float = 1.0, count: int | None = None) -> list[Arrival]:
    """A recorded trace: rows of ``arrival_s,input_tokens,output_tokens`` in order; ``speed`` 2 halves its time."""
    if not (speed > 0 and math.isfinite(speed)):
        raise WorkloadError("A speed must be positive.")
    try:
        with path.open(newline="") as file:
            rows = list(_rows(file, path.name, speed, count))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    return rows


def _rows(lines: Sequence[str] | Iterator[str], name: str, speed: float, count: int | None) -> Iterator[Arrival]:
    last_s = 0.0
    for number, row in enumerate(csv.DictReader(lines), 2):
        if count is not None and number - 2 >= count:
            return
        try:
            at_s, wanted, generated = float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"])
        except (KeyError, TypeError, ValueError):
            raise WorkloadError(f"{name}, line {number}: arrival_s,input_tokens,output_tokens were expected.") from None
        if not math.isfinite(at_s) or at_s < last_s or wanted < 1 or generated < 1:
            raise WorkloadError(f"{name}, line {number}: arrivals must be in order and lengths positive.")
        last_s = at_s
        yield Arrival(at_s / speed, wanted, generated)
