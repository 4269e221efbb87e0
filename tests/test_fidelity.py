"""What the gateway does not have to change comes through as it was sent, however it was sent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.openai import sse
from tests.conftest import Running, StartGateway, chat_body
from tests.fake_instance import Exchange, Generation, Script, error_body, instances
from tests.scripts import answers

JSON = {"content-type": "application/json"}
MIB = 1024 * 1024

# A family emoji of several code points, text that looks like framing, and every way to end a line.
ODD_STREAM = (
    'data: {"choices":[{"index":0,"delta":{"content":"你好 👩‍👩‍👧 naïve"}}]}\n\n: ping\n\n'
    'data:{"choices":[{"index":0,"delta":{"content":"data: x\\n\\ndata: y"}}]}\r\n\r\n'
    'id: 7\rretry: 5\rdata: {"choices":\rdata: []}\r\r'
    'event: odd\ndata: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    "data: [DONE]"
).encode()

TOOLS = b'{"index":0,"delta":{"tool_calls":[{"index":%d,"function":{"arguments":"%s"}}]},"finish_reason":null}'
CHOICES = [
    b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
    b'{"index":0,"delta":{"reasoning":"hm","reasoning_content":null}}',
    b'{"index":0,"delta":{}}',
    b'{"index":0,"delta":{"refusal":"no"},"zz_future":{"a":[1, null]}}',
    *(TOOLS % part for part in ((0, b'{\\"a'), (1, b"{}"), (0, b'\\":1}'))),
    b'{"index":0,"delta":{"content":"x"},"logprobs":{"content":[{"token":"x","logprob":-Infinity}]}}',
    '{"index":0,"delta":{"content":"\u2028\\ud83d\\ude00\\u0000"}, "n" : 1.0}'.encode(),
    b'{"index":0,"delta":{"content":""},"finish_reason":"stop","stop_reason":null,"logprobs":{"content":[]}}',
]


@contextlib.asynccontextmanager
async def connected(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A socket to the gateway, for what no client library would send."""
    url = httpx.URL(running.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def test_events_are_the_same_however_their_bytes_are_cut(start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start()
        for part in parts:
            await exchange.send(part)
            await asyncio.sleep(0)
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        cuts = [[ODD_STREAM[:at], ODD_STREAM[at:]] for at in range(3, len(ODD_STREAM), 7)]
        for parts in ([ODD_STREAM], [bytes([byte]) for byte in ODD_STREAM], *cuts):
            assert await running.stream() == ODD_STREAM + b"\n\n", parts[0]


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"n": 2}])
async def test_no_field_of_an_event_is_lost(fields: dict[str, object], start_gateway: StartGateway) -> None:
    blocks = [b'data: {"id":"x","created":1,"choices":[' + choice + b"]}\n\n" for choice in CHOICES]
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = answers(*blocks)
        assert await running.stream(**fields) == b"".join([*blocks, b"data: [DONE]\n\n"])


async def test_a_reply_in_one_piece_is_not_written_anew(start_gateway: StartGateway) -> None:
    body = b'{"choices": [' + b" , ".join(CHOICES) + b'],\r\n"usage":{"prompt_tokens":1e1}}\n'

    async def script(exchange: Exchange) -> None:
        await exchange.start(content_type="application/json")
        await exchange.send(body[:100], body[100:])
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        response = await running.chat()
        assert response.content == body
        assert response.headers["content-length"] == str(len(body))
        assert "transfer-encoding" not in response.headers


@pytest.mark.slow
async def test_a_large_reply_is_forwarded_whole(start_gateway: StartGateway) -> None:
    body = b'{"text":"' + b"x" * (64 * MIB) + b'"}'

    async def script(exchange: Exchange) -> None:
        headers = {"content-length": str(len(body))}
        await exchange.start(200, headers, content_type="application/json", chunked=False)
        await exchange.raw(body)

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        assert (await running.chat()).content == body


@pytest.mark.slow
async def test_an_event_over_the_bound_ends_the_stream_honestly(start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(*Generation(exchange.request).upto(2), b"data: {")
        for _ in range(sse.BLOCK_BYTES_MAX // MIB):
            await exchange.send(b"x" * MIB)
        await exchange.client_gone.wait()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        *_, last = (await running.stream()).removesuffix(b"\n\n").split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 502


@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressed_reply_is_passed_on_as_it_is(stream: bool, start_gateway: StartGateway) -> None:
    """It was not asked for; whoever put it there, the client can read it."""
    content = b'data: {"choices":[]}\n\ndata: [DONE]\n\n' if stream else b'{"choices":[]}'
    packed = gzip.compress(content)

    async def script(exchange: Exchange) -> None:
        headers = {"content-length": str(len(packed)), "content-encoding": "gzip"}
        kind = "text/event-stream" if stream else "application/json"
        await exchange.start(200, headers, content_type=kind, chunked=False)
        await exchange.raw(packed)

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        response = await running.chat(stream=stream)
        assert (response.status_code, response.content) == (200, content)
        assert a.received[0].headers["accept-encoding"] == "identity"


async def test_a_large_body_passes_with_a_length_and_without(start_gateway: StartGateway) -> None:
    body = json.dumps(chat_body(image="x" * (20 * MIB))).encode()

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(body), MIB):
            yield body[at : at + MIB]

    async with instances("a") as (a,), start_gateway(a) as running:
        for content in (body, parts()):
            response = await running.client.post("/v1/chat/completions", content=content, headers=JSON)
            assert response.status_code == 200
        for received in a.received:
            assert received.json == json.loads(body)
            assert "transfer-encoding" not in received.headers


async def test_a_client_that_waits_for_100_continue_is_told_to_go_on(start_gateway: StartGateway) -> None:
    body = json.dumps(chat_body()).encode()
    async with instances("a") as (a,), start_gateway(a) as running, connected(running) as (reader, writer):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert b" 100 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.write(body)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
        assert "expect" not in a.received[0].headers


async def test_a_request_of_two_lengths_is_a_400(start_gateway: StartGateway) -> None:
    both = b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    twice = b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} "
    async with instances("a") as (a,), start_gateway(a) as running:
        for rest in (both, twice):
            async with connected(running) as (reader, writer):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + rest)
                assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
        assert not a.received


SECRETS = b'"kv_transfer_params": {"remote_host":"10.0.0.7","remote_block_ids":[3],"more":{"x":"}"}}'


def transfers(stream: bool) -> tuple[Script, bytes]:
    """A script that tells how its KV connector is reached, and the reply without it."""
    said = b'{"text":"{\\"kv_transfer_params\\":{}}",%s,"choices":[],"ec_transfer_params":%s}'
    told, expected = said % (SECRETS, b'{"a":{}}'), said % (b'"kv_transfer_params": null', b"null")

    async def script(exchange: Exchange) -> None:
        if stream:
            await answers(sse.encode(told))(exchange)
        else:
            await exchange.start(content_type="application/json", chunked=False)
            await exchange.raw(told)

    return script, sse.encode(expected) + sse.DONE if stream else expected


@pytest.mark.parametrize("stream", [False, True])
async def test_how_the_engine_is_reached_is_not_told(stream: bool, start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script, expected = transfers(stream)
        assert (await running.chat(stream=stream)).content == expected


@pytest.mark.parametrize("kind", ["text/plain", "text/html; charset=utf-8"])
async def test_a_refusal_that_is_not_json_keeps_its_kind(kind: str, start_gateway: StartGateway) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start(422, content_type=kind)
        await exchange.send(b"no \xff")
        await exchange.finish()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = script
        for stream in (False, True):
            response = await running.chat(stream=stream)
            assert (response.status_code, response.content) == (422, b"no \xff")
            assert response.headers["content-type"] == kind
        assert not b.received


async def test_half_a_character_is_quoted_back_without_harm(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        for content in (
            b'{"model":"\\ud800"}',
            b'{"vllm_xargs":{"kvferry_\\ud800":1}}',
            b'{"model":"%s"}' % (b"x" * MIB),
        ):
            response = await running.client.post("/v1/completions", content=content, headers=JSON)
            assert response.status_code == 400
            assert set(response.json()) == set(error_body("", "", 400))
            assert len(response.content) < 1000
        assert (await running.admin("GET", "/admin/requests")).status_code == 200
        assert not a.received


async def test_a_header_that_is_no_text_passes_as_it_is(start_gateway: StartGateway) -> None:
    note = "\u6f22 caf\u00e9"

    async def script(exchange: Exchange) -> None:
        await exchange.json(200, {"ok": 1}, {"x-note": note})

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = script
        response = await running.chat()
        assert response.status_code == 200, response.text
        raw = dict(response.headers.raw)
        assert raw[b"x-note"] == note.encode()
