"""What a load test has seen, stream by stream, and the figures of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.bench.measures import quantile

STREAMS_MAX = 500_000
"""Those after are counted, and not kept: memory is bounded."""
GAP_STEP = 1.02
"""Gaps are counted in classes that are so much longer each: every quantile is right to 1 %."""
GAP_MIN_S = 1e-5
SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))


@dataclass(frozen=True, slots=True)
class Stream:
    """Times are counted from the beginning of the test. ``late_s``: after its time had come it was sent."""

    asked_at: float
    priority: int
    prompt_tokens: int
    output_tokens: int
    late_s: float
    ended_at: float
    ttft_s: float | None
    gap_max_s: float | None
    wrong: str | None

    @property
    def seconds(self) -> float:
        return self.ended_at - self.asked_at


@dataclass(slots=True)
class Journal:
    streams: list[Stream] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)
    """By class."""
    tokens: int = 0
    not_kept: int = 0
    unfinished: int = 0
    """Under way when the test's patience ended: neither whole nor broken."""
    failures: Counter[str] = field(default_factory=Counter)
    ended: int = 0

    def add(self, stream: Stream, gaps_s: Sequence[float], tokens: int) -> None:
        self.ended += 1
        self.tokens += tokens
        if stream.wrong is not None:
            self.failures[stream.wrong] += 1
        for gap_s in gaps_s:
            self.gaps[_gap_class(gap_s)] += 1
        if len(self.streams) < STREAMS_MAX:
            self.streams.append(stream)
        else:
            self.not_kept += 1

    def gap_points(self) -> list[tuple[float, float]]:
        """(seconds, share of gaps that are no longer), rising."""
        total, below, points = self.gaps.total(), 0, []
        for number in sorted(self.gaps):
            below += self.gaps[number]
            points.append((GAP_MIN_S * GAP_STEP**number, below / total))
        return points

    def figures(self) -> dict[str, Any]:
        whole = [stream for stream in self.streams if stream.wrong is None]
        seconds = max((stream.ended_at for stream in self.streams), default=0.0)
        classes = sorted({stream.priority for stream in self.streams}, reverse=True)
        return {
            "streams": self.ended,
            "broken": self.failures.total(),
            "failures": dict(self.failures.most_common()),
            "unfinished": self.unfinished,
            "not_kept": self.not_kept,
            "seconds": round(seconds, 3),
            "sent_per_s": _rate([stream.asked_at for stream in self.streams]),
            "tokens_per_s": round(self.tokens / seconds, 2) if seconds else None,
            "ttft_ms": _shares([stream.ttft_s for stream in whole if stream.ttft_s is not None]),
            "token_gap_ms": self._gap_shares(),
            "longest_gap_ms": _shares([stream.gap_max_s for stream in whole if stream.gap_max_s is not None]),
            "last_byte_ms": _shares([stream.seconds for stream in whole]),
            "sent_late_ms": _shares([stream.late_s for stream in self.streams]),
            "ttft_ms_by_priority": {
                str(priority): _shares(
                    [one.ttft_s for one in whole if one.priority == priority and one.ttft_s is not None]
                )
                for priority in classes
            },
        }

    def _gap_shares(self) -> dict[str, float] | None:
        points = self.gap_points()
        if not points:
            return None
        return {name: round(next(s for s, below in points if below >= share) * 1000, 3) for name, share in SHARES}


def _gap_class(gap_s: float) -> int:
    return math.ceil(math.log(max(gap_s, GAP_MIN_S) / GAP_MIN_S) / math.log(GAP_STEP))


def _shares(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {name: round(quantile(seconds, share) * 1000, 3) for name, share in SHARES}


def _rate(times: Sequence[float]) -> float | None:
    between = max(times) - min(times) if times else 0.0
    return round((len(times) - 1) / between, 2) if between else None
