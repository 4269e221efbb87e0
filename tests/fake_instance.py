"""A scripted stand-in for a vLLM server with its llumlet: real HTTP over a real socket, every byte under control.

It generates ``max_tokens`` tokens, token number i being ``FIRST_TOKEN_ID + i`` with the text `` wI``, in the very bytes
that vLLM 0.32 sends. A test replaces ``script`` to do anything else with a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote

from gateway import wire

SECRET = "cluster-secret"
MODEL = "kvferry-test"
FIRST_TOKEN_ID = 1000
PROMPT_TOKEN_IDS = [1, 2, 3]
REPORT_INTERVAL_S = 0.05


@dataclass(slots=True)
class Received:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    raw_headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def resume_id(self) -> str | None:
        return self.headers.get(wire.RESUME_HEADER)


class Exchange:
    """One request and its reply, to be written step by step."""

    def __init__(self, instance: FakeInstance, request: Received, writer: asyncio.StreamWriter) -> None:
        self.instance = instance
        self.request = request
        self.boot_id = instance.boot_id
        """Of the life that answers."""
        self.client_gone = asyncio.Event()
        self._writer = writer
        self._chunked = False
        self._one_byte_writes = False

    async def start(
        self,
        status: int = 200,
        headers: dict[str, str] | None = None,
        *,
        content_type: str = "text/event-stream; charset=utf-8",
        chunked: bool = True,
    ) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", "connection: close"]
        lines += [f"{wire.BOOT_HEADER}: {self.boot_id}"] if self.instance.has_plugin else []
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._chunked = chunked
        lines += ["transfer-encoding: chunked"] if chunked else []
        await self.raw(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def send(self, *parts: bytes) -> None:
        """Body bytes, each part one chunk."""
        for part in parts:
            await self.raw(f"{len(part):x}\r\n".encode() + part + b"\r\n" if self._chunked else part)

    async def raw(self, data: bytes) -> None:
        await self.instance.runs.wait()
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def finish(self) -> None:
        if self._chunked:
            await self.raw(b"0\r\n\r\n")

    async def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        await self.start(
            status,
            {"content-length": str(len(body)), **(headers or {})},
            content_type="application/json",
            chunked=False,
        )
        await self.raw(body)

    async def cut(self) -> None:
        """A chunk that promises more than comes, and then the end of the connection."""
        await self.raw(b"ff\r\ndata: {")

    async def reset(self) -> None:
        """RST instead of FIN."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


class Generation:
    """The events of one reply, as vLLM writes them."""

    def __init__(self, request: Received, created: int = 1_700_000_000) -> None:
        body = request.json
        self.chat = request.path == "/v1/chat/completions"
        self.tokens = int(body.get("max_tokens") or 8)
        self.shows_ids = bool(body.get("return_token_ids"))
        options = body.get("stream_options") or {}
        self.usage_asked = bool(options.get("include_usage"))
        self.usage_runs = bool(options.get("continuous_usage_stats"))
        self.created = created
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + request.headers.get(wire.REQUEST_ID_HEADER, "none")

    def role(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        prompt = {"prompt_token_ids": self._ids(PROMPT_TOKEN_IDS), "prompt_text": None}
        return self._event([choice], self._running(0) | prompt)

    def token(self, index: int) -> bytes:
        last = index == self.tokens - 1
        ids = self._ids([FIRST_TOKEN_ID + index])
        choice: dict[str, Any]
        if self.chat:
            choice = {"index": 0, "delta": {"content": text(index)}, "logprobs": None}
            choice |= {"finish_reason": "length", "stop_reason": None} if last else {"finish_reason": None}
            choice["token_ids"] = ids
        else:
            choice = {"index": 0, "text": text(index), "logprobs": None, "finish_reason": "length" if last else None}
            prompt_ids = self._ids(PROMPT_TOKEN_IDS) if index == 0 else None
            choice |= {"stop_reason": None, "prompt_token_ids": prompt_ids, "token_ids": ids}
        return self._event([choice], self._running(index + 1))

    def rest(self, begin: int | None = None) -> list[bytes]:
        """What follows ``begin`` tokens, [DONE] included; without ``begin`` the whole, which has the role."""
        blocks = [self.role()] if self.chat and begin is None else []
        begin = begin or 0
        blocks += [self.token(index) for index in range(begin, self.tokens)]
        if self.usage_asked:
            blocks.append(self._event([], {"usage": _usage(self.tokens)}))
        return [*blocks, b"data: [DONE]\n\n"]

    def upto(self, end: int) -> list[bytes]:
        """The first ``end`` tokens' events."""
        return ([self.role()] if self.chat else []) + [self.token(index) for index in range(end)]

    def whole(self) -> dict[str, Any]:
        content = "".join(text(index) for index in range(self.tokens))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": content}} if self.chat else {"text": content}
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": MODEL,
            "choices": [choice],
            "usage": _usage(self.tokens),
        }

    def _running(self, tokens: int) -> dict[str, Any]:
        return {"usage": _usage(tokens)} if self.usage_runs else {}

    def _ids(self, ids: list[int]) -> list[int] | None:
        return ids if self.shows_ids else None

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        value = {"id": self.id, "object": kind, "created": self.created, "model": MODEL, "choices": choices, **more}
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _usage(tokens: int) -> dict[str, int]:
    prompt = len(PROMPT_TOKEN_IDS)
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


def text(index: int) -> str:
    return f" w{index}"


def token_ids(begin: int, end: int) -> list[int]:
    return [FIRST_TOKEN_ID + index for index in range(begin, end)]


async def generate(exchange: Exchange) -> None:
    """The default script: all at once, or what follows a resume."""
    instance, request = exchange.instance, exchange.request
    generation = Generation(request, instance.created)
    begin: int | None = None
    headers: dict[str, str] = {}
    if request.resume_id is not None:
        resumed = await instance.resumed(request.resume_id)
        if resumed is None:
            await exchange.json(410, error_body("The migration was aborted.", "Gone", 410))
            return
        begin = resumed
        headers = {wire.RESUMED_HEADER: wire.encode_resumed_header(request.resume_id, resumed)}
    if request.json.get("stream"):
        await exchange.start(200, headers)
        await exchange.send(*generation.rest(begin))
        await exchange.finish()
    else:
        await exchange.json(200, generation.whole(), headers)


def error_body(message: str, kind: str, code: int | str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class FakeInstance:
    instance_id: str
    boot_id: str = "boot-1"
    models: tuple[str, ...] = (MODEL,)
    card_changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By model: what its card says otherwise."""
    script: Script = generate
    created: int = 1_700_000_000
    freeness_steps: float = 1000.0
    report_changes: dict[str, Any] = field(default_factory=dict)
    has_plugin: bool = True
    metrics: str | None = None
    """The page at ``/metrics``."""
    asleep: bool | None = None
    """``None``: it has no such route."""
    control_headers: deque[tuple[str, dict[str, str]]] = field(default_factory=lambda: deque(maxlen=1_000))
    """Path and headers of the requests that are not under /v1."""
    health_status: int = 200
    hangs: bool = False
    """Takes requests for its status, and says nothing."""
    engine_busy: bool = False
    """In a long step: its reports and its status wait, and what needs no engine is answered."""
    runs: asyncio.Event = field(default_factory=_set)
    """Cleared: as a process under SIGSTOP, with its connections open. Set again: SIGCONT."""
    draining: bool = False
    requests: list[wire.RequestStatus] = field(default_factory=list)
    """As its status lists them."""
    drain_status: int = 200
    resets_resumes: bool = False
    migrate: Callable[[wire.MigrateOrder], Awaitable[tuple[int, Any]]] | None = None
    received: list[Received] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    resumes: dict[str, wire.Resume] = field(default_factory=dict)
    pairings: list[wire.Pairing | None] = field(default_factory=list)
    fence: int = 0
    """The newest lease that it has had an order of."""
    fences: deque[int | None] = field(default_factory=lambda: deque(maxlen=1_000))
    """Of every order about a pairing, refused ones too."""
    url: str = ""
    _migrations: dict[str, asyncio.Future[int | None]] = field(default_factory=dict)
    _sequence: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def listen(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """All connections end, as if the process had."""
        assert self._server is not None
        self._server.close()
        await _turns()  # What was accepted just now is among the connections then.
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await _turns()  # And their sockets are closed.
        await self._server.wait_closed()

    def commit(self, migration_id: str, output_tokens: int) -> None:
        """This instance now has the request; its resumed leg goes on from there."""
        self._migration(migration_id).set_result(output_tokens)

    def abort(self, migration_id: str) -> None:
        self._migration(migration_id).set_result(None)

    async def resumed(self, resume_id: str) -> int | None:
        """How many tokens a resumed leg follows on; ``None`` if there is nothing to resume."""
        if resume_id in self.resumes:
            return len(self.resumes[resume_id].output_token_ids)
        return await self._migration(resume_id)

    async def exchange(self, index: int = 0) -> Exchange:
        """The index-th request of a client, once it is there."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: len(self.exchanges) > index), 10)
        return self.exchanges[index]

    def report(self) -> dict[str, Any]:
        self._sequence += 1
        report = wire.Report(
            instance_id=self.instance_id,
            boot_id=self.boot_id,
            sequence=self._sequence,
            models=list(self.models),
            vllm_version="0.32.0",
            plugin_version="0",
            protocol_version=wire.PROTOCOL_VERSION,
            kv_format="format-1",
            kv_reason=None,
            block_size=16,
            blocks_total=1000,
            blocks_free=1000,
            blocks_reserved=0,
            requests_running=sum(request.state != "waiting" for request in self.requests),
            requests_waiting=sum(request.state == "waiting" for request in self.requests),
            requests_running_max=256,
            running_by_priority={},
            waiting_by_priority={},
            virtual_usage_blocks=None if self.draining else 1000 - self.freeness_steps / 16,
            freeness_steps=None if self.draining else self.freeness_steps,
            head_of_line_blocks=0,
            queued_blocks=0,
            step_ms=10.0,
            draining=self.draining,
            migrations_in=0,
            migrations_out=0,
            fence=self.fence,
        )
        return report.to_json() | self.report_changes

    def _migration(self, migration_id: str) -> asyncio.Future[int | None]:
        return self._migrations.setdefault(migration_id, asyncio.get_running_loop().create_future())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None or not self._server.is_serving():  # It was accepted just before the end.
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            request = await _read_request(reader)
            if request is not None:
                await self._answer(request, reader, writer)
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(self, request, writer)
        watching = asyncio.create_task(_watch(reader, exchange))
        try:
            if _is_request(request):
                async with self._changed:
                    self.received.append(request)
                    self.exchanges.append(exchange)
                    self._changed.notify_all()
                await self.script(exchange)
            else:
                await self._control(exchange)
        finally:
            watching.cancel()

    async def _control(self, exchange: Exchange) -> None:
        request = exchange.request
        self.control_headers.append((request.path, request.headers))
        if self.hangs:
            await exchange.client_gone.wait()
            return
        if request.path.startswith("/llumlet/") and not self.has_plugin:
            await exchange.json(404, {"detail": "Not Found"})
            return
        if request.path.startswith("/llumlet/") and request.headers.get(wire.SECRET_HEADER) != SECRET:
            await exchange.json(401, error_body("wrong secret", "Unauthorized", 401))
            return
        path, _, query = request.path.partition("?")
        match request.method, path.split("/")[1:]:
            case "GET", ["health"]:
                await exchange.json(self.health_status, {})
            case "GET", ["metrics"] if self.metrics is not None:
                page = self.metrics.encode()
                await exchange.start(
                    headers={"content-length": str(len(page))}, content_type="text/plain", chunked=False
                )
                await exchange.raw(page)
            case "GET", ["is_sleeping"] if self.asleep is not None:
                await exchange.json(200, {"is_sleeping": self.asleep})
            case "GET", ["v1", "models"]:
                card = {"object": "model", "owned_by": "vllm", "parent": None}
                cards = [{"id": name, "root": name} | card | self.card_changes.get(name, {}) for name in self.models]
                await exchange.json(200, {"object": "list", "data": cards})
            case "GET", ["llumlet", "status"] if self.engine_busy:
                await exchange.client_gone.wait()
            case "GET", ["llumlet", "status"]:
                requests = [request.to_json() for request in self.requests]
                await exchange.json(200, {"report": self.report(), "requests": requests})
            case "POST", ["llumlet", "drain"] if self.drain_status != 200:
                await exchange.json(self.drain_status, error_body("cannot drain", "X", self.drain_status))
            case "POST", ["llumlet", "drain"]:
                self.draining = wire.Drain.from_json(request.json).draining
                await exchange.json(200, {})
            case "GET", ["llumlet", "reports"]:
                await self._stream_reports(exchange)
            case "PUT", ["llumlet", "pairing"]:
                pairing = wire.Pairing.from_json(request.json)
                await self._pair(exchange, pairing, pairing.fence)
            case "DELETE", ["llumlet", "pairing"]:
                name, _, fence = query.partition("=")
                await self._pair(exchange, None, int(fence) if name == wire.FENCE_PARAMETER else None)
            case "PUT", ["llumlet", "resumes", _] if self.resets_resumes:
                await exchange.reset()
            case "PUT", ["llumlet", "resumes", resume_id]:
                self.resumes[unquote(resume_id)] = wire.Resume.from_json(request.json)
                await exchange.json(200, {})
            case "POST", ["llumlet", "migrate"] if self.migrate is not None:
                status, answer = await self.migrate(wire.MigrateOrder.from_json(request.json))
                await exchange.json(status, answer)
            case _:
                await exchange.json(404, error_body("no such route", "NotFoundError", 404))

    async def _pair(self, exchange: Exchange, pairing: wire.Pairing | None, fence: int | None) -> None:
        self.fences.append(fence)
        if fence is not None and fence < self.fence:
            await exchange.json(409, error_body("an older lease", "Conflict", "cannot_move"))
            return
        self.fence = max(self.fence, fence or 0)
        self.pairings.append(pairing)
        await exchange.json(200, {})

    async def _stream_reports(self, exchange: Exchange) -> None:
        await exchange.start(content_type="application/x-ndjson")
        while not exchange.client_gone.is_set():
            if not self.engine_busy:
                await exchange.send(json.dumps(self.report()).encode() + b"\n")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(exchange.client_gone.wait(), REPORT_INTERVAL_S)


async def _turns() -> None:
    """A few of the event loop's."""
    for _ in range(5):
        await asyncio.sleep(0)


def _is_request(request: Received) -> bool:
    """What a client asks for, rather than what a gateway does for itself."""
    if request.method == "GET":
        return request.path.startswith(("/v1/responses/", "/version"))
    return request.method == "POST" and not request.path.startswith("/llumlet/")


async def _watch(reader: asyncio.StreamReader, exchange: Exchange) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read(1)
    exchange.client_gone.set()


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    raw_headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    headers = dict(raw_headers)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, raw_headers, body)


def metrics_page(
    *, running: int = 0, waiting: int = 0, kv_usage: float = 0.0, tokens: int = 0, started: float = 1.5e9
) -> str:
    """As a stock vLLM of one engine writes it, the lines that matter and one that does not."""
    labels = f'engine="0",model_name="{MODEL}"'
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {float(running)}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {float(waiting)}
vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} {kv_usage}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1000"}} 1.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{{labels}}} {float(tokens)}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{{labels}}} 0.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started}
"""


@contextlib.asynccontextmanager
async def instances(*ids: str) -> AsyncIterator[list[FakeInstance]]:
    """The first is by far the freest, so that dispatch begins there."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeInstance(instance_id, freeness_steps=600.0) for instance_id in ids]
        fakes[0].freeness_steps = 15_000.0
        yield [await stack.enter_async_context(fake) for fake in fakes]
