"""The routes that operators call. Guarded by the admin key before anything here runs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from gateway.cluster.members import Instance, Member, Members
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.errors import BadRequest, Conflict, GatewayError, LlumletRefused, NotFound, StoreUnavailable
from gateway.scheduler.drain import Drains
from gateway.scheduler.executor import Executor
from gateway.scheduler.leader import Leader
from gateway.serving.dispatch import Dispatcher
from gateway.serving.session import Sessions
from gateway.telemetry import log
from gateway.wire import MIGRATION_METHODS, MigrationResult, Report, is_identifier

PAUSE_WAIT_S = 5.0
"""A migration's result may be there before the first event of the destination: wait that long for the pause."""
FOLLOW_WAIT_S = 2.0
DRAIN_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S_MAX = 3600.0
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
        drains: Drains,
        counters: Counters,
    ) -> None:
        self._gateway_id = gateway_id
        self._members = members
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._store = store
        self._leader = leader
        self._executor = executor
        self._drains = drains
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
        destination = self._known(destination_id, "destination")
        self._check_model(request_id, destination)
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

    async def drain(self, instance_id: str, order: Any) -> dict[str, Any]:
        """Goes on to its end when the operator's connection does not."""
        timeout_s = _read_drain(order)
        started = time.monotonic()
        progress = await self._drains.drain(_with_plugin(self._known(instance_id)), timeout_s)
        return {
            "instance": instance_id,
            "draining": self._members.is_draining(instance_id),
            "empty": progress.empty,
            "moved": progress.moved,
            "failed": progress.failed,
            "remaining": [] if progress.empty else progress.remaining,
            "duration_ms": round((time.monotonic() - started) * 1000, 3),
        }

    async def undrain(self, instance_id: str) -> dict[str, Any]:
        await self._drains.undrain(_with_plugin(self._known(instance_id)))
        return {"instance": instance_id, "draining": False}

    def _known(self, instance_id: str, param: str | None = None) -> Instance:
        instance = self._members.get(instance_id)
        if instance is None:
            raise NotFound(f"There is no instance `{instance_id}`.", param=param, code="instance_not_found")
        return instance

    def _check_model(self, request_id: str, destination: Instance) -> None:
        """An instance may serve another model, even under the same name: there the request would be another one."""
        session = self._sessions.get(request_id)
        if session is None or session.group is None or self._members.serves(destination.instance_id, session.group):
            return
        message = f"`{destination.instance_id}` does not serve the model of this request."
        raise Conflict(message, param="destination", code="model_not_served")

    async def _order(self, request_id: str, source: Instance, destination: Instance, method: str) -> MigrationResult:
        if destination == source:
            raise BadRequest(f"The request is on `{source.instance_id}` already.", param="destination")
        _with_plugin(source)
        _with_plugin(destination)
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
            "plugin": None if report is None else report.plugin_version,
            "healthy": member.usable,
            "reason": member.reason or member.health.ejected_why,
            "stale": self._members.is_stale(member, now),
            "draining": member.draining,
            "empty": None if report is None else self._is_empty(member.instance.instance_id, report),
            "report_age_ms": None if report is None else round((now - member.reported_at) * 1000),
            "in_flight": self._dispatcher.in_flight(member.instance.instance_id),
            "report": None if report is None else report.to_json(),
            "load": None if member.load is None else dataclasses.asdict(member.load),
        }

    def _is_empty(self, instance_id: str, report: Report) -> bool:
        """As far as this gateway and the last report know."""
        running = report.requests_running + report.requests_waiting + report.migrations_in
        return running == 0 and self._dispatcher.in_flight(instance_id) == 0


def _with_plugin(instance: Instance) -> Instance:
    if not instance.managed:
        raise Conflict(f"`{instance.instance_id}` runs without the plugin.", code="no_plugin")
    return instance


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

    @app.post("/admin/instances/{instance_id}/drain")
    async def drain(instance_id: str, request: Request) -> JSONResponse:
        return JSONResponse(await admin.drain(instance_id, await _json(request) if await request.body() else {}))

    @app.delete("/admin/instances/{instance_id}/drain")
    async def undrain(instance_id: str) -> JSONResponse:
        return JSONResponse(await admin.undrain(instance_id))

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


def _read_drain(order: Any) -> float:
    if not isinstance(order, dict):
        raise BadRequest("The request body must be a JSON object, or empty.")
    timeout_s = order.get("timeout_s", DRAIN_TIMEOUT_S)
    # Not a number (NaN) is in no range.
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= DRAIN_TIMEOUT_S_MAX:
        raise BadRequest(
            f"`timeout_s` must be a number above 0, and at most {DRAIN_TIMEOUT_S_MAX:g}.", param="timeout_s"
        )
    return float(timeout_s)


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
