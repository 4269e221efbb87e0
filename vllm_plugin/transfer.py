"""The KV data plane: block ranges over TCP, straight between two workers. Knows nothing of vLLM.

Each worker rank runs one :class:`KvAgent` on threads of its own. A peer's agent reads granted blocks from it; the
llumlet in the same server orders it about (``grant``, ``revoke``, ``pull``, ``close``). Messages are JSON objects
behind a 4-byte length; block data follows as chunks of ``length, crc32, bytes``. Nothing here is pickled.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

logger = logging.getLogger("vllm.kvferry.transfer")

CHUNK_BYTES_MAX = 1 << 20
MESSAGE_BYTES_MAX = 4 << 20
CONNECTIONS_MAX = 64
GRANTS_MAX = 64
ENDED_KEPT = 256
SOCKET_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 120.0
_LENGTH = struct.Struct(">I")
_CHUNK = struct.Struct(">II")


class TransferError(Exception):
    """The peer refused, went away, took too long, or sent bytes that do not match their checksum."""


class BlockStore(Protocol):
    """KV blocks of one worker rank, all layers of a block as one run of ``block_bytes`` bytes."""

    block_bytes: int
    blocks_total: int

    def gather(self, block_ids: Sequence[int]) -> bytes | memoryview:
        """The blocks' bytes, one after the other. Only for blocks that no step writes to."""

    def scatter(self, block_ids: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Write the blocks. Only for blocks that are reserved and that no step reads."""


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_message(connection: socket.socket) -> dict[str, Any] | None:
    """The next message, or ``None`` at a clean end of the connection."""
    head = _receive(connection, _LENGTH.size, may_end=True)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MESSAGE_BYTES_MAX:
        raise TransferError(f"a message of {length} bytes is over the limit")
    try:
        message = json.loads(_receive(connection, length) or b"")
    except ValueError as error:
        raise TransferError("a message is not JSON") from error
    if not isinstance(message, dict):
        raise TransferError("a message is not an object")
    return message


def _receive(connection: socket.socket, length: int, *, may_end: bool = False) -> bytearray | None:
    data = bytearray(length)
    view = memoryview(data)
    have = 0
    while have < length:
        count = connection.recv_into(view[have:])
        if count == 0:
            if may_end and have == 0:
                return None
            raise TransferError("the peer closed the connection")
        have += count
    return data


def _integers(message: dict[str, Any], name: str) -> list[int]:
    value = message.get(name)
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        raise TransferError(f"{name} must be a list of integers")
    return value


@dataclass
class _Grant:
    blocks: set[int]
    deadline: float


@dataclass
class _Source:
    """A destination's open connection to one source agent, kept for the length of a migration."""

    connection: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)


class KvAgent:
    """Serves and fetches KV blocks for one worker rank, on threads, beside the model's own.

    ``control_token`` lets the llumlet of the same server give orders. A peer reads with a token that was granted for
    one migration and for named blocks only. Connections, grants, chunks and waits are all bounded.
    """

    def __init__(self, store: BlockStore, control_token: str, host: str) -> None:
        self._store = store
        self._control_token = control_token
        self._grants: dict[str, _Grant] = {}
        self._sources: dict[str, _Source] = {}
        self._ended: deque[str] = deque(maxlen=ENDED_KEPT)
        """Migrations that were closed: nothing is written for them any more."""
        self._lock = threading.Lock()
        self._connections = 0
        self._server = socket.create_server((host, 0), backlog=CONNECTIONS_MAX)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="kvferry-accept", daemon=True).start()

    def __repr__(self) -> str:
        return f"<KvAgent port {self.port}, {self._connections} connections, {len(self._grants)} grants>"

    def close(self) -> None:
        self._server.close()
        with self._lock:
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # The server socket was closed.
                return
            with self._lock:
                admitted = self._connections < CONNECTIONS_MAX
                if admitted:
                    self._connections += 1
            if not admitted:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kvferry-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(SOCKET_TIMEOUT_S)
                self._converse(connection)
        except (OSError, TransferError) as error:
            logger.info("kv connection ended: %s", error)
        finally:
            with self._lock:
                self._connections -= 1

    def _converse(self, connection: socket.socket) -> None:
        hello = receive_message(connection)
        if hello is None:
            return
        token = str(hello.get("token", ""))
        if hello.get("role") == "control" and hmac.compare_digest(token.encode(), self._control_token.encode()):
            answer = self._control
        elif hello.get("role") == "read" and self._granted(token) is not None:
            answer = None
        else:
            send_message(connection, {"error": "not authorized"})
            return
        send_message(connection, {"block_bytes": self._store.block_bytes})
        # The llumlet of this server keeps its connections; a peer's ends with its migration.
        connection.settimeout(IDLE_TIMEOUT_S if answer is None else None)
        while (message := receive_message(connection)) is not None:
            if answer is None:
                self._send_blocks(connection, token, message)
                continue
            try:
                reply = answer(message)
            except (OSError, TransferError) as error:
                reply = {"error": str(error) or type(error).__name__}
            send_message(connection, reply)

    # What the llumlet of this server may order.

    def _control(self, message: dict[str, Any]) -> dict[str, Any]:
        match message.get("op"):
            case "grant":
                self._grant(str(message["token"]), _integers(message, "blocks"), float(message["ttl_s"]))
                return {}
            case "revoke":
                with self._lock:
                    self._grants.pop(str(message["token"]), None)
                return {}
            case "pull":
                return {"bytes": self._pull(message)}
            case "close":
                self._close_source(str(message["migration"]))
                return {}
            case other:
                raise TransferError(f"unknown order {other!r}")

    def _grant(self, token: str, blocks: list[int], ttl_s: float) -> None:
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

    def _granted(self, token: str) -> set[int] | None:
        with self._lock:
            for name, grant in self._grants.items():
                if hmac.compare_digest(name.encode(), token.encode()) and grant.deadline >= time.monotonic():
                    return set(grant.blocks)
        return None

    # Source side.

    def _blocks_per_chunk(self) -> int:
        return max(1, CHUNK_BYTES_MAX // self._store.block_bytes)

    def _send_blocks(self, connection: socket.socket, token: str, message: dict[str, Any]) -> None:
        blocks = _integers(message, "blocks")
        granted = self._granted(token)
        if granted is None or not granted.issuperset(blocks):
            send_message(connection, {"error": "these blocks are not granted"})
            raise TransferError("a peer asked for blocks that were not granted to it")
        send_message(connection, {"bytes": len(blocks) * self._store.block_bytes})
        step = self._blocks_per_chunk()
        for start in range(0, len(blocks), step):
            data = self._store.gather(blocks[start : start + step])
            connection.sendall(_CHUNK.pack(len(data), zlib.crc32(data)))
            connection.sendall(data)

    # Destination side.

    def _pull(self, message: dict[str, Any]) -> int:
        """Fetch blocks from the source's agent of the same rank and write them; the number of bytes fetched."""
        source_blocks, destination_blocks = _integers(message, "source_blocks"), _integers(message, "blocks")
        if len(source_blocks) != len(destination_blocks):
            raise TransferError("as many destination blocks as source blocks are needed")
        if any(not 0 <= block < self._store.blocks_total for block in destination_blocks):
            raise TransferError("a destination block does not exist")
        migration = str(message["migration"])
        source = self._source(migration, message)
        try:
            with source.lock:
                send_message(source.connection, {"blocks": source_blocks})
                head = receive_message(source.connection)
                if head is None or "error" in head:
                    raise TransferError(f"the source refused: {head['error'] if head else 'connection closed'}")
                return self._receive_blocks(migration, source, destination_blocks)
        except BaseException:
            self._close_source(migration)  # What is left unread on it must not be taken for the next blocks.
            raise

    def _receive_blocks(self, migration: str, source: _Source, blocks: list[int]) -> int:
        connection = source.connection
        step = self._blocks_per_chunk()
        total = 0
        for start in range(0, len(blocks), step):
            chunk_blocks = blocks[start : start + step]
            length, checksum = _CHUNK.unpack(_receive(connection, _CHUNK.size) or b"")
            if length != len(chunk_blocks) * self._store.block_bytes:
                raise TransferError("the source's chunk has another size")
            data = _receive(connection, length) or bytearray()
            if zlib.crc32(data) != checksum:
                raise TransferError("checksum mismatch")
            if self._sources.get(migration) is not source:
                raise TransferError("the migration was given up")
            self._store.scatter(chunk_blocks, data)
            total += length
        return total

    def _close_source(self, migration: str) -> None:
        """End a migration's connection. When this returns, no thread writes blocks for it, and none will."""
        with self._lock:
            self._ended.append(migration)
            source = self._sources.pop(migration, None)
        if source is None:
            return
        with contextlib.suppress(OSError):  # Wakes a thread that is receiving; closing alone would not.
            source.connection.shutdown(socket.SHUT_RDWR)
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
        self._idle.append(streams)
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
