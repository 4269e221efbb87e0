"""Destinations to which KV blocks could not be copied lately. Requests move there without their blocks meanwhile.

The two may be of one KV format and reach each other's routes, and yet not each other's KV agents: a firewall, or an
address that is good on its own machine only. Without this every move between them would fail, and a drain never end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

FAILURES_MAX = 2
"""In a row. One may be a peer that was just restarted."""
RESTS_S = 60.0
"""After that the next move copies again: whether it can be done is found out by doing it."""
KEPT_MAX = 256


@dataclass(slots=True)
class _Failures:
    count: int = 0
    until: float = 0.0


class Uncopied:
    """Of one source, by destination id."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}

    def copies(self, destination_id: str) -> bool:
        failures = self._failures.get(destination_id)
        return failures is None or failures.count < FAILURES_MAX or time.monotonic() >= failures.until

    def copied(self, destination_id: str) -> None:
        self._failures.pop(destination_id, None)

    def failed(self, destination_id: str) -> bool:
        """Whether that was one too many, so that nothing is copied there for a while."""
        failures = self._failures.setdefault(destination_id, _Failures())
        failures.count += 1
        failures.until = time.monotonic() + RESTS_S
        if len(self._failures) > KEPT_MAX:
            del self._failures[next(iter(self._failures))]
        return failures.count >= FAILURES_MAX
