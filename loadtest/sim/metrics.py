"""What a run comes to: percentiles of what its users felt, and how much was moved for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loadtest.sim.node import Record

LARGEST_SHARE = 0.05
MOVED_OFTEN = 3


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank; ``values`` in order, not empty."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def spread(name: str, unit: str, values: Sequence[float]) -> dict[str, float | None]:
    """``name_mean_unit`` and so on; ``None`` where there is nothing to measure."""
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}
    found: dict[str, float | None] = {f"{name}_mean_{unit}": mean(ordered)}
    for word, share in shares.items():
        found[f"{name}_{word}_{unit}"] = percentile(ordered, share) if ordered else None
    return found


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Of finished requests. ``prefill``: from arrival to the first token. ``decode``: per token after the first.

    ``largest_prefill``: of those whose prompts are the largest 5 %, which a percentile of all would hide when they
    starve.
    """
    done = [one for one in records if one.finished_at is not None]
    prefill = [_prefill_s(one) for one in done]
    by_prompt = sorted(done, key=lambda one: (-one.request.prompt_tokens, one.request.request_id))
    largest = by_prompt[: max(1, round(len(by_prompt) * LARGEST_SHARE))] if by_prompt else []
    losses = [one.preemption_loss_s for one in done]
    moves = sum(one.moves for one in done)
    return {
        "requests": len(records),
        "requests_finished": len(done),
        "requests_lost": sum(one.lost for one in records),
        **spread("prefill", "s", prefill),
        "largest_prefill_mean_s": mean([_prefill_s(one) for one in largest]),
        **spread("decode", "s_per_token", [_decode_s(one) for one in done if one.request.output_tokens > 1]),
        **spread("request", "s", [one.finished_at - one.request.arrived_at for one in done if one.finished_at]),
        "preemption_loss_mean_s": mean(losses),
        "preempted_share": mean([float(one.request.preemptions > 0) for one in done]),
        "moves_per_request": moves / len(done) if done else None,
        "moved_over_3_share": mean([float(one.moves > MOVED_OFTEN) for one in done]),
        "moves_undone_share": sum(one.undone for one in done) / moves if moves else 0.0,
        "downtime_mean_s": mean([one.downtime_s / one.moves for one in done if one.moves]),
    }


CLASS_WORDS = {0: "normal", 1: "high", 2: "highest"}


def by_class(records: Sequence[Record]) -> dict[str, Any]:
    """The most telling figures, a class each."""
    found: dict[str, Any] = {}
    for priority in sorted({one.priority for one in records}):
        figures = summary([one for one in records if one.priority == priority])
        word = CLASS_WORDS.get(priority, f"class{priority}")
        for name in _OF_A_CLASS:
            found[f"{word}_{name}"] = figures[name]
    return found


_OF_A_CLASS = (
    "request_mean_s",
    "request_p99_s",
    "prefill_mean_s",
    "prefill_p99_s",
    "decode_mean_s_per_token",
    "decode_p99_s_per_token",
)


def _prefill_s(record: Record) -> float:
    assert record.first_token_at is not None
    return record.first_token_at - record.request.arrived_at


def _decode_s(record: Record) -> float:
    assert record.first_token_at is not None
    assert record.finished_at is not None
    return (record.finished_at - record.first_token_at) / (record.request.output_tokens - 1)
