"""What a key may use, and the rule by which a request is let in or not: pure, with the time as an argument.

The same rule stands as a script in ``cluster/limits.py``, where Redis counts for all gateways together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60
"""A minute is counted in whole seconds. A second counts until it lies wholly in the past, so a limit is never exceeded
in any 60 s, and what was used comes back up to one second late."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Each ``None`` where there is no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def booked(self, tokens: int) -> int:
        """A request that asks for more tokens than a minute has takes the whole minute, and not for ever nothing."""
        return tokens if self.tokens_per_minute is None else min(tokens, self.tokens_per_minute)


@dataclass(frozen=True, slots=True)
class Granted:
    """``second``: under which the request's use is counted. What remains is ``None`` where there is no limit."""

    second: int
    requests_left: int | None
    tokens_left: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """``limit`` is a field of :class:`KeyLimits`."""

    limit: str
    retry_after_s: int


class Window:
    """Uses of the last minute, in buckets of a second: bounded, however many requests there are."""

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()
        self.total = 0

    def advance(self, second: int) -> None:
        while self._buckets and self._buckets[0][0] < second - WINDOW_S:
            self.total -= self._buckets.popleft()[1]

    def add(self, second: int, amount: int) -> None:
        """Into that second if it still counts. ``second`` is at most the one that the window was advanced to."""
        for bucket in reversed(self._buckets):
            if bucket[0] == second:
                bucket[1] += amount
                self.total += amount
                return
        if not self._buckets or second > self._buckets[-1][0]:
            self._buckets.append([second, amount])
            self.total += amount

    def wait_s(self, second: int, room: int) -> int:
        """Whole seconds until at most ``room`` of what is counted now still counts."""
        left, wait_s = self.total, 1
        for begun, amount in self._buckets:
            if left <= room:
                break
            left -= amount
            wait_s = begun + WINDOW_S + 1 - second
        return wait_s


@dataclass(slots=True)
class Ledger:
    """One key's use, as one gateway knows it."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    running: set[str] = field(default_factory=set)

    def judge(self, limits: KeyLimits, tokens: int, now_s: float) -> Granted | Refused:
        """All limits are looked at before anything is counted: who is refused for one uses nothing of another."""
        second = int(now_s)
        self.requests.advance(second)
        self.tokens.advance(second)
        if limits.concurrent_requests is not None and len(self.running) >= limits.concurrent_requests:
            return Refused("concurrent_requests", 1)
        if limits.requests_per_minute is not None and self.requests.total + 1 > limits.requests_per_minute:
            return Refused("requests_per_minute", self.requests.wait_s(second, limits.requests_per_minute - 1))
        if limits.tokens_per_minute is not None and self.tokens.total + tokens > limits.tokens_per_minute:
            return Refused("tokens_per_minute", self.tokens.wait_s(second, limits.tokens_per_minute - tokens))
        return Granted(
            second,
            _left(limits.requests_per_minute, self.requests.total + 1),
            _left(limits.tokens_per_minute, self.tokens.total + tokens),
        )

    def book(self, request_id: str, tokens: int, now_s: float) -> None:
        second = int(now_s)
        self.requests.advance(second)
        self.tokens.advance(second)
        self.requests.add(second, 1)
        self.tokens.add(second, tokens)
        self.running.add(request_id)

    def settle(self, request_id: str, booked_s: float, tokens_more: int, now_s: float) -> None:
        """The place is free again. What was used beyond the estimate counts; what was not comes back."""
        if request_id not in self.running:
            return
        self.running.discard(request_id)
        self.tokens.advance(int(now_s))
        if int(booked_s) >= int(now_s) - WINDOW_S:
            self.tokens.add(int(booked_s), tokens_more)
        elif tokens_more > 0:
            self.tokens.add(int(now_s), tokens_more)


def _left(limit: int | None, used: int) -> int | None:
    return None if limit is None else max(0, limit - used)
