"""The routes that operators call. Guarded by the admin key before anything here runs."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from gateway.cluster.members import Instance, Member, Members
from gateway.cluster.store import Store
from gateway.errors import BadRequest, Conflict, GatewayError, LlumletRefused, NotFound, StoreUnavailable
from gateway.scheduler.executor import Executor
from gateway.scheduler.leader import Leader
from gateway.serving.dispatch import Dispatcher
from gateway.serving.session import Sessions
from gateway.telemetry import Counters, log
from gateway.wire import MIGRATION_METHODS, MigrationResult, is_identifier

PAUSE_WAIT_S = 5.0
"""A migration's result may be there before the first event of the destination: wait that long for the pause."""
FOLLOW_WAIT_S = 2.0
_ID_PREFIXES = ("chatcmpl-", "cmpl-")


class Admin:
    def __init__(
        self,
        gateway_id: str,
        members: Members,
        dispatcher: Dispatcher,
        sessions: Sessions,
        store: Store,
        leader: Leader,
        executor: Executor,
        counters: Counters,
    ) -> None:
        self._gateway_id = gateway_id
        self._members = members
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._store = store
        self._leader = leader
        self._executor = executor
        self._counters = counters

    def instances(self) -> dict[str, Any]:
        return {
            "gateway": self._gateway_id,
            "leading": self._leader.is_leading,
            "counters": self._counters.to_json(),
            "instances": [self._instance(member) for member in self._members.all()],
        }

    def requests(self) -> dict[str, Any]:
        return {"requests": self._sessions.live(), "recent": self._sessions.recent()}

    async def migrate(self, order: Any) -> dict[str, Any]:
        """Moves one request and waits for the outcome; the pause is what this request's client saw."""
        request_id, destination_id, method = _read_order(order)
        source = await self._source(request_id)
        destination = self._members.get(destination_id)
        if destination is None:
            raise NotFound(f"There is no instance `{destination_id}`.", param="destination", code="instance_not_found")
        try:
            result = await self._order(request_id, source, destination, method)
        except LlumletRefused as error:
            # It has just left there, and its reply lags behind: once that has followed, the order can be given again.
            if error.llumlet_status != 404 or not await self._has_followed(request_id, source):
                raise _refusal(error) from error
            try:
                result = await self._order(request_id, await self._source(request_id), destination, method)
            except LlumletRefused as again:
                raise _refusal(again) from again
        return {**result.to_json(), **await self._pause(request_id, result.migration_id, result.outcome)}

    async def _order(self, request_id: str, source: Instance, destination: Instance, method: str) -> MigrationResult:
        if destination == source:
            raise BadRequest(f"The request is on `{source.instance_id}` already.", param="destination")
        log("migrate", request=request_id, source=source.instance_id, to=destination.instance_id)
        return await self._executor.migrate(source, request_id, destination, method)

    async def _has_followed(self, request_id: str, source: Instance) -> bool:
        """Whether this gateway's own reply goes on from another instance now, or does so soon."""
        session = self._sessions.get(request_id)
        return session is not None and await session.left(source.instance_id, FOLLOW_WAIT_S)

    async def _source(self, request_id: str) -> Instance:
        """Where the request runs: this gateway's own, else another one's by its record in Redis."""
        session = self._sessions.get(request_id)
        instance_id = session.instance_id if session is not None else None
        if session is None:
            try:
                owner = await self._store.owner(request_id)
            except StoreUnavailable:
                owner = None
            instance_id = owner.instance_id if owner is not None else None
        source = self._members.get(instance_id) if instance_id is not None else None
        if source is None:
            raise NotFound(f"There is no running request `{request_id}`.", param="request", code="request_not_found")
        return source

    async def _pause(self, request_id: str, migration_id: str, outcome: str) -> dict[str, float | None]:
        session = self._sessions.get(request_id)
        if session is None or outcome != "committed" or not session.body.stream:
            return {"pause_ms": None, "token_gap_ms": session.token_gap_ms() if session is not None else None}
        move = await session.move_with_pause(migration_id, PAUSE_WAIT_S)
        return {"pause_ms": move.pause_ms if move is not None else None, "token_gap_ms": session.token_gap_ms()}

    def _instance(self, member: Member) -> dict[str, Any]:
        now = time.monotonic()
        report = member.report
        return {
            "id": member.instance.instance_id,
            "url": member.instance.url,
            "boot_id": member.instance.boot_id,
            "models": sorted(member.models),
            "healthy": member.healthy,
            "reason": member.reason,
            "stale": self._members.is_stale(member, now),
            "report_age_ms": None if report is None else round((now - member.reported_at) * 1000),
            "in_flight": self._dispatcher.in_flight(member.instance.instance_id),
            "report": None if report is None else report.to_json(),
        }


def build_admin_app(admin: Admin) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/admin/instances")
    async def instances() -> JSONResponse:
        return JSONResponse(admin.instances())

    @app.get("/admin/requests")
    async def requests() -> JSONResponse:
        return JSONResponse(admin.requests())

    @app.post("/admin/migrate")
    async def migrate(request: Request) -> JSONResponse:
        return JSONResponse(await admin.migrate(await _json(request)))

    app.add_exception_handler(GatewayError, _handler(_gateway_error))
    app.add_exception_handler(HTTPException, _handler(_http_exception))
    return app


def _handler(to_response: Callable[[Any], Response]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_request: Request, error: Exception) -> Response:
        return to_response(error)

    return handle


def _gateway_error(error: GatewayError) -> Response:
    return JSONResponse(error.to_json(), error.status, error.headers)


def _http_exception(error: HTTPException) -> Response:
    """FastAPI's own: no such route, or not this method."""
    kind = "NotFoundError" if error.status_code == 404 else "invalid_request_error"
    body = {"error": {"message": error.detail, "type": kind, "param": None, "code": error.status_code}}
    return JSONResponse(body, error.status_code, error.headers)


def _refusal(error: LlumletRefused) -> GatewayError:
    if error.llumlet_status == 404:
        return NotFound(error.message, param="request", code=error.code)
    if error.llumlet_status == 409:
        return Conflict(error.message, param="request", code=error.code)
    return error


async def _json(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest("The request body is not valid JSON.") from error


def _read_order(order: Any) -> tuple[str, str, str]:
    if not isinstance(order, dict):
        raise BadRequest("The request body must be a JSON object with `request` and `destination`.")
    for name in ("request", "destination"):
        if not isinstance(order.get(name), str) or not order[name]:
            raise BadRequest(f"`{name}` is missing or not a string.", param=name)
    method = order.get("method", "live")
    if method not in MIGRATION_METHODS:
        raise BadRequest(f"`method` must be one of {', '.join(MIGRATION_METHODS)}.", param="method")
    request_id: str = order["request"]
    for prefix in _ID_PREFIXES:
        request_id = request_id.removeprefix(prefix)
    if not is_identifier(request_id):
        raise NotFound("There is no running request of this id.", param="request", code="request_not_found")
    return request_id, order["destination"], method
