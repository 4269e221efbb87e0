"""The HTTP routes of vLLM and of the llumlet, plain ASGI: one application serves all instances of a process by port."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qs

from gateway import wire
from loadtest.fake_vllm.arrivals import Arrival
from loadtest.fake_vllm.faults import FaultError
from loadtest.fake_vllm.form import Asked, BadRequest, Form, read_body
from loadtest.fake_vllm.instance import Instance, Reply
from loadtest.fake_vllm.llumlet import Llumlet, NoSuchRequest
from loadtest.sim.engine import EngineError, Request
from loadtest.sim.reports import VLLM_VERSION
from vllm_plugin.handshake import Abort, Commit, Refused, Reserve, Stage

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_BYTES_MAX = 64 << 20
GENERATING = {"/v1/chat/completions": True, "/v1/completions": False}
FAULTS_PATH = "/fake/faults"
LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Site:
    """What answers at one port."""

    instance: Instance
    llumlet: Llumlet
    has_plugin: bool = True


class Application:
    def __init__(self, sites: Mapping[int, Site]) -> None:
        self._sites = sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        exchange = Exchange(self._sites[scope["server"][1]], scope, receive, send)
        try:
            await exchange.answer()
        except BadRequest as error:
            await exchange.json(error.status, error.body())
        except Gone:
            return


class Gone(Exception):
    """The client has closed its connection."""


class Exchange:
    """One request and its answer."""

    def __init__(self, site: Site, scope: Scope, receive: Receive, send: Send) -> None:
        self._site = site
        self._instance = site.instance
        self._llumlet = site.llumlet
        self._scope = scope
        self._receive = receive
        self._send = send
        self._method: str = scope["method"]
        self._path: str = scope["path"]
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

    async def answer(self) -> None:
        if self._path == FAULTS_PATH:
            await self._faults()
            return
        faults = self._instance.faults
        await self._instance.unless_hanging()
        if faults.latency_ms > 0:
            await asyncio.sleep(faults.latency_ms / 1000)
        if self._method == "POST" and self._path in GENERATING:
            await self._generate()
        elif self._path.startswith(("/llumlet/", "/fake/")) and self._site.has_plugin:
            await self._control()
        else:
            await self._stock()

    # vLLM's own routes.

    async def _stock(self) -> None:
        engine, identity = self._instance.engine, self._llumlet.identity
        match self._method, self._path:
            case "GET", "/health":
                await self.whole(200, b"", "text/plain")
            case "GET", "/version":
                await self.json(200, {"version": VLLM_VERSION})
            case "GET", "/v1/models":
                cards: list[dict[str, Any]] = [
                    {
                        "id": model,
                        "object": "model",
                        "created": int(self._instance.started_at),
                        "owned_by": "vllm",
                        "root": model,
                        "parent": None,
                        "max_model_len": engine.settings.sequence_tokens_max,
                        "permission": [],
                    }
                    for model in identity.models
                ]
                await self.json(200, {"object": "list", "data": cards})
            case "GET", "/metrics":
                await self.whole(200, metrics_page(self._instance, identity.models[0]).encode(), "text/plain")
            case _:
                await self.json(404, {"detail": "Not Found"})

    # The llumlet's.

    async def _control(self) -> None:
        if not self._has_secret():
            await self.error(401, "the cluster's secret is missing or wrong", "wrong_secret")
            return
        try:
            answer = await self._control_answer()
        except wire.WireError as error:
            await self.error(400, str(error), "bad_message")
        except NoSuchRequest as error:
            await self.error(404, f"no managed request {error} is here", "request_not_found")
        except Refused as error:
            await self.error(409, str(error), "cannot_move")
        else:
            if answer is not None:
                await self.json(200, answer)

    async def _control_answer(self) -> Any:
        llumlet, arrivals = self._llumlet, self._llumlet.arrivals
        match self._method, *self._path.split("/")[1:]:
            case "GET", "llumlet", "status":
                return {**llumlet.status().to_json(), "arrivals": []}
            case "GET", "llumlet", "reports":
                await self._stream_reports()
                return None
            case "PUT", "llumlet", "pairing":
                llumlet.pair(wire.Pairing.from_json(await self._json()))
            case "DELETE", "llumlet", "pairing":
                llumlet.pair(None, self._fence())
            case "POST", "llumlet", "migrate":
                return (await llumlet.migrate(wire.MigrateOrder.from_json(await self._json()))).to_json()
            case "POST", "llumlet", "drain":
                llumlet.draining = wire.Drain.from_json(await self._json()).draining
            case "PUT", "llumlet", "resumes", resume_id:
                arrivals.put_resume(_identifier(resume_id), wire.Resume.from_json(await self._json()))
            case "DELETE", "llumlet", "resumes", resume_id:
                arrivals.delete_resume(_identifier(resume_id))
            case "POST", "llumlet", "migrations", migration_id, "reserve":
                body = Reserve.from_json(await self._json())
                return arrivals.reserve(_identifier(migration_id), body, llumlet.draining)
            case "POST", "llumlet", "migrations", migration_id, "stage":
                return await arrivals.stage(_identifier(migration_id), Stage.from_json(await self._json()))
            case "POST", "llumlet", "migrations", migration_id, "commit":
                return await arrivals.commit(_identifier(migration_id), Commit.from_json(await self._json()))
            case "POST", "llumlet", "migrations", migration_id, "abort":
                arrivals.abort(_identifier(migration_id), Abort.from_json(await self._json()).reason)
            case "POST", "fake", "blocks":
                wanted = BlocksWanted.from_json(await self._json())
                return {"contents": llumlet.block_contents(wanted.token, wanted.blocks)}
            case _:
                raise BadRequest("Not Found", 404, "NotFoundError")
        return {}

    def _fence(self) -> int | None:
        word = parse_qs(self._scope["query_string"].decode("latin-1")).get(wire.FENCE_PARAMETER, [""])[0]
        return int(word) if wire.is_count(word) else None

    async def _stream_reports(self) -> None:
        await self._start(200, "application/x-ndjson")
        watching = asyncio.create_task(self._until_gone())
        try:
            async for line in self._llumlet.reports():
                if watching.done():
                    raise Gone
                await self._part(line)
        finally:
            watching.cancel()

    # Ours.

    async def _faults(self) -> None:
        """Read and set what the instance does wrong; from this machine only."""
        client = self._scope.get("client")
        if client is None or client[0] not in LOOPBACK:
            await self.error(403, "faults are set from the same machine only", "forbidden")
            return
        if self._method == "POST":
            try:
                self._instance.set_faults(await self._json())
            except (FaultError, wire.WireError) as error:
                await self.error(400, str(error), "bad_fault")
                return
        await self.json(200, asdict(self._instance.faults))

    # Generation.

    async def _generate(self) -> None:
        is_managed = wire.SECRET_HEADER in self._headers or wire.RESUME_HEADER in self._headers
        if is_managed and not self._has_secret():
            await self.error(401, "the cluster's secret is wrong", "wrong_secret")
            return
        asked = await self._asked()
        starts_now = self._starts_now(is_managed)
        if self._instance.faults.busy and not starts_now:
            raise BadRequest("The server is busy.", 503, "ServiceUnavailableError")
        request_id = self._headers.get(wire.REQUEST_ID_HEADER) or uuid.uuid4().hex
        if is_managed and not wire.is_identifier(request_id):
            await self.error(400, "a managed request needs x-request-id", "bad_request_id")
            return
        request = Request(
            self._instance.new_request_id(request_id),
            asked.prompt,
            asked.output_tokens_max,
            arrived_at=time.monotonic(),
            priority=asked.priority,
            execution_priority=wire.execution_priority(asked.priority),
            seed=asked.seed,
            is_admitted=starts_now,
        )
        reply = Reply(request_id, request, asked.stream)
        form = Form(asked, request, request_id, int(time.time()))
        arrival: Arrival | None = None
        watching = asyncio.create_task(self._until_gone())
        watching.add_done_callback(lambda _: reply.changed.set())
        try:
            if starts_now and (busy := self._llumlet.why_busy(reply)) is not None:
                await self._refuse(busy)
                return
            if is_managed and self._site.has_plugin:
                try:
                    arrival = self._llumlet.open_session(reply, self._headers.get(wire.RESUME_HEADER))
                except Refused as refusal:
                    await self.error(410, str(refusal), "resume_failed")
                    return
            await self._reply(asked, reply, form, arrival, watching)
        finally:
            watching.cancel()
            self._llumlet.close_session(reply, arrival)
            self._instance.close(reply)

    def _starts_now(self, is_managed: bool) -> bool:
        """Or not at all. A resume is not asked that: its blocks are reserved, or it was running and has to go on."""
        asks = self._headers.get(wire.ADMIT_HEADER) == wire.ADMIT_NOW and wire.RESUME_HEADER not in self._headers
        return asks and is_managed and self._site.has_plugin

    async def _refuse(self, busy: wire.Busy) -> None:
        """As ``vllm_plugin.managed.busy_response`` says it; the request leaves no trace."""
        headers = {wire.BUSY_HEADER: wire.encode_busy_header(busy)}
        await self.error(wire.BUSY_STATUS, "the instance cannot start this request now", "busy", headers)

    async def _reply(
        self, asked: Asked, reply: Reply, form: Form, arrival: Arrival | None, watching: asyncio.Task[None]
    ) -> None:
        headers = {wire.BOOT_HEADER: self._llumlet.identity.boot_id} if self._site.has_plugin else {}
        if arrival is None:
            try:
                self._instance.submit(reply)
            except EngineError as error:
                raise BadRequest(str(error)) from error
        else:
            await _either(arrival.settled, watching)
            if arrival.failed is not None:
                await self.error(410, arrival.failed, "resume_failed")
                return
            headers[wire.RESUMED_HEADER] = wire.encode_resumed_header(arrival.resume_id, len(arrival.output))
        if asked.stream:
            await self._stream(reply, form, headers, watching, begin=len(arrival.output) if arrival else 0)
        else:
            await self._whole(reply, form, headers, watching)

    async def _stream(
        self, reply: Reply, form: Form, headers: dict[str, str], watching: asyncio.Task[None], begin: int
    ) -> None:
        await self._start(200, "text/event-stream; charset=utf-8", headers)
        request, sent = reply.request, begin
        if reply.is_finished and begin == request.output_tokens:
            await self._part(form.ending())
        while True:
            comments, reply.comments = reply.comments, []
            made = reply.moved.output_tokens if reply.moved is not None else request.output_tokens
            data = form.events(sent, made) + b"".join(map(wire.encode_comment, comments))
            sent = made
            if reply.moved is not None:
                await self._part(data + wire.encode_comment(reply.moved), more=False)
                return
            if reply.is_finished:
                await self._part(data + form.closing(), more=False)
                return
            if data:
                await self._part(data)
            await self._changed(reply, watching)

    async def _whole(self, reply: Reply, form: Form, headers: dict[str, str], watching: asyncio.Task[None]) -> None:
        while not reply.is_finished and reply.moved is None:
            await self._changed(reply, watching)
        if reply.moved is not None:
            moved = {wire.MOVED_HEADER: wire.encode_moved_header(reply.moved)}
            await self.whole(409, b"{}", "application/json", moved)
            return
        await self.whole(200, form.whole(), "application/json", headers)

    async def _changed(self, reply: Reply, watching: asyncio.Task[None]) -> None:
        await reply.changed.wait()
        reply.changed.clear()
        if watching.done():
            raise Gone

    async def _asked(self) -> Asked:
        try:
            body = await self._json()
        except wire.WireError as error:
            raise BadRequest(str(error)) from error
        models = self._llumlet.identity.models
        length = self._instance.engine.settings.sequence_tokens_max
        return read_body(body, is_chat=GENERATING[self._path], models=models, sequence_tokens_max=length)

    # Bytes.

    def _has_secret(self) -> bool:
        given = self._headers.get(wire.SECRET_HEADER, "")
        return hmac.compare_digest(given.encode(), self._llumlet.secret.encode())

    async def _json(self) -> Any:
        """The body, bounded. Raises WireError, or Gone."""
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message.get("body", b"")
            if len(body) > BODY_BYTES_MAX:
                raise wire.WireError(f"the body is over {BODY_BYTES_MAX} bytes")
            if not message.get("more_body", False):
                break
        try:
            return json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise wire.WireError("the body is not JSON") from error

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, content_type: str, headers: dict[str, str] | None = None) -> None:
        lines = {"content-type": content_type, **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in lines.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _part(self, data: bytes, *, more: bool = True) -> None:
        if self._path != FAULTS_PATH:
            await self._instance.unless_hanging()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, body: bytes, content_type: str, headers: dict[str, str] | None = None) -> None:
        length = {"content-length": str(len(body))}
        await self._start(status, content_type, {**length, **(headers or {})})
        await self._part(body, more=False)

    async def json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        await self.whole(status, json.dumps(value, separators=(",", ":")).encode(), "application/json", headers)

    async def error(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        """As the llumlet says it (``vllm_plugin.managed.error_response``)."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        await self.json(status, {"error": {"message": message, "type": kind, "param": None, "code": code}}, headers)


@dataclass(frozen=True, slots=True)
class BlocksWanted(wire.Message):
    token: str
    blocks: list[int]


def _identifier(value: str) -> str:
    if not wire.is_identifier(value):
        raise wire.WireError("the id in the path is not an identifier")
    return value


async def _either(event: asyncio.Event, watching: asyncio.Task[None]) -> None:
    """Waits for the event; raises Gone when the client leaves first."""
    if event.is_set():
        return
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if not event.is_set():
        raise Gone


def metrics_page(instance: Instance, model: str) -> str:
    """The lines of vLLM's page that a gateway reads of a server without the plugin."""
    load, settings = instance.engine.load(), instance.engine.settings
    labels = f'engine="0",model_name="{model}"'
    usage = 1 - load.blocks_free / settings.blocks_total
    sizes = f'block_size="{settings.block_size}",engine="0",num_gpu_blocks="{settings.blocks_total}"'
    return f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {float(load.running)}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {float(load.waiting)}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} {usage}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{sizes}}} 1.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{{labels}}} {float(instance.prompt_tokens)}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{{labels}}} {float(instance.output_tokens)}
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{{labels}}} {float(instance.preemptions)}
# TYPE process_start_time_seconds gauge
process_start_time_seconds {instance.started_at}
"""
