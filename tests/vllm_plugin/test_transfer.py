"""The KV data plane over real sockets, with blocks in plain memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

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

    def allocate(self, size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        out[:] = b"".join(self.blocks[block] for block in block_ids)

    def scatter(self, block_ids: Sequence[int], data: memoryview) -> None:
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
    with pytest.raises(TransferError):  # The connection has ended with its grant, and a new one is not admitted.
        await pair.pull([3], [0])
    with pytest.raises(TransferError, match="answered"):
        await pair.pull([3], [0], migration="m1")
    await pair.grant([3], token="short", ttl_s=0.2)
    await pair.pull([3], [0], token="short", migration="m2")
    await asyncio.sleep(0.25)
    with pytest.raises(TransferError, match="not granted"):
        await pair.pull([3], [0], token="short", migration="m2")
    await pair.grant([3], token="short", ttl_s=0.0)
    with pytest.raises(TransferError, match="answered"):
        await pair.pull([3], [0], token="short", migration="m3")


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


async def test_a_burst_of_orders_leaves_few_connections(pair: Pair) -> None:
    await asyncio.gather(*(pair.grant([3], token=f"t{number}") for number in range(8)))
    assert len(pair.source_client._idle) == transfer.IDLE_CONNECTIONS_MAX
    await pair.grant([5])
    await until(pair.source, f"{transfer.IDLE_CONNECTIONS_MAX} connections")


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


# Both sides end, whatever the other does.

LARGE_BLOCK = CHUNK_BYTES_MAX // 2
BLOCKS = 24


@pytest.fixture
async def large(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """A pair whose whole store is twelve chunks, with limits that a test can wait for; afterwards nothing is left."""
    monkeypatch.setattr(transfer, "SOCKET_TIMEOUT_S", 0.5)
    threads = set(threading.enumerate())
    pair = Pair(BLOCKS, LARGE_BLOCK)
    yield pair
    pair.close()
    await asyncio.sleep(0)  # The clients' transports close in the loop.
    assert {
        thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("kvferry")
    } == set()
    for agent in (pair.source, pair.destination):
        assert "0 connections" in repr(agent)
        assert "0 sources, 0 buffers" in repr(agent)


async def until(agent: KvAgent, says: str) -> None:
    async with asyncio.timeout(5):
        while says not in repr(agent):
            await asyncio.sleep(0.01)


def overlap_threads() -> int:
    return sum(thread.name.startswith("kvferry-overlap") for thread in threading.enumerate())


def read_on_one_connection(pair: Pair, token: str = "t", buffer_bytes: int = 4096) -> socket.socket:
    """A peer that asks for everything; what it does with the answer is the test's."""
    connection = socket.create_connection((HOST, pair.source.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    send_message(connection, {"role": "read", "token": token})
    receive_message(connection)
    send_message(connection, {"blocks": list(range(BLOCKS))})
    return connection


async def test_one_chunk_is_copied_while_another_is_on_the_wire(large: Pair) -> None:
    """Each side's copies need not wait for the other's: the whole takes less than all the parts together."""
    copy_s = 0.03
    for store in (large.source_store, large.destination_store):
        make_slow(store, copy_s)
    await large.grant(list(range(BLOCKS)))
    started = time.monotonic()
    await large.pull(list(range(BLOCKS)), list(range(BLOCKS)))
    assert time.monotonic() - started < 2 * 12 * copy_s
    assert large.destination_store.blocks == large.source_store.blocks


def make_slow(store: MemoryStore, copy_s: float) -> None:
    gather, scatter = store.gather, store.scatter

    def slow_gather(block_ids: Sequence[int], out: memoryview) -> None:
        time.sleep(copy_s)
        gather(block_ids, out)

    def slow_scatter(block_ids: Sequence[int], data: memoryview) -> None:
        time.sleep(copy_s)
        scatter(block_ids, data)

    store.gather, store.scatter = slow_gather, slow_scatter  # type: ignore[method-assign]


async def test_buffers_are_made_once_and_used_again(large: Pair) -> None:
    allocated: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        allocated.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    large.source._buffers._allocate = allocate
    await large.grant(list(range(BLOCKS)))
    for _ in range(3):
        await large.pull(list(range(BLOCKS)), list(range(BLOCKS)))
    assert allocated == [CHUNK_BYTES_MAX] * 2


def receive(connection: socket.socket, size: int) -> None:
    for _ in range(size // 65536):
        connection.recv(65536, socket.MSG_WAITALL)


@pytest.mark.parametrize("chunks", [0, 1, 5])
async def test_a_source_lets_go_of_a_reader_that_dies(large: Pair, chunks: int) -> None:
    await large.grant(list(range(BLOCKS)))
    connection = await asyncio.to_thread(read_on_one_connection, large, buffer_bytes=65536)
    await asyncio.to_thread(receive, connection, chunks * CHUNK_BYTES_MAX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    await until(large.source, "1 connections")  # Its llumlet's.
    await until(large.source, "0 buffers")
    assert overlap_threads() == 0


async def test_a_source_lets_go_of_a_reader_that_stops_reading(large: Pair) -> None:
    await large.grant(list(range(BLOCKS)))
    with await asyncio.to_thread(read_on_one_connection, large):
        await until(large.source, "2 buffers")
        await until(large.source, "1 connections")
        await until(large.source, "0 buffers")
        assert overlap_threads() == 0


async def test_a_source_lets_go_of_a_reader_that_reads_too_slowly(large: Pair) -> None:
    """A byte now and then resets no limit: it holds for the chunk as a whole."""
    await large.grant(list(range(BLOCKS)))
    with await asyncio.to_thread(read_on_one_connection, large) as connection:
        async with asyncio.timeout(5):
            while "1 connections" not in repr(large.source):
                await asyncio.to_thread(connection.recv, 64)
                await asyncio.sleep(0.02)


async def test_revoking_a_grant_ends_what_reads_by_it(large: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination whose machine is gone says nothing: the source need not wait for a time limit."""
    monkeypatch.setattr(transfer, "SOCKET_TIMEOUT_S", 60.0)
    await large.grant(list(range(BLOCKS)))
    with await asyncio.to_thread(read_on_one_connection, large):
        await until(large.source, "2 buffers")
        await asyncio.sleep(0.5)  # By now the connection takes no more, and the source waits.
        await large.source_client.order(5, op="revoke", token="t")
        await until(large.source, "1 connections, 0 grants")
        await until(large.source, "0 buffers")


class StallingSource(FaultySource):
    """Sends what it has, then nothing, without ending the connection."""

    def __init__(self, reply: bytes, every_s: float | None = None) -> None:
        self.go = threading.Event()
        self._every_s = every_s
        super().__init__(reply, LARGE_BLOCK)

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection, contextlib.suppress(OSError):
            receive_message(connection)
            send_message(connection, {"block_bytes": self._block_bytes})
            receive_message(connection)
            send_message(connection, {"bytes": BLOCKS * LARGE_BLOCK})
            connection.sendall(self._reply)
            while not self.go.wait(self._every_s):
                connection.sendall(b"x")

    def close(self) -> None:
        self.go.set()
        super().close()


def chunk_of(byte: bytes) -> bytes:
    data = byte * CHUNK_BYTES_MAX
    return struct.pack(">II", len(data), zlib.crc32(data)) + data


@pytest.mark.parametrize("every_s", [None, 0.02])
async def test_a_destination_lets_go_of_a_source_that_stalls_or_trickles(large: Pair, every_s: float | None) -> None:
    stalling = StallingSource(chunk_of(b"a") + chunk_of(b"b") + chunk_of(b"c")[:999], every_s)
    try:
        with pytest.raises(TransferError, match="too long"):
            await large.pull(list(range(BLOCKS)), list(range(BLOCKS)), port=stalling.port)
        assert "0 sources, 0 buffers" in repr(large.destination)
        assert overlap_threads() == 0
        assert large.destination_store.blocks[:4] == [b"a" * LARGE_BLOCK] * 2 + [b"b" * LARGE_BLOCK] * 2
    finally:
        stalling.close()


async def test_giving_up_ends_a_pull_at_once_and_nothing_is_written_afterwards(
    large: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SOCKET_TIMEOUT_S", 60.0)
    stalling = StallingSource(chunk_of(b"a") + chunk_of(b"b"))
    try:
        pull = asyncio.create_task(large.pull(list(range(BLOCKS)), list(range(BLOCKS)), port=stalling.port))
        await until(large.destination, "2 buffers")
        await large.destination_client.order(1, op="close", migration="m")
        with pytest.raises(TransferError):
            await pull
        assert "0 sources, 0 buffers" in repr(large.destination)
        assert overlap_threads() == 0
    finally:
        stalling.close()


async def test_no_chunk_is_written_after_one_that_was_bad(large: Pair) -> None:
    bad = struct.pack(">II", CHUNK_BYTES_MAX, 1) + b"b" * CHUNK_BYTES_MAX
    stalling = StallingSource(chunk_of(b"a") + bad + chunk_of(b"c") + chunk_of(b"d"))
    before = list(large.destination_store.blocks)
    try:
        with pytest.raises(TransferError, match=r"checksum|too long"):
            await large.pull(list(range(BLOCKS)), list(range(BLOCKS)), port=stalling.port)
        assert large.destination_store.blocks[2:] == before[2:]
    finally:
        stalling.close()


async def test_an_agent_that_closes_in_mid_transfer_leaves_nothing(large: Pair) -> None:
    make_slow(large.source_store, 0.03)
    await large.grant(list(range(BLOCKS)))
    pull = asyncio.create_task(large.pull(list(range(BLOCKS)), list(range(BLOCKS))))
    await until(large.source, "2 buffers")
    await asyncio.to_thread(large.source.close)
    with pytest.raises(TransferError):
        await pull
    assert overlap_threads() == 0


async def test_threads_are_prepared_before_they_serve() -> None:
    prepared: list[str] = []
    agent = KvAgent(MemoryStore(), CONTROL, HOST, lambda: prepared.append(threading.current_thread().name))
    agent.close()
    assert prepared == ["kvferry-accept"]


@pytest.mark.parametrize(
    "order", [{"op": "grant"}, {"op": "grant", "token": "t", "blocks": [16], "ttl_s": 1}, {"op": "pull", "blocks": [1]}]
)
async def test_a_malformed_order_is_refused_and_the_next_one_served(pair: Pair, order: dict[str, Any]) -> None:
    with pytest.raises(TransferError, match=r"malformed|does not exist|list of integers"):
        await pair.source_client.order(5, **order)
    await pair.grant([1])


async def test_a_stranger_cannot_make_an_agent_hold_much(pair: Pair) -> None:
    with socket.create_connection((HOST, pair.source.port)) as connection:
        connection.settimeout(5)
        connection.sendall(struct.pack(">I", transfer.HELLO_BYTES_MAX + 1))
        assert connection.recv(1) == b""
    with socket.create_connection((HOST, pair.source.port)) as connection:
        connection.settimeout(5)
        body = b"[" * 4000
        connection.sendall(struct.pack(">I", len(body)) + body)
        assert connection.recv(1) == b""
    await pair.grant([1])
