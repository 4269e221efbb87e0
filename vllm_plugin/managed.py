"""The middleware around the requests that a gateway manages: the few bytes that kvferry adds to them or keeps back."""

from __future__ import annotations

import asyncio
import hmac
from typing import Protocol

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import wire
from vllm_plugin.handshake import Refused
from vllm_plugin.llumlet import Llumlet
from vllm_plugin.session import Session, current_session
from vllm_plugin.settings import Settings

CHAT_PATH = "/v1/chat/completions"
MANAGED_PATHS = (CHAT_PATH, "/v1/completions")


def error_response(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in the shape of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def busy_response(busy: wire.Busy) -> JSONResponse:
    """Not a failure, and none of vLLM's own answers: the request has left no trace here, and may come again."""
    headers = {wire.BUSY_HEADER: wire.encode_busy_header(busy)}
    return error_response(wire.BUSY_STATUS, "the instance cannot start this request now", "busy", headers)


def has_secret(headers: Headers, secret: str) -> bool:
    return hmac.compare_digest(headers.get(wire.SECRET_HEADER, "").encode(), secret.encode())


class Plugin(Protocol):
    """What the middleware, which vLLM builds before there is an engine, finds the llumlet by."""

    settings: Settings
    llumlet: Llumlet | None


class ManagedRequests:
    """Plain ASGI middleware: gives a gateway's request its session, and ends its reply when the request moves."""

    def __init__(self, app: ASGIApp, plugin: Plugin) -> None:
        self._app = app
        self._plugin = plugin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if wire.SECRET_HEADER not in headers and wire.RESUME_HEADER not in headers:
            await self._app(scope, receive, send)
            return
        if not has_secret(headers, self._plugin.settings.secret):
            await error_response(401, "the cluster's secret is wrong", "wrong_secret")(scope, receive, send)
            return
        llumlet = self._plugin.llumlet
        if llumlet is None or scope["path"] not in MANAGED_PATHS:
            await self._app(scope, receive, send)
            return
        request_id = headers.get(wire.REQUEST_ID_HEADER, "")
        if not wire.is_identifier(request_id):
            refusal = error_response(400, "a managed request needs x-request-id", "bad_request_id")
            await refusal(scope, receive, send)
            return
        resume_id = headers.get(wire.RESUME_HEADER)
        starts_now = resume_id is None and headers.get(wire.ADMIT_HEADER) == wire.ADMIT_NOW
        if starts_now and (busy := llumlet.why_full()) is not None:
            await busy_response(busy)(scope, receive, send)
            return
        try:
            is_chat = scope["path"] == CHAT_PATH
            session = llumlet.open_session(request_id, resume_id, is_chat=is_chat, starts_now=starts_now)
        except Refused as reason:
            await error_response(410, str(reason), "resume_failed")(scope, receive, send)
            return
        try:
            await Reply(self._app, session, llumlet.boot_id).run(scope, receive, send)
        finally:
            llumlet.close_session(session)


class Reply:
    """The reply to one managed request, and the few bytes that kvferry adds to it or keeps back from it."""

    def __init__(self, app: ASGIApp, session: Session, boot_id: str) -> None:
        self._app = app
        self._boot_header = (wire.BOOT_HEADER.encode(), boot_id.encode())
        self._session = session
        self._lock = asyncio.Lock()
        self._send: Send | None = None
        self._held_start: Message | None = None
        self._started = False
        self._is_stream = False
        self._is_error = False
        self._complete = False
        self._comments: list[bytes] = []
        self._commenting: asyncio.Task[None] | None = None

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run vLLM's application until its reply is complete, or the request has moved or cannot be resumed."""
        self._send = send
        session = self._session
        session.open_reply = self._open
        current_session.set(session)
        reply = asyncio.create_task(self._call(scope, receive))
        ended = asyncio.create_task(session.ended.wait())
        try:
            await asyncio.wait([reply, ended], return_when=asyncio.FIRST_COMPLETED)
            if not session.ended.is_set():
                await reply
                return
        finally:
            session.send_comment = None
            ended.cancel()
            reply.cancel()
            await asyncio.wait([reply] if self._commenting is None else [reply, self._commenting])
        if session.busy is not None and not self._started:
            await busy_response(session.busy)(scope, receive, send)
        elif session.moved is not None:
            await self._send_moved(session.moved, scope, receive, send)
        elif not self._started:
            await error_response(410, session.failed or "", "resume_failed")(scope, receive, send)
        # Else: a resumed reply that was given up after it had begun; leaving it incomplete cuts the connection.

    async def _call(self, scope: Scope, receive: Receive) -> None:
        await self._app(scope, receive, self._filter)

    async def _send_moved(self, moved: wire.Moved, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            body = b"".join([*self._comments, wire.encode_comment(moved)])
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        header = {wire.MOVED_HEADER: wire.encode_moved_header(moved)}
        await Response(b"{}", 409, header, "application/json")(scope, receive, send)

    @property
    def _passes(self) -> bool:
        """What was replayed is kept back. From the moment at which it is through, all that comes is new: the engine's
        first output may be here before its answer that the request is queued."""
        return self._is_error or self._session.live

    async def _open(self) -> None:
        """A resumed reply is live, or a new one is let in: send its start, before the first event."""
        async with self._lock:
            await self._send_held_start()

    async def _filter(self, message: Message) -> None:
        async with self._lock:
            if self._session.busy is not None:
                return
            if message["type"] == "http.response.start":
                await self._on_start(message)
            elif self._passes:
                await self._send_held_start()
                await self._forward(message)

    async def _on_start(self, message: Message) -> None:
        headers = Headers(raw=message["headers"])
        message = {**message, "headers": [*message["headers"], self._boot_header]}
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        waits = self._session.incoming is not None or self._session.starts_now
        if not waits or message["status"] != 200:
            self._is_error = message["status"] != 200  # One of the request's own, also on a resumed leg.
            await self._forward(message)
            return
        self._held_start = message
        if self._passes and not self._session.starts_now:
            await self._send_held_start()

    async def _send_held_start(self) -> None:
        if self._held_start is None:
            return
        incoming = self._session.incoming
        if incoming is None:
            message, self._held_start = self._held_start, None
            await self._forward(message)
            return
        value = wire.encode_resumed_header(incoming.resume_id, len(incoming.tokens))
        raw = [*self._held_start["headers"], (wire.RESUMED_HEADER.encode(), value.encode())]
        message, self._held_start = {**self._held_start, "headers": raw}, None
        await self._forward(message)

    async def _forward(self, message: Message) -> None:
        assert self._send is not None
        await self._send(message)
        if message["type"] == "http.response.start":
            self._started = True
            if self._is_stream and message["status"] == 200:
                self._session.send_comment = self._comment
        elif not message.get("more_body", False):
            self._complete = True
            self._session.send_comment = None

    def _comment(self, comment: wire.StreamComment) -> None:
        self._comments.append(wire.encode_comment(comment))
        if self._commenting is None or self._commenting.done():
            self._commenting = asyncio.create_task(self._send_comments())

    async def _send_comments(self) -> None:
        async with self._lock:
            if self._complete or self._session.ended.is_set() or not self._comments:
                return
            assert self._send is not None
            body = b"".join(self._comments)
            self._comments.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
