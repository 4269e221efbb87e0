"""The routes that operators call. Guarded by the admin key before anything here runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.cluster.discovery import Discovery
from gateway.cluster.members import Instance, Member, Members
from gateway.cluster.store import Store
from gateway.cluster.targets import Targets, read_url
from gateway.counters import Counters
from gateway.errors import BadRequest, BodyTimeout, Conflict, GatewayError, LlumletRefused, NotFound, TooLarge
from gateway.gateways import Gateways
from gateway.requests import Found, Requests
from gateway.scheduler.drain import Drains
from gateway.scheduler.executor import Executor
from gateway.scheduler.leader import Leader
from gateway.serving.dispatch import Dispatcher
from gateway.telemetry import log
from gateway.wire import MIGRATION_METHODS, MigrationResult, Report, is_identifier

DRAIN_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S_MAX = 3600.0
BODY_BYTES_MAX = 64 * 1024
BODY_S = 10.0
NAME_SHOWN_MAX = 64
_ID_PREFIXES = ("chatcmpl-", "cmpl-")


class Admin:
    def __init__(
        self,
        gateway_id: str,
        members: Members,
        dispatcher: Dispatcher,
        requests: Requests,
        gateways: Gateways,
        targets: Targets,
        discovery: Discovery,
        store: Store,
        leader: Leader,
        executor: Executor,
        drains: Drains,
        counters: Counters,
    ) -> None:
        self._gateway_id = gateway_id
        self._members = members
        self._dispatcher = dispatcher
        self._requests = requests
        self._gateways = gateways
        self._targets = targets
        self._discovery = discovery
        self._store = store
        self._leader = leader
        self._executor = executor
        self._drains = drains
        self._counters = counters

    async def instances(self) -> dict[str, Any]:
        """``complete``: all gateways that live have said what they have in flight."""
        seen = await self._gateways.look()
        return {
            "gateway": self._gateway_id,
            "leading": self._leader.is_leading,
            "gateways": seen.gateways,
            "complete": seen.complete,
            "counters": self._counters.to_json(),
            "instances": [self._instance(member, seen.in_flight) for member in self._members.all()],
            "addresses": [
                {"url": url, "source": self._targets.source(url), "state": self._discovery.state(url)}
                for url in self._targets.urls()
            ],
        }

    async def add(self, order: dict[str, Any]) -> dict[str, Any]:
        """All gateways follow it from now on, until it is removed again."""
        return await self._order_target(_read_url(order), added=True)

    async def remove(self, order: dict[str, Any]) -> dict[str, Any]:
        return await self._order_target(_read_url(order), added=False)

    async def remove_instance(self, instance_id: str) -> dict[str, Any]:
        """It gets nothing new, and is forgotten once it has nothing left to do. It may be added again."""
        return await self._order_target(self._known(instance_id).url, added=False)

    async def _order_target(self, url: str, *, added: bool) -> dict[str, Any]:
        order = await self._store.order_target(url, added=added)
        if order is None:
            raise Conflict("There are too many orders about addresses in Redis already.", code="too_many_addresses")
        log("address", url=url, order=order)
        self._targets.ordered(url, order)
        return {"url": url, "source": self._targets.source(url)}

    async def requests(self) -> dict[str, Any]:
        return await self._requests.list()

    async def request(self, request_id: str) -> Any:
        found = await self._requests.find(_read_id(request_id))
        if found is None:
            raise _no_request(request_id)
        return found.shown

    async def cancel(self, request_id: str) -> dict[str, Any]:
        request_id = _read_id(request_id)
        gateway_id = await self._requests.cancel(request_id)
        if gateway_id is None:
            raise _no_request(request_id)
        return {"request": request_id, "gateway": gateway_id, "cancelled": True}

    async def migrate(self, order: dict[str, Any]) -> dict[str, Any]:
        """Moves one request and waits for the outcome; the pause is what this request's client saw."""
        request_id, destination_id, method = _read_order(order)
        source, found = await self._source(request_id)
        destination = self._known(destination_id, "destination")
        self._check_model(found, destination)
        try:
            result = await self._order(request_id, source, destination, method)
        except LlumletRefused as error:
            # It has just left there, and its reply lags behind: once that has followed, the order can be given again.
            if error.llumlet_status != 404 or not await self._requests.has_left(request_id, source.instance_id):
                raise _refusal(error) from error
            try:
                result = await self._order(request_id, (await self._source(request_id))[0], destination, method)
            except LlumletRefused as again:
                raise _refusal(again) from again
        if result.outcome != "committed":
            return {**result.to_json(), "pause_ms": None, "token_gap_ms": None}
        return {**result.to_json(), **await self._requests.pause(request_id, result.migration_id)}

    async def drain(self, instance_id: str, order: dict[str, Any]) -> dict[str, Any]:
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

    def _check_model(self, found: Found | None, destination: Instance) -> None:
        """An instance may serve another model, even under the same name: there the request would be another one."""
        group = found.group if found is not None else None
        if group is None or self._members.serves(destination.instance_id, group):
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

    async def _source(self, request_id: str) -> tuple[Instance, Found | None]:
        """Where the request runs, as the gateway says that holds its client; else by its record."""
        found = await self._requests.find(request_id)
        if found is None:
            instance_id = await self._requests.instance_of(request_id)
        else:
            instance_id = found.instance_id if found.is_running else None
        source = self._members.get(instance_id) if instance_id is not None else None
        if source is None:
            raise _no_request(request_id)
        return source, found

    def _instance(self, member: Member, all_in_flight: Mapping[str, int]) -> dict[str, Any]:
        now = time.monotonic()
        report = member.report
        instance_id = member.instance.instance_id
        in_flight = all_in_flight.get(instance_id, 0)
        return {
            "id": instance_id,
            "url": member.instance.url,
            "source": self._targets.source(member.instance.url),
            "boot_id": member.instance.boot_id,
            "models": sorted(member.models),
            "plugin": None if report is None else report.plugin_version,
            "healthy": member.usable,
            "reason": member.reason or member.health.ejected_why,
            "stale": self._members.is_stale(member, now),
            "draining": member.draining,
            "empty": None if report is None else in_flight == 0 and _is_empty(report),
            "report_age_ms": None if report is None else round((now - member.reported_at) * 1000),
            "in_flight": in_flight,
            "in_flight_here": self._dispatcher.in_flight(instance_id),
            "report": None if report is None else report.to_json(),
            "load": None if member.load is None else dataclasses.asdict(member.load),
        }


def _is_empty(report: Report) -> bool:
    return report.requests_running + report.requests_waiting + report.migrations_in == 0


def _with_plugin(instance: Instance) -> Instance:
    if not instance.managed:
        raise Conflict(f"`{instance.instance_id}` runs without the plugin.", code="no_plugin")
    return instance


class _Json(Response):
    """In ASCII: half a surrogate pair in an instance's own words must not cost the whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


def build_admin_app(admin: Admin) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)

    @app.get("/admin/instances")
    async def instances() -> Response:
        return _Json(await admin.instances())

    @app.get("/admin/requests")
    async def requests() -> Response:
        return _Json(await admin.requests())

    @app.get("/admin/requests/{request_id}")
    async def request(request_id: str) -> Response:
        return _Json(await admin.request(request_id))

    @app.delete("/admin/requests/{request_id}")
    async def cancel(request_id: str) -> Response:
        return _Json(await admin.cancel(request_id))

    @app.post("/admin/instances")
    async def add(request: Request) -> Response:
        return _Json(await admin.add(await _order(request, "url")))

    @app.delete("/admin/instances")
    async def remove(request: Request) -> Response:
        return _Json(await admin.remove(await _order(request, "url")))

    @app.delete("/admin/instances/{instance_id}")
    async def remove_instance(instance_id: str) -> Response:
        return _Json(await admin.remove_instance(instance_id))

    @app.post("/admin/migrate")
    async def migrate(request: Request) -> Response:
        return _Json(await admin.migrate(await _order(request, "request", "destination", "method")))

    @app.post("/admin/instances/{instance_id}/drain")
    async def drain(instance_id: str, request: Request) -> Response:
        order = await _order(request, "timeout_s", may_be_empty=True)
        return _Json(await admin.drain(instance_id, order))

    @app.delete("/admin/instances/{instance_id}/drain")
    async def undrain(instance_id: str) -> Response:
        return _Json(await admin.undrain(instance_id))

    app.add_exception_handler(GatewayError, _handler(_gateway_error))
    app.add_exception_handler(HTTPException, _handler(_http_exception))
    app.add_exception_handler(Exception, _handler(_own_bug))
    return app


def _handler(to_response: Callable[[Any], Response]) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(_request: Request, error: Exception) -> Response:
        return to_response(error)

    return handle


def _gateway_error(error: GatewayError) -> Response:
    return _Json(error.to_json(), error.status, error.headers)


def _own_bug(_error: Exception) -> Response:
    """Starlette raises it again once this is sent, so that it is logged."""
    return _gateway_error(GatewayError("The gateway failed to handle this request."))


def _http_exception(error: HTTPException) -> Response:
    """FastAPI's own: no such route, or not this method."""
    kind = "NotFoundError" if error.status_code == 404 else "invalid_request_error"
    body = {"error": {"message": error.detail, "type": kind, "param": None, "code": error.status_code}}
    return _Json(body, error.status_code, error.headers)


def _refusal(error: LlumletRefused) -> GatewayError:
    if error.llumlet_status == 404:
        return NotFound(error.message, param="request", code=error.code)
    if error.llumlet_status == 409:
        return Conflict(error.message, param="request", code=error.code)
    return error


async def _order(request: Request, *fields: str, may_be_empty: bool = False) -> dict[str, Any]:
    """A field that is not known may be a slip: what was meant by it would not be done."""
    body = await _body(request)
    if may_be_empty and not body:
        return {}
    try:
        order = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest("The request body is not valid JSON.") from error
    if not isinstance(order, dict):
        raise BadRequest(f"The request body must be a JSON object with {_listed(fields)}.")
    for name in order:
        if name not in fields:
            raise BadRequest(
                f"`{name[:NAME_SHOWN_MAX]}` is not known; there is {_listed(fields)}.", param=name[:NAME_SHOWN_MAX]
            )
    return order


def _listed(fields: Sequence[str]) -> str:
    return ", ".join(f"`{field}`" for field in fields)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > BODY_BYTES_MAX:
                    raise TooLarge(f"The request body is larger than {BODY_BYTES_MAX} bytes.")
    except TimeoutError as error:
        raise BodyTimeout(f"The request body took more than {BODY_S:g} s.") from error
    except ClientDisconnect as error:
        raise BadRequest("The request body has not come to its end.") from error
    return b"".join(parts)


def _read_drain(order: dict[str, Any]) -> float:
    timeout_s = order.get("timeout_s", DRAIN_TIMEOUT_S)
    # Not a number (NaN) is in no range.
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= DRAIN_TIMEOUT_S_MAX:
        raise BadRequest(
            f"`timeout_s` must be a number above 0, and at most {DRAIN_TIMEOUT_S_MAX:g}.", param="timeout_s"
        )
    return float(timeout_s)


def _read_order(order: dict[str, Any]) -> tuple[str, str, str]:
    for name in ("request", "destination"):
        if not isinstance(order.get(name), str) or not order[name]:
            raise BadRequest(f"`{name}` is missing or not a string.", param=name)
    method = order.get("method", "live")
    if method not in MIGRATION_METHODS:
        raise BadRequest(f"`method` must be one of {', '.join(MIGRATION_METHODS)}.", param="method")
    return _read_id(order["request"]), order["destination"], method


def _read_id(said: str) -> str:
    """The gateway's own id of a request, also where an answer's id is given."""
    request_id = said
    for prefix in _ID_PREFIXES:
        request_id = request_id.removeprefix(prefix)
    if not is_identifier(request_id):
        raise NotFound("There is no running request of this id.", param="request", code="request_not_found")
    return request_id


def _no_request(request_id: str) -> NotFound:
    return NotFound(f"There is no running request `{request_id}`.", param="request", code="request_not_found")


def _read_url(order: dict[str, Any]) -> str:
    if not isinstance(order.get("url"), str):
        raise BadRequest("`url` is missing or not a string.", param="url")
    try:
        return read_url(order["url"])
    except ValueError as error:
        raise BadRequest(f"`url` {error}.", param="url") from error
