"""The client's side of a request: ASGI messages out, each at most once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Generator, Iterable, MutableMapping
from typing import Any

from gateway import wire
from gateway.errors import GatewayError, WholeReply
from gateway.openai.dialects import Dialect, error_body, error_event
from gateway.openai.meter import Meter
from gateway.serving.visit import Visit

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STREAM_HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))


class Reply:
    """Nothing is said before ``start``, ``start_stream``, ``whole`` or ``fail`` is called; ``ended`` is final.

    ``client_id``: what the client calls its request. It is told that back, where it said something.
    """

    def __init__(
        self, send: Send, request_id: str | None = None, client_id: str = "", visit: Visit | None = None
    ) -> None:
        self._send = send
        self._request_id = request_id
        self._client_id = client_id
        self.dialect = Dialect.OPENAI
        self.sequence_number = 0
        """Of the next event, where events are numbered."""
        self.started = False
        self.ended = False
        self.broken = False
        """It began well, and ended in an error or not at all."""
        self.status = 0
        self.visit = visit or Visit()
        self.more_headers: list[tuple[str, str]] = []
        """The gateway's own, to be said with the reply whatever it is."""
        self.before_end: Callable[[], Awaitable[None]] | None = None
        """Called once, before the client can know that it has the whole reply."""
        self.meter = Meter()
        self._unfinished: asyncio.Future[None] | None = None

    async def start_stream(self, headers: Iterable[tuple[str, str]]) -> None:
        """Does nothing the second time: a stream that moves has been started already."""
        if not self.started:
            own = {name for name, _ in STREAM_HEADERS}
            kept = [(name, value) for name, value in headers if name.lower() not in own]
            await self.start(200, [*kept, *STREAM_HEADERS])

    async def write(self, data: bytes) -> None:
        await self._settle()
        await self._send(_body(data))

    @property
    def can_write(self) -> bool:
        """Whether ``write_at_once`` may be called."""
        return self.started and (self._unfinished is None or self._unfinished.done())

    def write_at_once(self, data: bytes) -> None:
        """The same without a task to wait in.

        The server's ``send`` waits only while a client is slow. Then a task of its own waits with it, and until that
        is done nothing more can be written in this way.
        """
        sending = self._send(_body(data)).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        self._unfinished = asyncio.ensure_future(_finish(_Rest(waits_for, sending)))

    async def _settle(self) -> None:
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            await unfinished

    async def ending(self) -> None:
        before_end, self.before_end = self.before_end, None
        if before_end is not None:
            await before_end()

    async def end(self) -> None:
        await self._settle()
        await self.ending()
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, reply: WholeReply) -> None:
        if self.before_end is not None:
            self.meter.whole(reply.status, reply.body)
        await self.ending()
        await self.start(reply.status, [*reply.headers, ("content-length", str(len(reply.body)))])
        self.ended = True
        await self._send({"type": "http.response.body", "body": reply.body, "more_body": False})

    async def json(self, status: int, value: Any, headers: Iterable[tuple[str, str]] = ()) -> None:
        # ASCII: half a surrogate pair, quoted from a client's request, has no UTF-8.
        body = json.dumps(value).encode()
        await self.whole(WholeReply(status, (("content-type", "application/json"), *headers), body))

    async def fail(self, error: GatewayError) -> None:
        """A status while nothing has been said; later one event, after which the stream ends, without a [DONE]."""
        if not self.started:
            await self.json(error.status, error_body(self.dialect, error), error.headers.items())
        elif not self.ended:
            self.broken = True
            await self.ending()
            await self.write(error_event(self.dialect, error, self.sequence_number))
            await self.end()

    def abandon(self) -> None:
        """Nothing more is said: the server then cuts the connection, so that what was sent is not taken for whole."""
        self.ended = self.broken = True

    async def start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        assert not self.started
        # The way back from connection.py's decoding: an instance's header may hold bytes that are no text.
        said = (*headers, *self.more_headers)
        lines = [(name.lower().encode(), value.encode("utf-8", "surrogateescape")) for name, value in said]
        if status in (204, 304):
            lines = [line for line in lines if line[0] != b"content-length"]  # RFC 9110, 8.6.
        if self._request_id is not None:
            lines.append((wire.REQUEST_ID_HEADER.encode(), (self._client_id or self._request_id).encode()))
            lines.append((wire.OWN_REQUEST_ID_HEADER.encode(), self._request_id.encode()))
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": lines})


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _finish(rest: _Rest) -> None:
    await rest


class _Rest:
    """What is left of an awaitable that has been begun without a task: it waits for ``waits_for``, and then goes on."""

    def __init__(self, waits_for: Any, rest: Generator[Any, Any, None]) -> None:
        self._waits_for = waits_for
        self._rest = rest

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waits_for
        yield from self._rest
