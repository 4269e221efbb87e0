"""The client's side of a request: ASGI messages out, each at most once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from gateway import wire
from gateway.errors import GatewayError, WholeReply
from gateway.openai import sse

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STREAM_HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))


class Reply:
    """Nothing is said before ``start_stream``, ``whole`` or ``fail`` is called; ``ended`` is final."""

    def __init__(self, send: Send, request_id: str | None = None) -> None:
        self._send = send
        self._request_id = request_id
        self.started = False
        self.ended = False

    async def start_stream(self, headers: Iterable[tuple[str, str]]) -> None:
        """Does nothing the second time: a stream that moves has been started already."""
        if not self.started:
            own = {name for name, _ in STREAM_HEADERS}
            kept = [(name, value) for name, value in headers if name.lower() not in own]
            await self._start(200, [*kept, *STREAM_HEADERS])

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, reply: WholeReply) -> None:
        await self._start(reply.status, [*reply.headers, ("content-length", str(len(reply.body)))])
        self.ended = True
        await self._send({"type": "http.response.body", "body": reply.body, "more_body": False})

    async def json(self, status: int, value: Any, headers: Iterable[tuple[str, str]] = ()) -> None:
        # ASCII: half a surrogate pair, quoted from a client's request, has no UTF-8.
        body = json.dumps(value).encode()
        await self.whole(WholeReply(status, (("content-type", "application/json"), *headers), body))

    async def fail(self, error: GatewayError) -> None:
        """A status while nothing has been said; later one event, after which the stream ends, without a [DONE]."""
        if not self.started:
            await self.json(error.status, error.to_json(), error.headers.items())
        elif not self.ended:
            await self.write(sse.encode(json.dumps(error.to_json()).encode()))
            await self.end()

    async def _start(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        assert not self.started
        # The way back from connection.py's decoding: an instance's header may hold bytes that are no text.
        lines = [(name.lower().encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers]
        if self._request_id is not None:
            lines.append((wire.REQUEST_ID_HEADER.encode(), self._request_id.encode()))
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": lines})
