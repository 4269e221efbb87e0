"""The routes that clients call, as plain ASGI: nothing stands between an instance's event and the client's socket."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from gateway.access import ANYONE, Key
from gateway.admission import Admission
from gateway.cluster.members import Members
from gateway.config import Limits
from gateway.counters import Counters
from gateway.endpoints import Endpoint, Kind, Table
from gateway.errors import (
    BadRequest,
    BodyTimeout,
    GatewayError,
    MethodNotAllowed,
    NoInstance,
    NotFound,
    TooLarge,
    UnsupportedEncoding,
)
from gateway.large_bodies import LargeBodies
from gateway.openai.body import ForwardBody, GenerateBody, read_body, read_forward_body
from gateway.openai.dialects import Dialect
from gateway.openai.terms import Work, read_asked
from gateway.openapi import openapi_page
from gateway.serving.backend import Call
from gateway.serving.form import read_form
from gateway.serving.forward import Forward, Forwarder, look_query
from gateway.serving.reply import Reply, Send
from gateway.serving.serve import Server
from gateway.serving.visit import Visit, Visits
from gateway.telemetry import log, logger
from gateway.tracing import NO_TRACER, Tracer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = list[tuple[bytes, bytes]]
Body = TypeVar("Body", GenerateBody, ForwardBody)

FORWARDED = frozenset(
    {b"accept", b"user-agent", b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta"}
)
"""The client's headers that an instance gets. Keys, cookies and everything else stay here: also ``x-vllm-priority``,
which vLLM would put above the body's ``priority``."""
INSTANCE_PRIORITY_HEADER = "x-vllm-priority"
"""The gateway's own word where the body has no field for it."""
CLIENT_ID_LENGTH_MAX = 64


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request of a client, and where its answer goes."""

    scope: Scope
    receive: Receive
    reply: Reply
    request_id: str
    endpoint: Endpoint
    key: Key = ANYONE
    response_id: str = ""

    @property
    def visit(self) -> Visit:
        return self.reply.visit

    @property
    def headers(self) -> Headers:
        headers: Headers = self.scope["headers"]
        return headers


Handler = Callable[[Incoming], Awaitable[None]]


class ClientGone(Exception):
    """The client closed its connection; there is no one left to answer."""


class Routes:
    def __init__(
        self,
        server: Server,
        forwarder: Forwarder,
        members: Members,
        admission: Admission,
        limits: Limits,
        counters: Counters,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.bodies = LargeBodies()
        self._server = server
        self._forwarder = forwarder
        self._members = members
        self._admission = admission
        self._limits = limits
        self._counters = counters
        self._visits = Visits(counters, tracer)
        self._table = Table()
        self._handlers: dict[Kind, Handler] = {
            Kind.GENERATE: self._generate,
            Kind.FORWARD: self._forward,
            Kind.RESPOND: self._forward,
            Kind.UPLOAD: self._upload,
            Kind.STORED: self._look,
            Kind.LOOK: self._look,
            Kind.MODELS: self._models,
            Kind.HEALTH: self._health,
            Kind.OPENAPI: self._openapi,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = uuid.uuid4().hex
        client_id = _client_id(scope["headers"])
        visit = self._visits.begin(request_id, scope["method"], scope["path"], scope["headers"])
        visit.client_id = client_id or "-"
        reply = Reply(send, request_id, client_id, visit)
        try:
            await self._route(scope, receive, reply, request_id)
        except GatewayError as error:
            self._counters.add("errors", kind=error.label)
            await reply.fail(error)
        except ClientGone:
            visit.gone = True
        except Exception:  # noqa: BLE001
            # Our own bug. It ends here as an honest answer, and the connection goes on.
            self._counters.add("internal_errors")
            logger.exception("request=%s: internal error", request_id)
            await reply.fail(GatewayError("The gateway failed to handle this request."))
        finally:
            self._visits.end(visit, reply)

    async def _route(self, scope: Scope, receive: Receive, reply: Reply, request_id: str) -> None:
        found = self._table.find(scope["path"])
        endpoint = None if found is None else found.by_method.get(scope["method"])
        if found is not None:
            any_endpoint = next(iter(found.by_method.values()))
            reply.dialect, reply.visit.route = any_endpoint.dialect, any_endpoint.path
        key = ANYONE
        if endpoint is None or endpoint.needs_key:
            key = self._admission.check(scope["headers"], scope["path"])
            reply.visit.key_name = key.name or None
        if found is None:
            raise NotFound("There is no such route.")
        if endpoint is None:
            allowed = ", ".join(sorted(found.by_method))
            raise MethodNotAllowed(f"This route takes {allowed} only.", allowed)
        incoming = Incoming(scope, receive, reply, request_id, endpoint, key, found.response_id)
        await self._handlers[endpoint.kind](incoming)

    async def _generate(self, incoming: Incoming) -> None:
        headers = incoming.headers
        _check_content(headers)
        terms = self._admission.terms(incoming.key, headers)
        body = await self._parsed(incoming, functools.partial(read_body, terms=terms))
        call = Call(incoming.request_id, incoming.endpoint.path, body.upstream, _forwarded(headers))
        self._note(incoming, body.model, body.stream)
        async with self._admission.admitted(incoming.key, incoming.request_id, body.asked, incoming.reply):
            await while_connected(self._server.serve(call, body, incoming.reply), incoming.receive)

    async def _forward(self, incoming: Incoming) -> None:
        headers, endpoint = incoming.headers, incoming.endpoint
        _check_content(headers)
        in_header = endpoint.dialect is Dialect.MESSAGES
        terms = self._admission.terms(incoming.key, headers, endpoint.work)
        read = functools.partial(read_forward_body, terms=terms, takes_priority=not in_header)
        body = await self._parsed(incoming, read)
        forwarded = _forwarded(headers)
        if in_header and body.asked.priority is not None:
            forwarded += ((INSTANCE_PRIORITY_HEADER, str(body.asked.priority)),)
        responds = endpoint.kind is Kind.RESPOND
        forward = Forward(
            Call(incoming.request_id, endpoint.path, body.upstream, forwarded),
            endpoint.dialect,
            model=body.model,
            priority_class=body.asked.priority_class,
            key_id=body.asked.key_id,
            needs_room=endpoint.work is Work.GENERATES,
            stream=body.stream,
            load_bytes=len(body.upstream),
            repeatable=body.repeatable,
            home_of=body.previous_response_id if responds else None,
            keeps=responds and body.stores,
        )
        async with self._admission.admitted(incoming.key, incoming.request_id, body.asked, incoming.reply):
            await self._pass(incoming, forward)

    async def _upload(self, incoming: Incoming) -> None:
        headers = incoming.headers
        _check_encoding(headers)
        content_type = _header(headers, b"content-type").decode("latin-1")
        body = await self._read(headers, incoming.receive)
        form = await read_form(content_type, body)
        # The size of a recording says nothing of its tokens.
        asked = read_asked({}, 0, self._admission.terms(incoming.key, headers))
        kept = (*_forwarded(headers), ("content-type", content_type))
        call = Call(incoming.request_id, incoming.endpoint.path, body, kept)
        forward = Forward(
            call,
            incoming.endpoint.dialect,
            model=form.model,
            priority_class=asked.priority_class,
            key_id=asked.key_id,
            needs_room=True,
            stream=form.stream,
        )
        async with self._admission.admitted(incoming.key, incoming.request_id, asked, incoming.reply):
            await self._pass(incoming, forward)

    async def _look(self, incoming: Incoming) -> None:
        """What an instance is asked without a body; one that came all the same stays here. No limit counts it."""
        endpoint, response_id = incoming.endpoint, incoming.response_id
        query = look_query(incoming.scope["query_string"]) if response_id else ""
        path = endpoint.path.replace("{response_id}", quote(response_id, safe="")) + query
        forward = Forward(
            Call(incoming.request_id, path, b"", _forwarded(incoming.headers), endpoint.method),
            endpoint.dialect,
            stream="stream=" in query,
            home_of=response_id or None,
            ends_itself=False,
        )
        await self._pass(incoming, forward)

    async def _pass(self, incoming: Incoming, forward: Forward) -> None:
        self._note(incoming, forward.model, forward.stream)
        await while_connected(self._forwarder.forward(forward, incoming.reply), incoming.receive)

    def _note(self, incoming: Incoming, model: str | None, stream: bool) -> None:
        incoming.visit.names(model, self._members)
        path = incoming.endpoint.path
        log("request", level=logging.DEBUG, request=incoming.request_id, path=path, stream=stream)

    async def _models(self, incoming: Incoming) -> None:
        """From what is known already: no instance is asked, so none can hold this up."""
        cards = self._members.model_cards()
        if not cards:
            raise NoInstance("No instance has been found yet.")
        await incoming.reply.json(200, {"object": "list", "data": cards})

    async def _openapi(self, incoming: Incoming) -> None:
        await incoming.reply.json(200, openapi_page())

    async def _health(self, incoming: Incoming) -> None:
        healthy = self._members.healthy_count()
        if not healthy:
            raise NoInstance("No instance is healthy.")
        await incoming.reply.json(200, {"status": "ok", "instances_healthy": healthy})

    async def _parsed(self, incoming: Incoming, read: Callable[[bytes], Body]) -> Body:
        return await self.bodies.parse(read, await self._read(incoming.headers, incoming.receive))

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        declared = _header(headers, b"content-length")
        too_large = TooLarge(f"The request body is larger than {self._limits.body_bytes} bytes.")
        if declared.isdigit() and int(declared) > self._limits.body_bytes:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._limits.body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise BodyTimeout(f"The request body took more than {self._limits.body_s:g} s.") from error


async def while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Runs ``work``, and cancels it when the client goes: before the first byte, between two, at any time. Raises
    :class:`ClientGone` then."""
    try:
        async with asyncio.timeout(None) as connected:
            watching = asyncio.create_task(_end_when_gone(connected, receive))
            try:
                await work
            finally:
                watching.cancel()
    except TimeoutError:
        if not connected.expired():
            raise
        raise ClientGone from None


async def _end_when_gone(connected: asyncio.Timeout, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    connected.reschedule(asyncio.get_running_loop().time())


def _check_encoding(headers: Headers) -> None:
    if _header(headers, b"content-encoding").lower() not in (b"", b"identity"):
        raise UnsupportedEncoding("The request body must not be compressed.")


def _check_content(headers: Headers) -> None:
    _check_encoding(headers)
    media_type = _header(headers, b"content-type").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise BadRequest("Unsupported Media Type: Only 'application/json' is allowed.")


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def _forwarded(headers: Headers) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode(), value.decode("latin-1")) for name, value in headers if name in FORWARDED)


def _client_id(headers: Headers) -> str:
    """The client's own id, for the log and to be told back, and only as much of it as is safe there."""
    value = _header(headers, b"x-request-id")[:CLIENT_ID_LENGTH_MAX].decode("latin-1")
    return "".join(char for char in value if char.isascii() and (char.isalnum() or char in "._:-"))
