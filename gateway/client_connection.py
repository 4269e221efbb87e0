"""A client's connection: uvicorn's own, and let go when the client has stopped reading, or does not say what it wants.

uvicorn bounds neither the size of a request's head nor the time that it may take; it stops at requests that ask for
another protocol; and it sends chunks to clients of HTTP/1.0, which know none.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.counters import Counters
from gateway.request_parser import RequestParser
from gateway.telemetry import log

HEAD_BYTES_MAX = 64 * 1024
"""Of the headers, trailers included; and of what is read before they are complete."""
_HEAD_TOO_LARGE = (
    b'{"error": {"message": "The headers are too large.", "type": "invalid_request_error", "param": null, "code": 431}}'
)


class HeadTooLarge(ValueError):
    """Raised within the parser, which then stops."""


def client_connection(stuck_s: float, head_s: float, counters: Counters) -> type[HttpToolsProtocol]:
    """The class for ``uvicorn.Config(http=...)``.

    While a client does not read, nothing more is read from its instance either, so what is held for it stays small;
    but its request keeps its place in an instance's batch. After ``stuck_s`` in which it has not taken a byte, its
    connection is cut, and the request is cancelled like that of any client who has gone. ``head_s``: from the beginning
    of the connection, or of a later request on it, to the end of the head.
    """

    class ClientConnection(HttpToolsProtocol):
        parser: RequestParser  # type: ignore[assignment]
        _waiting: asyncio.TimerHandle | None = None
        _head_due: asyncio.TimerHandle | None = None
        _head_bytes = _read_bytes = 0
        _in_head = True

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.parser = RequestParser(self)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head_due = self.loop.call_later(head_s, self._head_is_late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._in_head:
                self._read_bytes += len(data)
                if self._read_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                    self._refuse_head()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes, self._read_bytes = True, 0, 0
            if self._head_due is None:
                self._head_due = self.loop.call_later(head_s, self._head_is_late)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > HEAD_BYTES_MAX:
                raise HeadTooLarge
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_head_timer()
            super().on_headers_complete()
            if self.scope.get("http_version") == "1.0":
                _end_with_the_connection(self.cycle)

        def send_400_response(self, msg: str) -> None:
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse_head()
            else:
                super().send_400_response(msg)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            self._stop_waiting()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stop_head_timer()
            self.parser.close()
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

        def _refuse_head(self) -> None:
            if self._answers:  # The head of a later request: no answer may come between the pieces of this one's.
                self.transport.close()
                return
            length = str(len(_HEAD_TOO_LARGE)).encode()
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            self.transport.write(
                head + b"connection: close\r\ncontent-length: " + length + b"\r\n\r\n" + _HEAD_TOO_LARGE
            )
            self.transport.close()

        @property
        def _answers(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _head_is_late(self) -> None:
            self._head_due = None
            if self._answers:
                self._head_due = self.loop.call_later(head_s, self._head_is_late)
            else:
                self.transport.close()

        def _stop_head_timer(self) -> None:
            if self._head_due is not None:
                self._head_due.cancel()
                self._head_due = None

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return ClientConnection


def _end_with_the_connection(cycle: RequestResponseCycle) -> None:
    """A reply of unknown length to HTTP/1.0 ends with its connection, which uvicorn closes after each of those."""
    send, unframed = cycle.send, False

    async def send_unframed(message: Any) -> None:
        nonlocal unframed
        if message["type"] == "http.response.start":
            unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unframed:
                cycle.chunked_encoding = False
        elif unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.waiting_for_100_continue = False  # It knows no interim replies either.
    cycle.send = send_unframed  # type: ignore[method-assign]
