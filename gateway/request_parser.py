"""Requests that ask for another protocol are parsed as if they had not.

`curl --http2` says ``Upgrade: h2c``, a browser's socket ``Upgrade: websocket``. The gateway speaks HTTP/1.1 only, and a
server may ignore that wish (RFC 9110, 7.8). llhttp stops at it, body unread, so the head is given to it once more
without.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools

_SAY_SO = frozenset({b"upgrade", b"http2-settings"})
"""The headers, and the words in ``Connection``, that ask for it."""


class Callbacks(Protocol):
    """The part of uvicorn's protocol that a parser calls, and where it keeps what it was told of a head."""

    url: bytes
    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Stands in for httptools' own. A head that is parsed twice begins twice, and is complete once."""

    def __init__(self, protocol: Callbacks) -> None:
        self._protocol = protocol
        self._parser: Any = None
        self.on_message_begin = protocol.on_message_begin
        self.on_url = protocol.on_url
        self.on_header = protocol.on_header
        self.on_body = protocol.on_body
        self._renew()

    def close(self) -> None:
        """The two hold each other: what nobody needs any more is freed at once, and not by the garbage collector."""
        self._parser = None

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                if self._parser.get_method() == b"CONNECT":
                    raise
                head = self._head_without_upgrade()
                self._renew()
                self._parser.feed_data(head)
                data = data[stop.args[0] :]
            else:
                return

    def on_headers_complete(self) -> None:
        if not self._stops_here:
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._stops_here:
            self._protocol.on_message_complete()

    def get_method(self) -> bytes:
        method: bytes = self._parser.get_method()
        return method

    def get_http_version(self) -> str:
        version: str = self._parser.get_http_version()
        return version

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        return False

    @property
    def _stops_here(self) -> bool:
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        # As uvicorn does: what follows a request with `Connection: close` is no error in that request.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), self._protocol.url, version)]
        for name, value in self._protocol.headers:
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                value = b", ".join(word for word in words if word.lower() not in _SAY_SO)
            if value and name not in _SAY_SO:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])
