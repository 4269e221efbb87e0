"""The KV data plane: block ranges over TCP, straight between two workers. Knows nothing of vLLM.

Each worker rank runs one :class:`KvAgent` on threads of its own. A peer's agent reads granted blocks from it; the
llumlet in the same server orders it about (``grant``, ``revoke``, ``pull``, ``close``). Messages are JSON objects
behind a 4-byte length; block data follows as chunks of ``length, crc32, bytes``. Nothing here is pickled. Both sides
work on two chunks at a time: one is on the wire while the other is copied out of, or into, the KV cache.

One block is *all layers fused*: ``block_bytes`` bytes, the same on both sides (the KV format key says so beforehand,
and the reader checks it again).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_plugin.overlap import Buffers, overlap

logger = logging.getLogger("vllm.kvferry.transfer")

CHUNK_BYTES_MAX = 1 << 20
MESSAGE_BYTES_MAX = 4 << 20
HELLO_BYTES_MAX = 4096
"""The first message of a connection, before it is known who sends it."""
CONNECTIONS_MAX = 64
GRANTS_MAX = 64
BUFFERS_KEPT = 8
ENDED_KEPT = 256
SOCKET_TIMEOUT_S = 10.0
"""For one message or chunk as a whole, however it trickles."""
IDLE_TIMEOUT_S = 120.0
IDLE_CONNECTIONS_MAX = 2
"""Kept by a client, each with a thread of the agent's. A burst of orders opens more, and closes them."""
ACCEPT_PAUSE_S = 0.1
CLOSE_TIMEOUT_S = 5.0
_LENGTH = struct.Struct(">I")
_CHUNK = struct.Struct(">II")


class TransferError(Exception):
    """The peer refused, went away, took too long, or sent bytes that do not match their checksum."""


class BlockStore(Protocol):
    """KV blocks of one worker rank, all layers of a block as one run of ``block_bytes`` bytes."""

    block_bytes: int
    blocks_total: int

    def allocate(self, size_bytes: int) -> memoryview:
        """Writable memory for one chunk, of the kind that copies fastest: pinned where there is a GPU."""

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        """Fill ``out`` with the blocks' bytes, one after the other. Only for blocks that no step writes to."""

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Write the blocks. Only for blocks that are reserved and that no step reads."""


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message, separators=(",", ":")).encode()
    _send(connection, _LENGTH.pack(len(body)) + body)


def receive_message(
    connection: socket.socket, wait_s: float | None = SOCKET_TIMEOUT_S, bytes_max: int = MESSAGE_BYTES_MAX
) -> dict[str, Any] | None:
    """The next message, which may take ``wait_s`` to begin, or ``None`` at a clean end of the connection."""
    head = bytearray(_LENGTH.size)
    connection.settimeout(wait_s)
    first = connection.recv(1)
    if not first:
        return None
    head[:1] = first
    _receive(connection, memoryview(head)[1:])
    (length,) = _LENGTH.unpack(head)
    if length > bytes_max:
        raise TransferError(f"a message of {length} bytes is over the limit")
    body = bytearray(length)
    _receive(connection, memoryview(body))
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TransferError("a message is not JSON") from error
    if not isinstance(message, dict):
        raise TransferError("a message is not an object")
    return message


def _send(connection: socket.socket, data: bytes | memoryview) -> None:
    connection.settimeout(SOCKET_TIMEOUT_S)  # Of sendall, this limits the whole.
    try:
        connection.sendall(data)
    except TimeoutError as error:
        raise TransferError("the peer took too long") from error


def _receive(connection: socket.socket, into: memoryview) -> None:
    """Fill ``into``, within SOCKET_TIMEOUT_S in all."""
    deadline = time.monotonic() + SOCKET_TIMEOUT_S
    have = 0
    try:
        while have < len(into):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            count = connection.recv_into(into[have:])
            if count == 0:
                raise TransferError("the peer closed the connection")
            have += count
    except TimeoutError as error:
        raise TransferError("the peer took too long") from error


def _integers(message: dict[str, Any], name: str) -> list[int]:
    value = message.get(name)
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise TransferError(f"{name} must be a list of integers")
    return value


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="backslashreplace"), other.encode(errors="backslashreplace"))


@dataclass
class _Grant:
    blocks: set[int]
    deadline: float


@dataclass
class _Source:
    """A destination's open connection to one source agent, kept for the length of a migration."""

    connection: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Client:
    """An open connection that this agent serves, and the token with which it reads, if it does."""

    thread: threading.Thread
    token: str | None = None


class KvAgent:
    """Serves and fetches KV blocks for one worker rank, on threads, beside the model's own.

    ``control_token`` lets the llumlet of the same server give orders. A peer reads with a token that was granted for
    one migration and for named blocks only. Connections, grants, chunks and waits are all bounded. ``prepare_thread``
    runs first on the thread from which all others of the agent come, and inherit what Linux lets a thread inherit.
    """

    def __init__(
        self, store: BlockStore, control_token: str, host: str, prepare_thread: Callable[[], None] | None = None
    ) -> None:
        self._store = store
        self._control_token = control_token
        self._blocks_per_chunk = max(1, CHUNK_BYTES_MAX // store.block_bytes)
        self._buffers = Buffers(store.allocate, self._blocks_per_chunk * store.block_bytes, BUFFERS_KEPT)
        self._grants: dict[str, _Grant] = {}
        self._sources: dict[str, _Source] = {}
        self._ended: deque[str] = deque(maxlen=ENDED_KEPT)
        """Migrations that were closed: nothing is written for them any more."""
        self._clients: dict[socket.socket, _Client] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._server = socket.create_server((host, 0), backlog=CONNECTIONS_MAX)
        self.port: int = self._server.getsockname()[1]
        self._accepting = threading.Thread(
            target=self._accept, args=(prepare_thread,), name="kvferry-accept", daemon=True
        )
        self._accepting.start()

    def __repr__(self) -> str:
        return (
            f"<KvAgent port {self.port}, {len(self._clients)} connections, {len(self._grants)} grants, "
            f"{len(self._sources)} sources, {self._buffers.in_use} buffers>"
        )

    def close(self) -> None:
        """End every connection and every thread."""
        self._closed = True
        with contextlib.suppress(OSError):  # Wakes the thread that accepts; closing alone would not.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._accepting.join(CLOSE_TIMEOUT_S)
        for migration in list(self._sources):
            self._close_source(migration)
        with self._lock:
            threads = [client.thread for client in self._clients.values()]
            for connection in self._clients:
                _wake(connection)
        for thread in threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _accept(self, prepare_thread: Callable[[], None] | None) -> None:
        if prepare_thread is not None:
            prepare_thread()
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError as error:
                if not self._closed:  # Such as too many open files, which passes.
                    logger.warning("cannot accept a kv connection: %s", error)
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="kvferry-serve", daemon=True)
            with self._lock:
                admitted = len(self._clients) < CONNECTIONS_MAX
                if admitted:
                    self._clients[connection] = _Client(thread)
            if admitted:
                thread.start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._converse(connection)
        except (OSError, TransferError) as error:
            logger.info("kv connection ended: %s", error)
        finally:
            with self._lock:  # First out of the list: nobody shuts down a socket that is closed.
                del self._clients[connection]
            connection.close()

    def _converse(self, connection: socket.socket) -> None:
        hello = receive_message(connection, bytes_max=HELLO_BYTES_MAX)
        if hello is None:
            return
        token = str(hello.get("token", ""))
        if hello.get("role") == "control" and _same(token, self._control_token):
            send_message(connection, {"block_bytes": self._store.block_bytes})
            # The llumlet of this server keeps its connections; a peer's ends with its migration.
            while (message := receive_message(connection, None)) is not None:
                send_message(connection, self._obey(message))
        elif hello.get("role") == "read" and self._admit_reader(connection, token):
            send_message(connection, {"block_bytes": self._store.block_bytes})
            while (message := receive_message(connection, IDLE_TIMEOUT_S)) is not None:
                self._send_blocks(connection, token, message)
        else:
            send_message(connection, {"error": "not authorized"})

    def _admit_reader(self, connection: socket.socket, token: str) -> bool:
        """Whether something is granted under the token; from now on the connection ends with the grant."""
        with self._lock:
            if self._granted(token) is None:
                return False
            self._clients[connection].token = token
            return True

    # What the llumlet of this server may order.

    def _obey(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._control(message)
        except (OSError, TransferError) as error:
            return {"error": str(error) or type(error).__name__}
        except (KeyError, TypeError, ValueError) as error:
            return {"error": f"malformed order: {error!r}"}

    def _control(self, message: dict[str, Any]) -> dict[str, Any]:
        match message.get("op"):
            case "grant":
                self._grant(str(message["token"]), _integers(message, "blocks"), float(message["ttl_s"]))
                return {}
            case "revoke":
                self._revoke(str(message["token"]))
                return {}
            case "pull":
                return {"bytes": self._pull(message)}
            case "close":
                self._close_source(str(message["migration"]))
                return {}
            case other:
                raise TransferError(f"unknown order {other!r}")

    def _grant(self, token: str, blocks: list[int], ttl_s: float) -> None:
        self._require_blocks(blocks, "granted")
        now = time.monotonic()
        with self._lock:
            for old in [name for name, grant in self._grants.items() if grant.deadline < now]:
                del self._grants[old]
            grant = self._grants.get(token)
            if grant is None:
                if len(self._grants) >= GRANTS_MAX:
                    raise TransferError("too many migrations at once")
                grant = self._grants[token] = _Grant(set(), 0.0)
            grant.blocks.update(blocks)
            grant.deadline = now + ttl_s

    def _revoke(self, token: str) -> None:
        """End a grant and the connections that read by it; a peer that has died would hold them for minutes."""
        with self._lock:
            self._grants.pop(token, None)
            for connection, client in self._clients.items():
                if client.token == token:
                    _wake(connection)

    def _granted(self, token: str) -> _Grant | None:
        """The grant of that token, if it is still good. With the lock held."""
        for name, grant in self._grants.items():
            if _same(name, token) and grant.deadline >= time.monotonic():
                return grant
        return None

    def _is_granted(self, token: str, blocks: Sequence[int]) -> bool:
        with self._lock:
            grant = self._granted(token)
            return grant is not None and grant.blocks.issuperset(blocks)

    def _require_blocks(self, blocks: list[int], what: str) -> None:
        if any(not 0 <= block < self._store.blocks_total for block in blocks):
            raise TransferError(f"a {what} block does not exist")

    # Source side.

    def _chunks(self, blocks: list[int]) -> list[list[int]]:
        step = self._blocks_per_chunk
        return [blocks[start : start + step] for start in range(0, len(blocks), step)]

    def _send_blocks(self, connection: socket.socket, token: str, message: dict[str, Any]) -> None:
        """Answer one request of a peer: while a chunk is being sent, the next is gathered."""
        blocks = _integers(message, "blocks")
        if not self._is_granted(token, blocks):
            send_message(connection, {"error": "these blocks are not granted"})
            raise TransferError("a peer asked for blocks that were not granted to it")
        send_message(connection, {"bytes": len(blocks) * self._store.block_bytes})

        def gather(chunk: Sequence[int], buffer: memoryview) -> None:
            if not self._is_granted(token, chunk):  # Revoked: the blocks may be another request's by now.
                raise TransferError("the grant has ended")
            self._store.gather(chunk, self._part(buffer, chunk))

        def send(chunk: Sequence[int], buffer: memoryview) -> None:
            data = self._part(buffer, chunk)
            _send(connection, _CHUNK.pack(len(data), zlib.crc32(data)))
            _send(connection, data)

        with self._buffers.two() as buffers:
            overlap(self._chunks(blocks), buffers, gather, send)

    def _part(self, buffer: memoryview, chunk: Sequence[int]) -> memoryview:
        """What a chunk takes up of its buffer: the last one need not be full."""
        return buffer[: len(chunk) * self._store.block_bytes]

    # Destination side.

    def _pull(self, message: dict[str, Any]) -> int:
        """Fetch blocks from the source's agent of the same rank and write them; the number of bytes fetched."""
        source_blocks, destination_blocks = _integers(message, "source_blocks"), _integers(message, "blocks")
        if len(source_blocks) != len(destination_blocks):
            raise TransferError("as many destination blocks as source blocks are needed")
        self._require_blocks(destination_blocks, "destination")
        migration = str(message["migration"])
        source = self._source(migration, message)
        try:
            with source.lock:
                send_message(source.connection, {"blocks": source_blocks})
                head = receive_message(source.connection)
                if head is None or "error" in head:
                    raise TransferError(f"the source refused: {head['error'] if head else 'connection closed'}")
                self._receive_blocks(migration, source, destination_blocks)
                return len(destination_blocks) * self._store.block_bytes
        except BaseException:
            self._close_source(migration)  # What is left unread on it must not be taken for the next blocks.
            raise

    def _receive_blocks(self, migration: str, source: _Source, blocks: list[int]) -> None:
        """While a chunk is checked and written, the next is received."""
        checksums: deque[int] = deque()

        def receive(chunk: Sequence[int], buffer: memoryview) -> None:
            head = bytearray(_CHUNK.size)
            _receive(source.connection, memoryview(head))
            length, checksum = _CHUNK.unpack(head)
            if length != len(chunk) * self._store.block_bytes:
                raise TransferError("the source's chunk has another size")
            _receive(source.connection, self._part(buffer, chunk))
            checksums.append(checksum)

        def scatter(chunk: Sequence[int], buffer: memoryview) -> None:
            data = self._part(buffer, chunk)
            if zlib.crc32(data) != checksums.popleft():
                raise TransferError("checksum mismatch")
            if self._sources.get(migration) is not source:
                raise TransferError("the migration was given up")
            self._store.scatter(chunk, data)

        with self._buffers.two() as buffers:
            overlap(self._chunks(blocks), buffers, receive, scatter)

    def _close_source(self, migration: str) -> None:
        """End a migration's connection. When this returns, no thread writes blocks for it, and none will."""
        with self._lock:
            self._ended.append(migration)
            source = self._sources.pop(migration, None)
        if source is None:
            return
        _wake(source.connection)
        with source.lock:
            source.connection.close()

    def _source(self, migration: str, message: dict[str, Any]) -> _Source:
        with self._lock:
            if migration in self._ended:
                raise TransferError("the migration was given up")
            if (known := self._sources.get(migration)) is not None:
                return known
        address = (str(message["host"]), int(message["port"]))
        connection = socket.create_connection(address, timeout=SOCKET_TIMEOUT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_message(connection, {"role": "read", "token": str(message["token"])})
            hello = receive_message(connection)
            if hello is None or hello.get("block_bytes") != self._store.block_bytes:
                raise TransferError(f"the source's agent answered {hello!r}")
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if migration not in self._ended:
                return self._sources.setdefault(migration, _Source(connection))
        connection.close()
        raise TransferError("the migration was given up")


def _wake(connection: socket.socket) -> None:
    """End a connection from another thread, which wakes the one that waits on it; closing alone would not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class AgentClient:
    """The llumlet's way to one KvAgent of its own server: orders run side by side, each on a pooled connection."""

    def __init__(self, host: str, port: int, control_token: str) -> None:
        self.host = host
        self.port = port
        self._control_token = control_token
        self._idle: list[_Streams] = []

    def __repr__(self) -> str:
        return f"<AgentClient {self.host}:{self.port}, {len(self._idle)} idle>"

    async def order(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        """Send one order and await its reply. Raises TransferError, also for a timeout."""
        streams: _Streams | None = None
        try:
            async with asyncio.timeout(timeout_s):
                streams = self._take_idle() or await self._connect()
                reply = await _exchange(streams, message)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            _close(streams)
            raise TransferError(f"the KV agent on port {self.port} did not answer: {error!r}") from error
        except BaseException:
            _close(streams)  # An answer may still be on its way: it must not meet the next order.
            raise
        if len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(streams)
        else:
            _close(streams)
        if "error" in reply:
            raise TransferError(str(reply["error"]))
        return reply

    def _take_idle(self) -> _Streams | None:
        """A pooled connection that the agent has not closed meanwhile."""
        while self._idle:
            streams = self._idle.pop()
            if not streams[0].at_eof() and not streams[1].is_closing():
                return streams
            _close(streams)
        return None

    def close(self) -> None:
        while self._idle:
            _close(self._idle.pop())

    async def _connect(self) -> _Streams:
        streams = await asyncio.open_connection(self.host, self.port)
        try:
            reply = await _exchange(streams, {"role": "control", "token": self._control_token})
            if "error" in reply:
                raise TransferError(str(reply["error"]))
        except BaseException:
            _close(streams)
            raise
        return streams


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _exchange(streams: _Streams, message: dict[str, Any]) -> dict[str, Any]:
    reader, writer = streams
    body = json.dumps(message, separators=(",", ":")).encode()
    writer.write(_LENGTH.pack(len(body)) + body)
    await writer.drain()
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MESSAGE_BYTES_MAX:
        raise TransferError("the KV agent's reply is over the limit")
    reply: dict[str, Any] = json.loads(await reader.readexactly(length))
    return reply


def _close(streams: _Streams | None) -> None:
    if streams is not None:
        streams[1].close()
