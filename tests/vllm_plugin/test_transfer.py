"""The KV data plane over real sockets, with blocks in plain memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Sequence

import pytest

from vllm_plugin import transfer
from vllm_plugin.transfer import (
    CHUNK_BYTES_MAX,
    CONNECTIONS_MAX,
    AgentClient,
    KvAgent,
    TransferError,
    receive_message,
    send_message,
)

HOST = "127.0.0.1"
CONTROL = "control-token"


class MemoryStore:
    """Blocks of bytes; block i starts out as the byte i, over and over."""

    def __init__(self, blocks: int = 16, block_bytes: int = 64) -> None:
        self.blocks_total = blocks
        self.block_bytes = block_bytes
        self.blocks = [bytes([index]) * block_bytes for index in range(blocks)]

    def gather(self, block_ids: Sequence[int]) -> bytes:
        return b"".join(self.blocks[block] for block in block_ids)

    def scatter(self, block_ids: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        for index, block in enumerate(block_ids):
            self.blocks[block] = bytes(data[index * self.block_bytes : (index + 1) * self.block_bytes])


class Pair:
    """A source and a destination agent, each with a client as its llumlet has one."""

    def __init__(self, blocks: int = 16, block_bytes: int = 64) -> None:
        self.source_store, self.destination_store = MemoryStore(blocks, block_bytes), MemoryStore(blocks, block_bytes)
        self.source = KvAgent(self.source_store, CONTROL, HOST)
        self.destination = KvAgent(self.destination_store, CONTROL, HOST)
        self.source_client = AgentClient(HOST, self.source.port, CONTROL)
        self.destination_client = AgentClient(HOST, self.destination.port, CONTROL)

    async def grant(self, blocks: list[int], token: str = "t", ttl_s: float = 10) -> None:
        await self.source_client.order(5, op="grant", token=token, blocks=blocks, ttl_s=ttl_s)

    async def pull(
        self,
        source_blocks: list[int],
        blocks: list[int],
        token: str = "t",
        port: int | None = None,
        migration: str = "m",
    ) -> int:
        reply = await self.destination_client.order(
            5,
            op="pull",
            migration=migration,
            host=HOST,
            port=port or self.source.port,
            token=token,
            source_blocks=source_blocks,
            blocks=blocks,
        )
        return int(reply["bytes"])

    def close(self) -> None:
        self.source_client.close()
        self.destination_client.close()
        self.source.close()
        self.destination.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


async def test_granted_blocks_arrive_byte_for_byte(pair: Pair) -> None:
    await pair.grant([3, 5, 7])
    assert await pair.pull([3, 5, 7], [0, 1, 2]) == 3 * 64
    assert pair.destination_store.blocks[:4] == [pair.source_store.blocks[block] for block in (3, 5, 7, 3)]


async def test_a_pull_of_many_chunks_is_whole() -> None:
    pair = Pair(blocks=40, block_bytes=CHUNK_BYTES_MAX // 8)
    try:
        await pair.grant(list(range(40)))
        blocks = list(reversed(range(40)))
        assert await pair.pull(list(range(40)), blocks) == 5 * CHUNK_BYTES_MAX
        assert pair.destination_store.blocks == pair.source_store.blocks[::-1]
    finally:
        pair.close()


async def test_blocks_that_were_not_granted_are_refused(pair: Pair) -> None:
    await pair.grant([3])
    with pytest.raises(TransferError, match="not granted"):
        await pair.pull([3, 4], [0, 1])
    assert pair.destination_store.blocks[0] == b"\0" * 64


@pytest.mark.parametrize("token", ["", "other", "T"])
async def test_a_wrong_token_reads_nothing(pair: Pair, token: str) -> None:
    await pair.grant([3])
    with pytest.raises(TransferError, match="answered"):
        await pair.pull([3], [0], token=token)


async def test_a_grant_ends_when_it_is_revoked_or_its_time_is_over(pair: Pair) -> None:
    await pair.grant([3])
    await pair.pull([3], [0])
    await pair.source_client.order(5, op="revoke", token="t")
    with pytest.raises(TransferError, match="not granted"):
        await pair.pull([3], [0])
    await pair.grant([3], token="short", ttl_s=0.0)
    with pytest.raises(TransferError, match="answered"):
        await pair.pull([3], [0], token="short", migration="m2")


async def test_orders_need_the_control_token(pair: Pair) -> None:
    stranger = AgentClient(HOST, pair.source.port, "guess")
    with pytest.raises(TransferError, match="not authorized"):
        await stranger.order(5, op="grant", token="t", blocks=[1], ttl_s=10)


async def test_a_destination_block_that_does_not_exist_is_refused(pair: Pair) -> None:
    await pair.grant([3])
    with pytest.raises(TransferError, match="does not exist"):
        await pair.pull([3], [16])


class FaultySource:
    """An agent's socket that answers the handshake, then sends what a test wants."""

    def __init__(self, reply: bytes, block_bytes: int = 64) -> None:
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._reply = reply
        self._block_bytes = block_bytes
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            receive_message(connection)
            send_message(connection, {"block_bytes": self._block_bytes})
            if receive_message(connection) is not None:
                send_message(connection, {"bytes": 64})
                connection.sendall(self._reply)

    def close(self) -> None:
        self._server.close()
        self._thread.join(5)


BLOCK = b"x" * 64


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (struct.pack(">II", 64, zlib.crc32(BLOCK) ^ 1) + BLOCK, "checksum"),
        (struct.pack(">II", 32, zlib.crc32(BLOCK[:32])) + BLOCK[:32], "another size"),
        (struct.pack(">II", 64, zlib.crc32(BLOCK)) + BLOCK[:40], "closed"),
        (b"", "closed"),
    ],
)
async def test_a_bad_chunk_or_a_dead_source_fails_the_pull_and_writes_nothing(
    pair: Pair, reply: bytes, says: str
) -> None:
    faulty = FaultySource(reply)
    try:
        with pytest.raises(TransferError, match=says):
            await pair.pull([1], [2], port=faulty.port, migration="faulty")
        assert pair.destination_store.blocks[2] == bytes([2]) * 64
    finally:
        faulty.close()


async def test_a_source_with_blocks_of_another_size_is_refused(pair: Pair) -> None:
    faulty = FaultySource(b"", block_bytes=128)
    try:
        with pytest.raises(TransferError, match="answered"):
            await pair.pull([1], [2], port=faulty.port, migration="faulty")
    finally:
        faulty.close()


async def test_a_source_that_is_gone_fails_the_pull_at_once(pair: Pair) -> None:
    gone = socket.create_server((HOST, 0))
    port = gone.getsockname()[1]
    gone.close()
    with pytest.raises(TransferError, match="refused"):
        await pair.pull([1], [2], port=port, migration="gone")


async def test_a_failed_pull_does_not_poison_the_next_one(pair: Pair) -> None:
    """After a bad chunk the connection holds bytes that nobody has read: it must not be used again."""
    faulty = FaultySource(struct.pack(">II", 64, 0) + BLOCK)
    try:
        with pytest.raises(TransferError, match="checksum"):
            await pair.pull([1], [2], port=faulty.port)
    finally:
        faulty.close()
    await pair.grant([5])
    with pytest.raises(TransferError, match="given up"):
        await pair.pull([5], [2])
    assert await pair.pull([5], [2], migration="the next") == 64
    assert pair.destination_store.blocks[2] == bytes([5]) * 64


async def test_connections_are_bounded(pair: Pair) -> None:
    connections = [socket.create_connection((HOST, pair.source.port)) for _ in range(CONNECTIONS_MAX)]
    try:
        async with asyncio.timeout(5):
            while "64 connections" not in repr(pair.source):
                await asyncio.sleep(0.01)
        with pytest.raises(TransferError):
            await pair.grant([1])
    finally:
        for connection in connections:
            connection.close()


async def test_garbage_instead_of_a_message_ends_the_connection_alone(pair: Pair) -> None:
    with socket.create_connection((HOST, pair.source.port)) as connection:
        connection.settimeout(5)
        connection.sendall(struct.pack(">I", 1 << 31))
        assert connection.recv(1) == b""
    await pair.grant([1])
    assert await pair.pull([1], [4]) == 64


async def test_an_order_after_an_idle_time_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent must not close its own llumlet's connection for being idle, or the next migration fails."""
    monkeypatch.setattr(transfer, "IDLE_TIMEOUT_S", 0.1)
    pair = Pair()
    try:
        await pair.grant([3])
        await asyncio.sleep(0.3)
        await pair.grant([5])
        assert await pair.pull([3, 5], [0, 1]) == 2 * 64
    finally:
        pair.close()


async def test_an_order_takes_a_new_connection_when_the_agent_has_closed_the_last(pair: Pair) -> None:
    await pair.grant([3])
    ((_, writer),) = pair.source_client._idle
    writer.transport.abort()
    await pair.grant([5])
    assert await pair.pull([3, 5], [0, 1]) == 2 * 64


async def test_nothing_is_written_after_a_pull_has_been_given_up(pair: Pair) -> None:
    """A slow source: the order times out, the llumlet closes the source and frees the blocks; then the bytes come."""
    listener = socket.create_server((HOST, 0))
    go = threading.Event()

    def slow_source() -> None:
        connection, _ = listener.accept()
        with connection:
            receive_message(connection)
            send_message(connection, {"block_bytes": 64})
            receive_message(connection)
            send_message(connection, {"bytes": 64})
            go.wait(5)
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack(">II", 64, zlib.crc32(BLOCK)) + BLOCK)

    thread = threading.Thread(target=slow_source)
    thread.start()
    try:
        with pytest.raises(TransferError, match="did not answer"):
            await pair.destination_client.order(
                0.3,
                op="pull",
                migration="m",
                host=HOST,
                port=listener.getsockname()[1],
                token="t",
                source_blocks=[1],
                blocks=[3],
            )
        await pair.destination_client.order(5, op="close", migration="m")
        go.set()  # By now block 3 belongs to another request.
        await asyncio.to_thread(thread.join)
        with pytest.raises(TransferError, match="given up"):
            await pair.pull([1], [3], migration="m")
        assert pair.destination_store.blocks[3] == bytes([3]) * 64
    finally:
        go.set()
        await asyncio.to_thread(thread.join)
        listener.close()
