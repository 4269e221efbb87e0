"""Clients of other versions of HTTP are served as far as HTTP/1.1 allows."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import weakref

import httptools
import pytest

from gateway.request_parser import RequestParser
from tests.conftest import Running, StartGateway, chat_body
from tests.fake_instance import Exchange, instances
from tests.scripts import normal
from tests.test_fidelity import connected

JSON = b"content-type: application/json\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def chat(version: bytes, headers: bytes = b"", path: bytes = b"/v1/chat/completions", **fields: object) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    head = b"POST %s HTTP/%s\r\nhost: x\r\n%s%scontent-length: %d\r\n\r\n" % (path, version, JSON, headers, len(body))
    return head + body


async def reply(running: Running, *pieces: bytes) -> tuple[bytes, bytes]:
    """Head and body of the reply, which ends with the connection."""
    async with connected(running) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)  # So that it is read by itself; if not, the test shows less.
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            return head, await reader.read()


async def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_its_connection(
    start_gateway: StartGateway,
) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        expected = await running.stream()
        for headers in (b"", b"Connection: keep-alive\r\nExpect: 100-continue\r\n"):
            head, body = await reply(running, chat(b"1.0", headers, stream=True))
            assert b" 200 " in head
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert normal(body) == normal(expected)


async def test_a_reply_in_one_piece_to_a_client_of_http_1_0_has_its_length(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for path, status in ((b"/v1/chat/completions", b" 200 "), (b"/v1/nothing", b" 404 ")):
            head, body = await reply(running, chat(b"1.0", path=path))
            assert status in head
            assert b"content-length: %d\r\n" % len(body) in head
            assert json.loads(body)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wish_for_another_protocol_is_ignored(stream: bool, start_gateway: StartGateway) -> None:
    request = chat(b"1.1", UPGRADE, stream=stream)
    cut = request.index(b"\r\n\r\n") + 10
    async with instances("a") as (a,), start_gateway(a) as running:
        last = chat(b"1.1", b"Connection: close\r\n", stream=stream)
        for pieces in (
            [request, request, last],
            [request + request + last],
            [request[:30], request[30:cut], request[cut:] + last],
        ):
            a.received.clear()
            _, rest = await reply(running, *pieces)
            wished = b"".join(pieces).count(UPGRADE)
            assert rest.count(b"HTTP/1.1 200 OK") == wished
            assert [received.json["messages"] for received in a.received] == [chat_body()["messages"]] * (wished + 1)
            assert not any({"upgrade", "http2-settings"} & set(received.headers) for received in a.received)


async def test_a_web_socket_is_answered_as_the_plain_request_that_it_is(start_gateway: StartGateway) -> None:
    socket = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n"
    async with instances("a") as (a,), start_gateway(a) as running, connected(running) as (reader, writer):
        writer.write(b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\n" + socket + b"\r\n")
        assert b" 404 " in await asyncio.wait_for(reader.readline(), 10)
    assert not a.received


class Told:
    """What a parser calls, as uvicorn's protocol keeps it."""

    def __init__(self) -> None:
        self.url, self.headers, self.requests = b"", list[tuple[bytes, bytes]](), list[tuple[object, ...]]()
        self.body = b""
        self.parser = RequestParser(self)

    def on_message_begin(self) -> None:
        self.url, self.headers, self.body = b"", [], b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.kept = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.requests.append((self.parser.get_method(), self.url, self.headers, self.body, self.kept))


CHUNKED = b"POST /b?c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n%s\r\n3\r\nabc\r\n0\r\n\r\n"
GET = b"GET /d HTTP/1.1\r\n%s\r\n"
MANY = (GET % UPGRADE) * 3000


@pytest.mark.parametrize("cut", [1, 7, 10_000_000])
def test_a_request_is_the_same_with_the_wish_and_without(cut: int) -> None:
    wish, plain = Told(), Told()
    for told, more in ((wish, UPGRADE), (plain, b"")):
        data = (
            GET % more
            + CHUNKED % more
            + GET % (b"Connection: close, upgrade\r\nUpgrade: h2c\r\n" if more else b"Connection: close\r\n")
        )
        for at in range(0, len(data), cut):
            told.parser.feed_data(data[at : at + cut])
    assert wish.requests == plain.requests
    assert [kept for *_, kept in wish.requests] == [True, True, False]


def test_wishes_without_end_are_no_depth() -> None:
    told = Told()
    told.parser.feed_data(MANY)
    assert len(told.requests) == 3000


def test_a_connection_that_has_ended_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        told = Told()
        told.parser.feed_data(CHUNKED % UPGRADE)
        freed = weakref.ref(told)
        told.parser.close()
        del told.parser  # As uvicorn does.
        del told
        assert freed() is None
    finally:
        gc.enable()


def test_a_tunnel_is_no_such_wish() -> None:
    with pytest.raises(httptools.HttpParserUpgrade):
        Told().parser.feed_data(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\nabc")


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/tokenize"])
@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("length", [b"5", b"5000000"])
async def test_a_reply_without_a_body_says_nothing_of_its_length(
    path: bytes, status: bytes, length: bytes, start_gateway: StartGateway
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 " + status + b"\r\ncontent-length: " + length + b"\r\nx-note: 1\r\n\r\n")

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        head, body = await reply(running, chat(b"1.1", b"connection: close\r\n", path))
        assert head.startswith(b"HTTP/1.1 " + status)
        assert b"x-note: 1" in head
        assert not re.search(b"content-length|transfer-encoding", head)
        assert body == b""
