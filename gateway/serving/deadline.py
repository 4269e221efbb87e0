"""The time that a whole request may take, on however many instances; and the end of all of them at a shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.errors import GatewayError, RequestTimeout


class Deadlines:
    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._running: set[asyncio.Timeout] = set()
        self._why_all: GatewayError | None = None

    @contextlib.asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Raises :class:`RequestTimeout`, or what :meth:`end_all` was given, in place of what it has interrupted."""
        if self._why_all is not None:
            raise self._why_all
        timeout = asyncio.timeout(self._total_s)
        self._running.add(timeout)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise self._why_all or RequestTimeout(f"The request took more than {self._total_s:g} s.") from error
        finally:
            self._running.discard(timeout)

    def end_all(self, why: GatewayError) -> int:
        """Requests under way end with ``why``; so do those that come later. Returns how many were under way."""
        self._why_all = why
        now = asyncio.get_running_loop().time()
        ended = [timeout for timeout in self._running if not timeout.expired()]
        for timeout in ended:
            timeout.reschedule(now)
        return len(ended)
