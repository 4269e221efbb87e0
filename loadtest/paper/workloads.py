"""What arrives in a run: the paper's generated traces, recorded ones, and one in which all requests are alike."""

from __future__ import annotations

from loadtest.workloads.workload import DATA, Arrival, WorkloadError, generate, read_lengths, read_trace

RECORDED = ("azure2023_conv", "azure2023_code")
"""With their own times, scaled to the rate that is asked for; the seed says which part of them."""
LENGTHS_ONLY = "sharegpt_10k_lengths"
"""With generated times."""


def arrivals(
    trace: str,
    *,
    rate_rps: float,
    count: int,
    seed: int,
    cv: float = 1.0,
    high_priority_share: float = 0.0,
    highest_priority_share: float = 0.0,
) -> list[Arrival]:
    if trace in RECORDED:
        return _recorded(trace, rate_rps, count, seed)
    lengths = read_lengths(DATA / f"{LENGTHS_ONLY}.csv") if trace == LENGTHS_ONLY else None
    return generate(
        trace,
        rate_rps=rate_rps,
        count=count,
        seed=seed,
        cv=cv,
        high_priority_share=high_priority_share,
        highest_priority_share=highest_priority_share,
        lengths=lengths,
    )


def _recorded(trace: str, rate_rps: float, count: int, seed: int) -> list[Arrival]:
    """Part ``seed`` of the trace, from its first request on."""
    everything = read_trace(DATA / f"{trace}.csv")
    parts = max(1, len(everything) // count)
    if seed > parts:
        raise WorkloadError(f"{trace} has {parts} parts of {count:,} requests.")
    part = everything[(seed - 1) * count : seed * count]
    begins_s, ends_s = part[0].at_s, part[-1].at_s
    speed = rate_rps * (ends_s - begins_s) / max(1, len(part) - 1)
    return [Arrival((one.at_s - begins_s) / speed, one.prompt_tokens, one.output_tokens) for one in part]
