"""The token path's own HTTP client, against a server of which every byte is ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway import connection
from gateway.connection import BUFFERED_BYTES_MAX, ConnectFailed, ConnectionEnded, Pool, Response

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Pool]:
    """``answer`` is called for every request, until it raises or closes."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while not writer.is_closing():
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                    await reader.readexactly(length)
                    await answer(reader, writer)
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", 4, 5, 5)
    try:
        yield pool
    finally:
        pool.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # The last transports close.


def says(*pieces: bytes, close: bool = False) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if close:
            writer.close()

    return answer


async def ask(pool: Pool, body: bytes = b"{}") -> Response:
    return await pool.request("POST", "/x", [("a", "b")], body)


async def read_all(response: Response) -> bytes:
    data = b""
    async with asyncio.timeout(10):
        while part := await response.readany():
            data += part
    return data


@pytest.mark.parametrize(
    ("pieces", "close"),
    [
        ([CHUNKED, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"], False),
        ([HEAD + b"content-length: 5\r\n\r\nab", b"cde"], False),
        ([HEAD + b"content-length: 5\r\nconnection: close\r\n\r\nabcde"], True),
        ([HEAD + b"\r\nabc", b"de"], True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"5\r\nabcde\r\n0\r\n\r\n"], False),
        ([bytes([byte]) for byte in CHUNKED + b"5\r\nabcde\r\n0\r\n\r\n"], False),
    ],
)
async def test_a_reply_ends_where_it_says(pieces: list[bytes], close: bool) -> None:
    async with serving(says(*pieces, close=close)) as pool:
        for _ in range(2):  # The second one on the same connection, where that can be.
            response = await ask(pool)
            assert (response.status, await read_all(response)) == (200, b"abcde")
        assert len(pool._idle) == (0 if close else 1)
        assert not pool._used


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED, b"3\r\nabc\r\n", b"ff\r\nde"],
        [HEAD + b"content-length: 9\r\n\r\nabcde"],
        [CHUNKED + b"5\r\nabcde\r\n" + b"no chunk\r\n"],
    ],
)
async def test_what_came_before_the_end_is_read_before_the_end_is_told(pieces: list[bytes]) -> None:
    async with serving(says(*pieces, close=True)) as pool:
        response = await ask(pool)
        data = [await response.readany()]
        with pytest.raises(ConnectionEnded):  # noqa: PT012
            while part := await response.readany():
                data.append(part)
        assert b"".join(data) in (b"abcde", b"abc")
        assert not pool._used


@pytest.mark.parametrize(
    "piece",
    [b"SSH-2.0\r\n", b"", b"HTTP/1.1 999 X\r\n\r\n", HEAD + b"x: " + b"y" * 70_000, HEAD + b"x: y\r\n" * 20_000],
)
async def test_what_is_no_reply_is_an_error(piece: bytes) -> None:
    async with serving(says(piece, close=True)) as pool:
        with pytest.raises(ConnectionEnded):
            await ask(pool)
        assert not pool._used


async def test_a_second_reply_to_one_request_costs_the_connection() -> None:
    async with serving(says(HEAD + b"content-length: 1\r\n\r\na" + HEAD + b"content-length: 1\r\n\r\nb")) as pool:
        response = await ask(pool)
        assert await read_all(response) == b"a"
        assert (await read_all(await ask(pool))) == b"a"
        assert not pool._used


async def test_a_slow_reader_makes_the_server_wait() -> None:
    sent = 0

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536
            await writer.drain()

    async with serving(endless) as pool:
        response = await ask(pool)
        while not response._size >= BUFFERED_BYTES_MAX:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert response._size < BUFFERED_BYTES_MAX + 1024 * 1024
        before = sent
        for _ in range(200):
            await response.readany()
        assert sent > before
        response.close()


async def test_a_large_body_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PIECE_BYTES", 1000)
    async with serving(says(HEAD + b"content-length: 0\r\n\r\n")) as pool:
        for size in (999, 1000, 1001, 3_000_000):
            assert await read_all(await ask(pool, b"x" * size)) == b""
        assert len(pool._idle) == 1


async def test_a_reply_that_is_left_takes_its_connection_with_it() -> None:
    async with serving(says(CHUNKED + b"3\r\nabc\r\n")) as pool:
        response = await ask(pool)
        response.close()
        response.close()
        assert (len(pool._used), len(pool._idle)) == (0, 0)


async def test_a_sink_is_asked_first_and_what_it_leaves_is_read() -> None:
    go_on = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for piece in (b"1\r\na\r\n", b"1\r\nb\r\n", b"1\r\nX\r\n"):
            await go_on.wait()
            go_on.clear()
            writer.write(piece)
        writer.write(b"0\r\n\r\n")

    taken: list[bytes] = []

    def sink(data: bytes) -> bool:
        if data == b"X":
            return False
        taken.append(data)
        go_on.set()
        return True

    async with serving(answer) as pool:
        response = await ask(pool)
        go_on.set()
        await response.wait(sink)
        assert (taken, response.take()[:1]) == ([b"a", b"b"], b"X")
        assert await read_all(response) == b""


async def test_a_server_that_is_not_there_is_told_from_one_that_fails() -> None:
    async with serving(says()) as pool:
        port = pool._port
    with pytest.raises(ConnectFailed):
        await ask(Pool(f"http://127.0.0.1:{port}", 1, 5, 5))


async def test_no_header_can_bring_a_line_of_its_own() -> None:
    async with serving(says()) as pool:
        with pytest.raises(AssertionError):
            await pool.request("POST", "/x", [("a", "b\r\nc: d")], b"")


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize(
    ("framing", "kept"),
    [
        (b"", True),
        (b"content-length: 0\r\n", True),
        (b"content-length: 5\r\n", False),
        (b"transfer-encoding: chunked\r\n", False),
    ],
)
@pytest.mark.parametrize("body", [b"", b"hello"])
async def test_a_reply_that_has_no_body_ends_with_its_head_whatever_it_says(
    status: bytes, framing: bytes, kept: bool, body: bytes
) -> None:
    async with serving(says(b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n" + body)) as pool:
        for _ in range(3):
            response = await ask(pool)
            assert await read_all(response) == b""
        assert not pool._used
        assert any(connection.usable for connection in pool._idle) == (kept and not body)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_connection_that_is_asked_again_before_its_last_asker_wakes_answers_both(leaves: bool) -> None:
    """A reply that comes in one read frees its connection while the task that has asked still has to run."""
    async with serving(says(HEAD + b"content-length: 2\r\n\r\nok")) as pool, asyncio.timeout(10):
        asked = asyncio.create_task(ask(pool))
        while not pool._idle:  # Looked at in every turn of the loop, so before the other task's.
            await asyncio.sleep(0)
        again = ask(pool)
        waits_for = again.send(None)
        waits_for._asyncio_future_blocking = False
        if leaves:
            asked.cancel()
            await asyncio.wait({asked})
        else:
            assert await read_all(await asked) == b"ok"
        await asyncio.wait({waits_for})
        with pytest.raises(StopIteration) as answered:
            again.send(None)
        assert await read_all(answered.value.value) == b"ok"
        assert not pool._used


async def test_an_end_that_we_make_completes_no_reply() -> None:
    """One without a length ends with its connection; but not when it is the gateway that ends it."""
    async with serving(says(HEAD + b"\r\nabc")) as pool:
        response = await ask(pool)
        assert await response.readany() == b"abc"
        pool.close()
        with pytest.raises(ConnectionEnded):
            await response.readany()


async def test_a_connection_whose_request_is_not_all_sent_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PIECE_BYTES", 2**30)  # In one write, and more than the kernel holds.

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"content-length: 2\r\n\r\nok")
        await read_on.wait()
        writer.transport.abort()
        left.set()

    read_on, left = asyncio.Event(), asyncio.Event()

    server = await asyncio.start_server(early, "127.0.0.1", 0, limit=1024)
    pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 4, 5, 5)
    try:
        assert await read_all(await ask(pool, b"x" * 32 * 1024 * 1024)) == b"ok"
        assert not pool._idle
    finally:
        pool.close()
        server.close()
        read_on.set()
        await left.wait()
        await asyncio.sleep(0.01)  # The last transport closes.
