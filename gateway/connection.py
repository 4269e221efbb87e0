"""A lean HTTP/1.1 client for replies that stream: llhttp on the loop's own transports, and nothing else on the way.

A general client spends more on an event than all else here together (ARCHITECTURE.md has the figures). This one sends
a body that it has whole, and hands on the reply's bytes as they come: no redirects, no cookies, no proxies, no
compression, no second try. What has arrived is read before the end of the connection is told.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict, CIMultiDictProxy

BUFFERED_BYTES_MAX = 128 * 1024
"""Of a reply that is read slower than it comes. Above it the socket is not read, and so the instance waits."""
UNFRAMED_BYTES_MAX = 64 * 1024
"""Of a head, of trailers, or of anything else in which no body comes."""
STATUS_MAX = 599
PIECE_BYTES = 256 * 1024
"""Of a large body between two turns of the loop, so that it does not hold up everyone else's stream."""


Sink = Callable[[bytes], bool]
"""Takes what has come at once, within the callback of the loop; or takes nothing, and answers False."""


class ConnectFailed(OSError):
    """There is no connection."""


class ConnectTimeout(TimeoutError):
    """Neither a connection nor a place in the pool came about in time."""


class ConnectionEnded(OSError):
    """Before the reply was complete; or what came was not HTTP."""


class Response:
    """A reply, of which the head is there. ``close`` is synchronous, and may come at any time and twice."""

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())
        self._connection: Connection | None = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def ready(self) -> bool:
        """Whether ``take`` has something to say."""
        return bool(self._parts) or self._ended or self._error is not None

    async def wait(self, sink: Sink | None = None) -> None:
        """Until it is ready, or interrupted. ``sink`` is asked first what comes meanwhile: what it takes is not seen
        here, and the wait goes on."""
        if not self.ready:
            self._waiter, self._sink = asyncio.get_running_loop().create_future(), sink
            try:
                await self._waiter
            finally:
                self._waiter = self._sink = None

    def take(self) -> bytes:
        """All that has come; empty at the end of the reply. Raises :class:`ConnectionEnded` once all is read."""
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            if self._connection is not None:
                self._connection.resume()
            return data
        if self._error is not None:
            raise self._error
        return b""

    async def readany(self) -> bytes:
        await self.wait()
        return self.take()

    def interrupt(self, error: Exception) -> None:
        """Ends the wait that is under way, if nothing has come meanwhile."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def close(self) -> None:
        """A reply that is not complete takes its connection with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def came(self, data: bytes) -> bool:
        """Whether there is room for more."""
        self._parts.append(data)
        self._size += len(data)
        return self._size < BUFFERED_BYTES_MAX

    def complete(self) -> None:
        self._ended, self._connection = True, None

    def fail(self, error: OSError) -> None:
        if not self._ended and self._error is None:
            self._error, self._connection = error, None

    def wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if self._sink is not None and len(self._parts) == 1 and self._sink(self._parts[0]):
            self._parts.clear()
            self._size = 0
        if self.ready:
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One of the pool's. It has at most one request under way."""

    def __init__(self, pool: Pool) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._head: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._header_lines: list[tuple[str, str]] = []
        self._unframed_bytes = 0
        self._to_send: deque[memoryview] = deque()
        self._writable = True
        self._paused = False
        self._end_completes = False
        """Whether the end of the connection is the reply's end: it says neither its length nor comes in chunks."""
        self._in_doubt = False
        """Whether a body may follow that the reply cannot have: it would be taken for the next one's."""
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def _unsent(self) -> bool:
        """Of the request: a server may answer before it has read that."""
        return bool(self._to_send) or (self._transport is not None and self._transport.get_write_buffer_size() > 0)

    async def ask(self, head: bytes, body: bytes) -> Response:
        """The reply, once its head is there."""
        if self._transport is None:
            self._pool.released(self)
            raise ConnectionEnded("the connection ended before it was used")
        self._parser = httptools.HttpResponseParser(self)
        self._header_lines, self._unframed_bytes, self._end_completes = [], 0, False
        response = self._response = Response(self)
        head_came = self._head = self._loop.create_future()
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            view = memoryview(body)
            self._to_send.extend(view[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))
            self._send_more()
        try:
            await head_came
        except BaseException:
            if self._response is response:  # Else the reply is whole already, and the connection may be another's.
                self.abort()
            raise
        return response

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._to_send.clear()
        self._end_completes = False  # An end that comes from here completes no reply.
        if self._transport is not None:
            self._transport.abort()
        self._pool.released(self)

    def _send_more(self) -> None:
        if self._to_send and self._writable and self.usable:
            assert self._transport is not None
            self._transport.write(self._to_send.popleft())
            self._loop.call_soon(self._send_more)

    def _fail(self, why: str) -> None:
        error = ConnectionEnded(why)
        response, self._response = self._response, None
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_exception(error)
        elif response is not None:
            response.fail(error)
            response.wake()
        self.abort()

    # The loop calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        response, self._transport = self._response, None
        if response is not None and response.status and error is None and self._end_completes:
            self._response = None
            response.complete()
            response.wake()
        elif response is not None or self._head is not None:
            self._fail("the connection ended")
        self._pool.released(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.abort()  # Nobody has asked.
            return
        self._unframed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not HTTP: {error}")
        else:
            if self._unframed_bytes > UNFRAMED_BYTES_MAX:
                self._fail("a head that is too large")
        response.wake()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._send_more()

    # The parser calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        # A header may hold bytes that are no text: Reply encodes them in the same way.
        self._header_lines.append((name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        response = self._response
        if response is None or response.status:
            raise ValueError("a second reply")
        if status > STATUS_MAX:
            raise ValueError("a status that does not exist")
        headers = CIMultiDict(self._header_lines)
        counted = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        self._end_completes = not counted
        self._in_doubt = status in (204, 304) and counted and headers.get("content-length") != "0"
        response.headers, response.status = CIMultiDictProxy(headers), status
        head, self._head = self._head, None  # The next request may have come before this one's task wakes.
        if head is not None and not head.done():
            head.set_result(None)

    def on_body(self, data: bytes) -> None:
        self._unframed_bytes = 0
        response = self._response
        if response is not None and not response.came(data) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status:
            self._header_lines = []
            return  # An interim reply, such as 100.
        self._response = None
        response.complete()
        if self._parser.should_keep_alive() and not self._unsent and not self._in_doubt:
            self.resume()
            self._pool.give_back(self)
        else:
            self.abort()


class Pool:
    """Connections to one server. Those that were idle for ``keep_alive_s`` are not used again."""

    def __init__(self, url: str, connections_max: int, connect_s: float, keep_alive_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._netloc = parts.netloc
        self._base = parts.path.rstrip("/")
        self._tls = _tls() if parts.scheme == "https" else None
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._places = asyncio.Semaphore(connections_max)
        self._used: set[Connection] = set()
        self._idle: deque[Connection] = deque()
        self._closed = False

    async def request(self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes) -> Response:
        """Raises :class:`ConnectFailed`, :class:`ConnectTimeout` and :class:`ConnectionEnded`."""
        lines = [f"{method} {self._base}{target} HTTP/1.1", f"host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers]
        text = "\n".join(lines)
        assert text.count("\n") == len(lines) - 1, "an injected line"
        assert "\r" not in text
        head = text.replace("\n", "\r\n") + f"\r\ncontent-length: {len(body)}\r\n\r\n"
        connection = await self._connection()
        return await connection.ask(_encoded(head), body)

    def close(self) -> None:
        self.retire()
        for connection in [*self._used]:
            connection.abort()

    def retire(self) -> None:
        """Nothing new is asked on its connections; what is under way on them goes on."""
        self._closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: Connection) -> None:
        self.released(connection)
        if connection.usable and not self._closed:
            now = connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
            while self._idle[0].idle_since < now - self._keep_alive_s:
                self._idle.popleft().abort()

    def released(self, connection: Connection) -> None:
        """It is of no more use to the one who had it. Idempotent."""
        if connection in self._used:
            self._used.remove(connection)
            self._places.release()

    async def _connection(self) -> Connection:
        if not self._places.locked():
            await self._places.acquire()  # At once.
            if (connection := self._idle_connection()) is not None:
                return connection
            self._places.release()
        try:
            async with asyncio.timeout(self._connect_s):
                await self._places.acquire()
                try:
                    return self._idle_connection() or await self._connect()
                except BaseException:
                    self._places.release()
                    raise
        except TimeoutError as error:
            raise ConnectTimeout from error

    def _idle_connection(self) -> Connection | None:
        oldest = asyncio.get_running_loop().time() - self._keep_alive_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                self._used.add(connection)
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        connection = Connection(self)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection, self._host, self._port, ssl=self._tls
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectFailed(str(error)) from error
        except BaseException:
            connection.abort()
            raise
        self._used.add(connection)
        return connection


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all: reading the authorities' certificates takes tens of milliseconds."""
    return ssl.create_default_context()


def _encoded(head: str) -> bytes:
    """A client's headers are Latin-1 here, and come out as they came in; a key of ours may be any text."""
    try:
        return head.encode("latin-1")
    except UnicodeEncodeError:
        return head.encode()
