"""The time that a whole request may take, on however many instances; and the end of one, or of all, before that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.errors import GatewayError, RequestTimeout


@dataclass(slots=True, eq=False)
class _Running:
    request_id: str
    timeout: asyncio.Timeout
    why: GatewayError | None = None
    """It ends with this; ``None``: when its time is up."""


class Deadlines:
    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._running: set[_Running] = set()
        self._why_all: GatewayError | None = None

    @contextlib.asynccontextmanager
    async def bounded(self, request_id: str = "") -> AsyncIterator[None]:
        """Raises :class:`RequestTimeout`, or what :meth:`end` was given, in place of what it has interrupted."""
        if self._why_all is not None:
            raise self._why_all
        running = _Running(request_id, asyncio.timeout(self._total_s))
        self._running.add(running)
        try:
            async with running.timeout:
                yield
        except TimeoutError as error:
            if not running.timeout.expired():
                raise
            raise running.why or RequestTimeout(f"The request took more than {self._total_s:g} s.") from error
        finally:
            self._running.discard(running)

    def end(self, request_id: str, why: GatewayError) -> bool:
        """Whether there is such a request under way. It ends with ``why``."""
        return self._end([running for running in self._running if running.request_id == request_id], why) > 0

    def end_all(self, why: GatewayError) -> int:
        """Requests under way end with ``why``; so do those that come later. Returns how many were under way."""
        self._why_all = why
        return self._end(list(self._running), why)

    def _end(self, running: list[_Running], why: GatewayError) -> int:
        now = asyncio.get_running_loop().time()
        ended = [one for one in running if not one.timeout.expired()]
        for one in ended:
            one.why = one.why or why
            one.timeout.reschedule(now)
        return len(ended)
