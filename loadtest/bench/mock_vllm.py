"""A stand-in for one vLLM server with its llumlet, as lean as Python allows, for measuring what stands before it.

    python -m loadtest.bench.mock_vllm PORT

Every chat request is answered by a stream of ``max_tokens`` tokens in vLLM 0.32's own bytes, one HTTP chunk an event.
The field ``user`` says how fast: tokens a second, or 0 for as fast as the reader takes them. Each token's text is the
time at which it was written, ``t<CLOCK_MONOTONIC in ns>e``, which means the same in every process of the machine.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
import time
from typing import cast

import httptools
import uvloop

from gateway import wire

MODEL = "bench"
REPORT_INTERVAL_S = 0.1
BURST_EVENTS = 16
"""Written in one go before the next stream's turn."""

_MAX_TOKENS = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_TOKENS_PER_S = re.compile(rb'"user"\s*:\s*"(\d+)"')
_ROLE = (
    b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":'
    b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":%b,"prompt_text":null}\n\n'
)
_TOKEN = (
    b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":'
    b'[{"index":0,"delta":{"content":" t%%018de"},"logprobs":null,"finish_reason":%b,"token_ids":%b}]}\n\n'
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\nx-request-id: %b\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"data: [DONE]\n\n"
_STAMP_DIGITS = 18


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _token_chunk(request_id: bytes, finish: bytes, token_ids: bytes) -> bytes:
    """With a gap for the time, which is always as long: so the chunk's size is known."""
    event = _TOKEN % (request_id, finish, token_ids)
    size = len(event % 0)
    return b"%x\r\n%b\r\n" % (size, event)


class Connection(asyncio.Protocol):
    """One client's connection, with one request after another."""

    def __init__(self, instance_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._instance_id = instance_id
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._url = b""
        self._request_id = b""
        self._writable = True
        self._timer: asyncio.Handle | None = None
        self._sequence = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._timer is None and self._tokens_left and not self._tokens_per_s:
            self._timer = self._loop.call_soon(self._burst)

    # The parser calls these.

    def on_message_begin(self) -> None:
        self._body, self._url, self._request_id = [], b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        match self._url.partition(b"?")[0]:
            case b"/v1/chat/completions":
                self._stream(b"".join(self._body))
            case b"/health":
                self._answer(b"200 OK", b"")
            case b"/v1/models":
                card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL}
                self._answer(b"200 OK", json.dumps({"object": "list", "data": [card]}).encode())
            case b"/llumlet/status":
                self._answer(b"200 OK", json.dumps({"report": self._report(), "requests": []}).encode())
            case b"/llumlet/reports":
                self._transport.write(_STREAM_HEAD % b"reports")
                self._stream_reports()
            case _:
                self._answer(b"404 Not Found", b"{}")

    def _answer(self, status: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    def _report(self) -> dict[str, object]:
        self._sequence += 1
        report = wire.Report(
            instance_id=self._instance_id,
            boot_id=self._instance_id,
            sequence=time.monotonic_ns(),
            models=[MODEL],
            vllm_version="0.32.0",
            plugin_version="0",
            protocol_version=wire.PROTOCOL_VERSION,
            kv_format="mock",
            kv_reason=None,
            block_size=16,
            blocks_total=100_000,
            blocks_free=100_000,
            blocks_reserved=0,
            requests_running=0,
            requests_waiting=0,
            requests_running_max=1024,
            running_by_priority={},
            waiting_by_priority={},
            virtual_usage_blocks=0.0,
            freeness_steps=1_600_000.0,
            head_of_line_blocks=0,
            queued_blocks=0,
            step_ms=10.0,
            draining=False,
            migrations_in=0,
            migrations_out=0,
        )
        return report.to_json()

    def _stream_reports(self) -> None:
        self._transport.write(_chunk(json.dumps(self._report()).encode() + b"\n"))
        self._timer = self._loop.call_later(REPORT_INTERVAL_S, self._stream_reports)

    _tokens_left = 0
    _tokens_per_s = 0

    def _stream(self, body: bytes) -> None:
        """The body is searched from both ends: its fields stand before and after the prompt, which may be long."""
        tokens, speed = _MAX_TOKENS.search(body), _TOKENS_PER_S.search(body)
        shows_ids = b'"return_token_ids":true' in body
        request_id = self._request_id or secrets.token_hex(16).encode()
        self._tokens_left = int(tokens[1]) if tokens else 16
        self._tokens_per_s = int(speed[1]) if speed else 0
        self._token = _token_chunk(request_id, b"null", b"[12345]" if shows_ids else b"null")
        last_ids = b'[12345],"stop_reason":null' if shows_ids else b'null,"stop_reason":null'
        self._last = _token_chunk(request_id, b'"length"', last_ids)
        role = _ROLE % (request_id, b"[1,2,3]" if shows_ids else b"null")
        self._transport.write(_STREAM_HEAD % request_id + _chunk(role))
        if self._tokens_per_s:
            self._due = self._loop.time()
            self._pace()
        else:
            self._burst()

    def _pace(self) -> None:
        """A reader that is slow is none of a server's business: the transport keeps what it does not take."""
        self._timer = None
        self._write(1)
        if self._tokens_left:
            self._due += 1 / self._tokens_per_s
            self._timer = self._loop.call_at(self._due, self._pace)

    def _burst(self) -> None:
        self._timer = None
        self._write(BURST_EVENTS)
        if self._tokens_left and self._writable:
            self._timer = self._loop.call_soon(self._burst)

    def _write(self, events_max: int) -> None:
        events = min(events_max, self._tokens_left)
        self._tokens_left -= events
        data = [self._token % time.monotonic_ns() for _ in range(events if self._tokens_left else events - 1)]
        if not self._tokens_left:
            data += [self._last % time.monotonic_ns(), _chunk(_END), b"0\r\n\r\n"]
        self._transport.write(b"".join(data))

    def _stop(self) -> None:
        self._tokens_left = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def serve(port: int) -> None:
    instance_id = secrets.token_hex(4)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(instance_id), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
