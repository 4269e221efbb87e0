"""What the last minute was like, from counts that only ever grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.counters import FAMILIES, Counters, Distribution

LASTS_S = 60.0
SAMPLE_S = 1.0
RATE_S = 3.0
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
DISTRIBUTIONS = {"ttft_ms": "time_to_first_event_seconds", "gap_ms": "event_gap_seconds"}


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    tokens: int
    counts: dict[str, list[int]]


class Window:
    """Begins anew whenever somebody begins to look: nothing is kept for nobody."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._samples: deque[Sample] = deque(maxlen=round(LASTS_S / SAMPLE_S) + 1)

    def begin(self) -> None:
        self._samples.clear()

    def look(self, tokens: int, now: float) -> dict[str, Any]:
        """``tokens``: all that were ever sent."""
        counts = {key: _total(self._counters.distributions(name).values(), name) for key, name in DISTRIBUTIONS.items()}
        sample = Sample(now, tokens, counts)
        if not self._samples or now - self._samples[-1].at >= SAMPLE_S:
            self._samples.append(sample)
        while now - self._samples[0].at > LASTS_S:
            self._samples.popleft()
        first = self._samples[0]
        shown: dict[str, Any] = {"lasts_s": round(now - first.at), "tokens_per_s": self._rate(sample)}
        for key, name in DISTRIBUTIONS.items():
            gained = [max(0, new - old) for new, old in zip(counts[key], first.counts[key], strict=True)]
            shown[key] = {"count": sum(gained)} | {
                word: _ms(quantile(FAMILIES[name].bounds, gained, share)) for word, share in SHARES.items()
            }
        return shown

    def _rate(self, sample: Sample) -> float | None:
        before = next((one for one in reversed(self._samples) if sample.at - one.at >= RATE_S), self._samples[0])
        if sample.at - before.at < SAMPLE_S:
            return None
        return round(max(0, sample.tokens - before.tokens) / (sample.at - before.at), 1)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Within a bucket as if its values lay evenly; beyond the last bound, that bound. ``None``: there are no values."""
    total = sum(counts)
    if not total:
        return None
    rank, seen = share * total, 0
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= rank:
            return lower + (bound - lower) * (rank - seen) / count
        seen += count
        lower = bound
    return lower


def _total(series: Iterable[Distribution], name: str) -> list[int]:
    """Of all models."""
    total = [0] * (len(FAMILIES[name].bounds) + 1)
    for one in series:
        total = [sum(pair) for pair in zip(total, one.counts, strict=True)]
    return total


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
