"""A request's wait for Redis: bounded, and not waited again while Redis is away or slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from gateway.cluster.store import Store

LOOKS = 5
"""In which a wait for Redis is cut. A look that this process was itself late for says nothing about Redis, and does not
count: a busy or halted machine would else make every gateway go on alone."""
LATE = 1.5
LOOKS_MAX = 25


async def answered_within(
    answer: asyncio.Future[Any], budget_s: float, goes_on: Callable[[], bool] = lambda: True
) -> bool:
    """Whether it comes within the budget, and while ``goes_on``."""
    look_s, counted = budget_s / LOOKS, 0
    for _ in range(LOOKS_MAX):
        begun_at = time.monotonic()
        await asyncio.wait({answer}, timeout=look_s)
        counted += time.monotonic() - begun_at < LATE * look_s
        if answer.done() or not goes_on() or counted == LOOKS:
            break
    return answer.done() and not answer.cancelled()


class Breaker:
    """Open from the first answer of ``store`` that does not come within the budget, until one does again.

    The gateway's loops ask Redis about once a second, so that no request has to try it out.
    """

    def __init__(self, store: Store, budget_s: float, is_away: Callable[[], bool]) -> None:
        """``is_away``: whether somebody else has found out already."""
        self._store = store
        self._is_away = is_away
        self._budget_s = budget_s
        self._opened_at: float | None = None

    @property
    def is_open(self) -> bool:
        if self._opened_at is not None and self._store.quick_at(self._budget_s) > self._opened_at:
            self._opened_at = None
        return self._opened_at is not None or self._is_away()

    async def answered(self, answer: asyncio.Future[Any]) -> bool:
        """Whether it comes in time; not waited for while it is open."""
        if self.is_open:
            return answer.done()
        in_time = await answered_within(answer, self._budget_s)
        if not in_time or answer.exception() is not None:
            self._opened_at = time.monotonic()
        return in_time
