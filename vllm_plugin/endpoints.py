"""HTTP: the llumlet's routes in vLLM's own API server, and the middleware around the requests that a gateway manages.

Entry point ``vllm.endpoint_plugins``. Every route needs the cluster's shared secret.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import wire
from vllm_plugin import compat
from vllm_plugin.incoming import Refused
from vllm_plugin.llumlet import Commit, Llumlet, NoSuchRequest, Reserve, Stage, start_data_plane
from vllm_plugin.session import Session, current_session
from vllm_plugin.settings import SettingsError, settings_from_environment

logger = logging.getLogger("vllm.kvferry.endpoints")

BODY_BYTES_MAX = 64 << 20
MANAGED_PATHS = ("/v1/chat/completions", "/v1/completions")


def error_response(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in the shape of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def has_secret(headers: Headers, secret: str) -> bool:
    return hmac.compare_digest(headers.get(wire.SECRET_HEADER, "").encode(), secret.encode())


class KvferryEndpoints:
    """vLLM builds one, calls ``attach_router`` while it builds the app and ``init_state`` once the engine is there."""

    name = "kvferry_endpoints"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.settings = settings_from_environment()
        self.llumlet: Llumlet | None = None

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(llumlet_router(self))
        app.add_middleware(ManagedRequests, plugin=self)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        if engine_client is None:
            raise SettingsError("kvferry needs a server with an engine.")
        if not compat.is_requested():
            raise SettingsError("name both plugins: VLLM_PLUGINS=kvferry,kvferry_endpoints")
        compat.check_engine(engine_client, args)
        description = await compat.call_engine(engine_client, "describe", {})
        data = await start_data_plane(self.settings, engine_client, description)
        instance_id = self.settings.instance_id or f"{args.host or '127.0.0.1'}:{args.port}"
        self.llumlet = Llumlet(
            self.settings, instance_id, compat.served_models(state), engine_client, description, data
        )
        compat.replace_generate(engine_client, with_session)
        self.llumlet.start()
        logger.info("llumlet %s started, KV format %s", instance_id, data.kv_format or f"none: {data.kv_reason}")


def with_session(stock: Any) -> Any:
    """``AsyncLLM.generate`` that hands managed requests to their session."""

    def generate(prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        session = current_session.get()
        if session is None:
            compat.drop_own_keys(sampling_params)
            return stock(prompt, sampling_params, request_id, **options)
        return session.generate(stock, prompt, sampling_params, request_id, options)

    return generate


class ManagedRequests:
    """Plain ASGI middleware: gives a gateway's request its session, and ends its reply when the request moves."""

    def __init__(self, app: ASGIApp, plugin: KvferryEndpoints) -> None:
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
        try:
            session = llumlet.open_session(request_id, headers.get(wire.RESUME_HEADER))
        except Refused as reason:
            await error_response(410, str(reason), "resume_failed")(scope, receive, send)
            return
        try:
            await Reply(self._app, session).run(scope, receive, send)
        finally:
            llumlet.close_session(session)


class Reply:
    """The reply to one managed request, and the few bytes that kvferry adds to it or keeps back from it."""

    def __init__(self, app: ASGIApp, session: Session) -> None:
        self._app = app
        self._session = session
        self._lock = asyncio.Lock()
        self._send: Send | None = None
        self._held_start: Message | None = None
        self._started = False
        self._is_stream = False
        self._passes = session.incoming is None
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
        if session.moved is not None:
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

    async def _open(self) -> None:
        """A resumed reply is live: send its start, before the first event."""
        async with self._lock:
            self._passes = True
            await self._send_held_start()

    async def _filter(self, message: Message) -> None:
        async with self._lock:
            if message["type"] == "http.response.start":
                await self._on_start(message)
            elif self._passes:
                await self._send_held_start()
                await self._forward(message)

    async def _on_start(self, message: Message) -> None:
        headers = Headers(raw=message["headers"])
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        if self._session.incoming is None or message["status"] != 200:
            self._passes = True  # An error of the request's own passes as it is, also on a resumed leg.
            await self._forward(message)
            return
        self._held_start = message
        if self._passes:
            await self._send_held_start()

    async def _send_held_start(self) -> None:
        if self._held_start is None:
            return
        incoming = self._session.incoming
        assert incoming is not None
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


def llumlet_router(plugin: KvferryEndpoints) -> APIRouter:
    """Routes under ``/llumlet``: design.md, section 6."""
    router = APIRouter(prefix="/llumlet", include_in_schema=False)

    async def refuse(request: Request) -> Response | None:
        if not has_secret(request.headers, plugin.settings.secret):
            return error_response(401, "the cluster's secret is missing or wrong", "wrong_secret")
        if plugin.llumlet is None:
            return error_response(503, "the llumlet is starting", "starting")
        return None

    def guarded(handler: Any) -> Any:
        """Secret, body, and the errors that handlers raise, once for all routes."""

        async def route(request: Request) -> Response:
            if (refusal := await refuse(request)) is not None:
                return refusal
            assert plugin.llumlet is not None
            try:
                answer = await handler(plugin.llumlet, request)
            except wire.WireError as error:
                return error_response(400, str(error), "bad_message")
            except NoSuchRequest as error:
                return error_response(404, f"no managed request {error} is here", "request_not_found")
            except Refused as error:
                return error_response(409, str(error), "cannot_move")
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return route

    async def status(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        return {**(await llumlet.status()).to_json(), "arrivals": await llumlet.arrivals()}

    async def reports(llumlet: Llumlet, request: Request) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            async for report in llumlet.reports():
                yield json.dumps(report.to_json(), separators=(",", ":")).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def put_pairing(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        llumlet.pair(wire.Pairing.from_json(await read_json(request)))
        return {}

    async def delete_pairing(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        llumlet.pair(None)
        return {}

    async def migrate(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        return (await llumlet.migrate(wire.MigrateOrder.from_json(await read_json(request)))).to_json()

    async def drain(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        llumlet.draining = wire.Drain.from_json(await read_json(request)).draining
        return {}

    async def put_resume(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        llumlet.put_resume(path_id(request), wire.Resume.from_json(await read_json(request)))
        return {}

    async def delete_resume(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        await llumlet.delete_resume(path_id(request))
        return {}

    async def reserve(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        return await llumlet.reserve(path_id(request), Reserve.from_json(await read_json(request)))

    async def stage(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        return await llumlet.stage(path_id(request), Stage.from_json(await read_json(request)))

    async def commit(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        return await llumlet.commit(path_id(request), Commit.from_json(await read_json(request)))

    async def abort(llumlet: Llumlet, request: Request) -> dict[str, Any]:
        body = await read_json(request)
        await llumlet.abort(path_id(request), str(body.get("reason", "")) if isinstance(body, dict) else "")
        return {}

    for method, path, handler in (
        ("GET", "/status", status),
        ("GET", "/reports", reports),
        ("PUT", "/pairing", put_pairing),
        ("DELETE", "/pairing", delete_pairing),
        ("POST", "/migrate", migrate),
        ("POST", "/drain", drain),
        ("PUT", "/resumes/{id}", put_resume),
        ("DELETE", "/resumes/{id}", delete_resume),
        ("POST", "/migrations/{id}/reserve", reserve),
        ("POST", "/migrations/{id}/stage", stage),
        ("POST", "/migrations/{id}/commit", commit),
        ("POST", "/migrations/{id}/abort", abort),
    ):
        router.add_api_route(path, guarded(handler), methods=[method], name=handler.__name__, response_model=None)
    return router


def path_id(request: Request) -> str:
    value = str(request.path_params["id"])
    if not wire.is_identifier(value):
        raise wire.WireError("the id in the path is not an identifier")
    return value


async def read_json(request: Request) -> Any:
    """The body as JSON, bounded. Raises WireError."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise wire.WireError(f"the body is over {BODY_BYTES_MAX} bytes")
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise wire.WireError("the body is not JSON") from error
