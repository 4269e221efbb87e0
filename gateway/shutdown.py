"""How a gateway ends: first its ``/health``, then its door, then its streams.

SIGTERM: ``/health`` is 503 at once, and whoever balances in front of the gateways takes this one out. It goes on
accepting for ``accept_s``, since that takes a moment. Then the door is closed, and what is under way runs on. What has
not ended ``grace_s`` after the signal gets an error event instead of a cut. The lease and the records in Redis are
given up last. A second signal ends everything at once; leases and records then lapse by themselves.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import uvicorn

from gateway.telemetry import log

LAST_WORDS_S = 5
"""For the error events to reach their clients, after the grace."""


@dataclass(frozen=True, slots=True)
class ShutdownSettings:
    accept_s: float = 3.0
    """After SIGTERM. SIGINT, from a terminal, closes the door at once."""
    grace_s: float = 30.0

    @property
    def ends_s(self) -> float:
        """When the last words to clients are said, after SIGTERM."""
        return max(self.accept_s, self.grace_s) + LAST_WORDS_S


class Closing(Protocol):
    """What the gateway has to do with it."""

    def begin_closing(self) -> None: ...
    def refuse_new(self) -> None: ...
    def end_requests(self) -> int: ...


class GracefulServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, gateway: Closing, settings: ShutdownSettings) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = int(settings.grace_s) + 1 + LAST_WORDS_S
        self._gateway = gateway
        self._settings = settings
        self._closes_at: float | None = None
        self._ends_at = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In a signal handler: flags only. The process's exit status is 0 after the first signal."""
        if self._closes_at is not None:
            self._captured_signals.append(sig)
            self.should_exit = self.force_exit = True
            return
        now = time.monotonic()
        self._ends_at = now + self._settings.grace_s
        self._closes_at = now + (self._settings.accept_s if sig == signal.SIGTERM else 0.0)
        self._gateway.begin_closing()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's, ten times a second."""
        if self._closes_at is not None and time.monotonic() >= self._closes_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The door is closed; the connections that are idle too. Requests that are under way are waited for."""
        self._gateway.refuse_new()
        log("closing", grace_s=self._settings.grace_s)
        loop = asyncio.get_running_loop()
        ending = loop.call_later(max(0.0, self._ends_at - time.monotonic()), self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def _end_requests(self) -> None:
        log("grace_over", requests_ended=self._gateway.end_requests())
