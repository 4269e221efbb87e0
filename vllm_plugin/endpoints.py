"""The llumlet's routes in vLLM's own API server (entry point ``vllm.endpoint_plugins``)."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway import wire
from vllm_plugin import compat
from vllm_plugin.handshake import NOT_COPIED, Abort, Commit, Refused, Reserve, Stage
from vllm_plugin.llumlet import Llumlet, NoSuchRequest, start_data_plane
from vllm_plugin.managed import ManagedRequests, error_response, has_secret
from vllm_plugin.scheduler import KvferryScheduler
from vllm_plugin.session import current_session
from vllm_plugin.settings import SettingsError, settings_from_environment
from vllm_plugin.transfer import TransferError
from vllm_plugin.worker import WorkerExtension

logger = logging.getLogger("vllm.kvferry.endpoints")

BODY_BYTES_MAX = 64 << 20


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
        compat.check_engine(engine_client, args, KvferryScheduler, WorkerExtension)
        description = await compat.call_engine(engine_client, "describe", {})
        data = await start_data_plane(self.settings, engine_client, description)
        instance_id = self.settings.instance_id or f"{args.host or '127.0.0.1'}:{args.port}"
        self.llumlet = Llumlet(
            self.settings,
            instance_id,
            compat.served_models(state),
            engine_client,
            description,
            data,
            compat.parses_chats(args),
        )
        compat.replace_generate(engine_client, with_session)
        compat.drain_before_shutdown(engine_client, self.llumlet.empty)
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


Handler = Callable[[Llumlet, Request], Awaitable[dict[str, Any] | Response]]


def llumlet_router(plugin: KvferryEndpoints) -> APIRouter:
    """Routes under ``/llumlet``: design.md, section 6. All of them need the secret."""
    router = APIRouter(prefix="/llumlet", include_in_schema=False)
    for method, path, handler in ROUTES:
        route = guarded(plugin, handler)
        router.add_api_route(path, route, methods=[method], name=handler.__name__, response_model=None)
    return router


def guarded(plugin: KvferryEndpoints, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Secret, and the errors that handlers raise, once for all routes."""

    async def route(request: Request) -> Response:
        if not has_secret(request.headers, plugin.settings.secret):
            return error_response(401, "the cluster's secret is missing or wrong", "wrong_secret")
        if plugin.llumlet is None:
            return error_response(503, "the llumlet is starting", "starting")
        try:
            answer = await handler(plugin.llumlet, request)
        except wire.WireError as error:
            return error_response(400, str(error), "bad_message")
        except NoSuchRequest as error:
            return error_response(404, f"no managed request {error} is here", "request_not_found")
        except Refused as error:
            return error_response(409, str(error), "cannot_move")
        except TransferError as error:
            return error_response(409, str(error), NOT_COPIED)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return route


async def status(llumlet: Llumlet, _: Request) -> dict[str, Any]:
    return {**(await llumlet.status()).to_json(), "arrivals": await llumlet.arrivals()}


async def reports(llumlet: Llumlet, _: Request) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        async for report in llumlet.reports():
            yield json.dumps(report.to_json(), separators=(",", ":")).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def put_pairing(llumlet: Llumlet, request: Request) -> dict[str, Any]:
    llumlet.pair(wire.Pairing.from_json(await read_json(request)))
    return {}


async def delete_pairing(llumlet: Llumlet, request: Request) -> dict[str, Any]:
    fence = request.query_params.get(wire.FENCE_PARAMETER)
    llumlet.pair(None, int(fence) if fence is not None and wire.is_count(fence) else None)
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
    await llumlet.abort(path_id(request), Abort.from_json(await read_json(request)).reason)
    return {}


ROUTES: tuple[tuple[str, str, Handler], ...] = (
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
)


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
