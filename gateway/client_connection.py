"""A client's connection: uvicorn's own, and let go when the client has stopped reading."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.counters import Counters
from gateway.telemetry import log


def client_connection(stuck_s: float, counters: Counters) -> type[HttpToolsProtocol]:
    """The class for ``uvicorn.Config(http=...)``.

    While a client does not read, nothing more is read from its instance either, so what is held for it stays small;
    but its request keeps its place in an instance's batch. After ``stuck_s`` in which it has not taken a byte, its
    connection is cut, and the request is cancelled like that of any client who has gone.
    """

    class ClientConnection(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            self._stop_waiting()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self, unread: int) -> None:
            self._stop_waiting()
            self._waiting = self.loop.call_later(stuck_s, self._look, unread)

        def _look(self, unread_before: int) -> None:
            unread = self.transport.get_write_buffer_size()
            if unread < unread_before:
                self._wait(unread)
                return
            counters.add("clients_stuck")
            log("client_stuck", unread_bytes=unread)
            transport: Any = self.transport
            transport.abort()

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return ClientConnection
