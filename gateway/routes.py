"""The routes that clients call, as plain ASGI: nothing stands between an instance's event and the client's socket."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from gateway.access import Keys
from gateway.cluster.members import Members
from gateway.config import Limits
from gateway.counters import Counters
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
from gateway.openai.body import read_body
from gateway.serving.backend import Call
from gateway.serving.reply import Reply, Send
from gateway.serving.serve import Server
from gateway.serving.visit import Visit, Visits
from gateway.telemetry import log, logger
from gateway.tracing import NO_TRACER, Tracer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = list[tuple[bytes, bytes]]

FORWARDED = frozenset({b"accept", b"user-agent", b"traceparent", b"tracestate"})
"""The client's headers that an instance gets. Keys, cookies and everything else stay here."""
CLIENT_ID_LENGTH_MAX = 64


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request of a client, and where its answer goes."""

    scope: Scope
    receive: Receive
    reply: Reply
    request_id: str

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
        members: Members,
        keys: Keys,
        limits: Limits,
        counters: Counters,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._server = server
        self._members = members
        self._keys = keys
        self._limits = limits
        self._counters = counters
        self._visits = Visits(counters, tracer)
        self._table: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._generate),
            "/v1/completions": ("POST", self._generate),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = uuid.uuid4().hex
        visit = self._visits.begin(request_id, scope["method"], scope["path"], scope["headers"])
        reply = Reply(send, request_id, visit)
        try:
            await self._route(Incoming(scope, receive, reply, request_id))
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

    async def _route(self, incoming: Incoming) -> None:
        path = incoming.scope["path"]
        if path != "/health":
            self._keys.check(incoming.headers)
        if path not in self._table:
            raise NotFound("There is no such route.")
        incoming.visit.route = path
        method, handler = self._table[path]
        if incoming.scope["method"] != method:
            raise MethodNotAllowed(f"This route takes {method} only.", method)
        await handler(incoming)

    async def _generate(self, incoming: Incoming) -> None:
        headers, path, request_id = incoming.headers, incoming.scope["path"], incoming.request_id
        incoming.visit.client_id = _client_id(headers)
        _check_content(headers)
        body = read_body(await self._read(headers, incoming.receive))
        forwarded = [(name.decode(), value.decode("latin-1")) for name, value in headers if name in FORWARDED]
        call = Call(request_id, path, body.upstream, tuple(forwarded))
        incoming.visit.names(body.model, self._members)
        log("request", level=logging.DEBUG, request=request_id, path=path, stream=body.stream)
        await _while_connected(self._server.serve(call, body, incoming.reply), incoming.receive)

    async def _models(self, incoming: Incoming) -> None:
        """From what is known already: no instance is asked, so none can hold this up."""
        cards = self._members.model_cards()
        if not cards:
            raise NoInstance("No instance has been found yet.")
        await incoming.reply.json(200, {"object": "list", "data": cards})

    async def _health(self, incoming: Incoming) -> None:
        healthy = self._members.healthy_count()
        if not healthy:
            raise NoInstance("No instance is healthy.")
        await incoming.reply.json(200, {"status": "ok", "instances_healthy": healthy})

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


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Runs ``work``, and cancels it when the client goes: before the first byte, between two, at any time."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working})
    if working.cancelled():
        raise ClientGone
    working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_content(headers: Headers) -> None:
    encoding = _header(headers, b"content-encoding").lower()
    if encoding not in (b"", b"identity"):
        raise UnsupportedEncoding("The request body must not be compressed.")
    media_type = _header(headers, b"content-type").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise BadRequest("Unsupported Media Type: Only 'application/json' is allowed.")


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def _client_id(headers: Headers) -> str:
    """The client's own id, for the log alone, and only as much of it as is safe there."""
    value = _header(headers, b"x-request-id")[:CLIENT_ID_LENGTH_MAX].decode("latin-1")
    return "".join(char for char in value if char.isascii() and (char.isalnum() or char in "._:-")) or "-"
