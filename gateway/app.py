"""Builds every object once, and starts and stops the loops. The result is an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import FastAPI

from gateway.access import Keys
from gateway.admin import Admin, build_admin_app
from gateway.admission import Admission
from gateway.cluster.discovery import Discovery
from gateway.cluster.limits import Limiter
from gateway.cluster.llumlet import LlumletClient
from gateway.cluster.members import Members
from gateway.cluster.order import SharedOrder
from gateway.cluster.plain import LoadReader
from gateway.cluster.pulse import Pulse
from gateway.cluster.records import Records
from gateway.cluster.replicas import Replicas
from gateway.cluster.reports import RETRY_MOST_S, ReportReader
from gateway.cluster.resolver import resolve
from gateway.cluster.responses import StoredResponses
from gateway.cluster.store import Store
from gateway.cluster.targets import Resolve, Targets
from gateway.config import Settings
from gateway.counters import Counters
from gateway.dashboard.glances import QUESTION as GLANCE_QUESTION
from gateway.dashboard.glances import Glances
from gateway.dashboard.journal import Journal
from gateway.dashboard.page import Page
from gateway.dashboard.parts import build_parts
from gateway.dashboard.state import State
from gateway.dashboard.stream import PATH as EVENTS_PATH
from gateway.dashboard.stream import Events
from gateway.errors import ConfigError, ShuttingDown, Unauthorized
from gateway.gateways import QUESTION as GATEWAYS_QUESTION
from gateway.gateways import Gateways
from gateway.keys_file import KeysFile
from gateway.metrics import MetricsPage
from gateway.policy.decide import PolicySettings
from gateway.requests import OwnRequests, Requests
from gateway.routes import Receive, Routes, Scope
from gateway.scheduler.drain import Drains
from gateway.scheduler.executor import Executor, MoveRules
from gateway.scheduler.leader import Leader
from gateway.serving.backend import Backend
from gateway.serving.deadline import Deadlines
from gateway.serving.dispatch import Dispatcher
from gateway.serving.forward import Forwarder
from gateway.serving.relay import Relay
from gateway.serving.reply import Reply, Send
from gateway.serving.serve import Server
from gateway.serving.session import Sessions
from gateway.serving.waiting import TICK_S, Waiting, WaitingLimits
from gateway.serving.watch import Watch
from gateway.telemetry import cancel_all, log, run_forever
from gateway.tracing import NO_TRACER, Tracer
from gateway.wire import execution_priority
from gateway.worker_pages import Seat

RECORDS_INTERVAL_S = 0.2
TARGETS_S = 0.5
FIRST_BEAT_S = 1.0
HEALTH_PATHS = ("/health", "/ping")
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_tracer(tracing: str) -> Tracer:
    """Raises :class:`ConfigError` where the packages for it are missing."""
    if tracing == "off":
        return NO_TRACER
    try:
        from gateway.otel import otlp_tracer
    except ImportError as error:
        raise ConfigError(
            f"KVFERRY_TRACING=otlp needs the extra `tracing` ({error.name} is missing): pip install 'kvferry[tracing]'."
        ) from error
    return otlp_tracer()


class Gateway:
    def __init__(
        self, settings: Settings, tracer: Tracer | None = None, seat: Seat | None = None, resolve: Resolve = resolve
    ) -> None:
        """``tracer``: in place of the one that the settings ask for. ``seat``: among several workers. ``resolve``:
        what tells a name's addresses."""
        intervals, limits = settings.intervals, settings.limits
        self.settings = settings
        self._tracer = tracer or build_tracer(settings.tracing)
        self.gateway_id = uuid.uuid4().hex
        self.counters = Counters()
        targets = {execution_priority(one): tokens for one, tokens in settings.target_loads.items()}
        self.members = Members(intervals.report_stale_s, intervals.unheard_s, settings.health, targets)
        self.store = Store(settings.redis_url)
        self.llumlets = LlumletClient(settings.secret, settings.upstream_api_key, intervals.probe_timeout_s)
        self._pulse_timeout_s = settings.budgets.hang_s / 3
        self.records = Records(self.store, intervals.ownership_refresh_s, self.counters)
        self.sessions = Sessions(self.gateway_id, self.records, settings.limits.recent_requests)
        self.dispatcher = Dispatcher(
            self.members,
            limits.requests_per_instance,
            limits.queue_per_instance,
            awaits_some=lambda: self.targets.awaits_some(),
        )
        self.targets = Targets(settings.instance_urls, self.members, self._loops_of, self.dispatcher.in_flight, resolve)
        self.discovery = Discovery(
            self.targets.urls, self.members, self.llumlets, self.store, min(self._pulse_timeout_s, 1.0)
        )
        self.deadlines = Deadlines(settings.budgets.total_s)
        budgets = settings.budgets
        self._order_store = Store(settings.redis_url)
        waiting = self.waiting = Waiting(
            self.dispatcher,
            SharedOrder(self._order_store, self.gateway_id, budgets.order_s, self.counters),
            settings.waiting,
            WaitingLimits(budgets.instance_wait_s, budgets.room_wait_s, limits.waiters),
            self.counters,
            binds_late=settings.late_binding,
            protected=settings.target_loads.keys(),
        )
        self.members.on_report = self._reported
        self.backend = Backend(settings.secret, settings.upstream_api_key, settings.budgets)
        server = Server(
            self.members,
            self.dispatcher,
            waiting,
            self.deadlines,
            self.backend,
            Relay(settings.budgets, settings.limits),
            self.sessions,
            settings.budgets.moved_s,
            self.counters,
        )
        self.stored = StoredResponses(
            self.store, settings.budgets.limits_s, lambda: not self.limiter.is_shared, self.counters
        )
        forwarder = Forwarder(
            self.members,
            self.dispatcher,
            waiting,
            self.deadlines,
            self.backend,
            self.stored,
            settings.budgets,
            settings.limits,
            self.counters,
        )
        rules = MoveRules(settings.picking, settings.moves_at_once, tuple(settings.target_loads))
        executor = Executor(self.members, self.llumlets, intervals.pairing_lease_s, self.counters, rules)
        self.drains = Drains(
            self.members,
            self.llumlets,
            executor,
            self.dispatcher.in_flight,
            intervals.drain_look_s,
            self.counters,
        )
        policy = PolicySettings(settings.policy, settings.migration)
        self.leader = Leader(
            self.gateway_id,
            self.store,
            self.members,
            executor,
            policy,
            intervals.leader_lease_s,
            self.counters,
            waiting.kept,
        )
        api_keys = Keys(settings.api_keys, settings.named_keys, open_if_empty=True)
        self._limits_store = Store(settings.redis_url)
        self.limiter = Limiter(self._limits_store, settings.budgets.limits_s, self.counters)
        self._keys_file = KeysFile(settings.keys_file, api_keys) if settings.keys_file else None
        admission = Admission(api_keys, self.limiter, settings.caps, sends_priority=settings.sends_priority)
        self._routes = Routes(server, forwarder, self.members, admission, settings.limits, self.counters, self._tracer)
        own_requests = OwnRequests(self.sessions, self.deadlines)
        self.replicas = Replicas(self.gateway_id, self.store, self.records, self.targets, self._answer)
        self._own_requests = own_requests
        self.gateways = Gateways(
            self.gateway_id,
            self.replicas,
            self.dispatcher.all_in_flight,
            lambda: self.leader.is_leading,
            lambda: self.store.up,
        )
        self.journal = Journal(self.members)
        self.sessions.on_moved = self.journal.moved
        self.leader.on_action, executor.on_order = self.journal.decided, self.journal.ordered
        self._glances = Glances(self.gateway_id, self.sessions, self.journal)
        admin = Admin(
            self.gateway_id,
            self.members,
            self.dispatcher,
            Requests(self.gateway_id, own_requests, self.replicas, self.store),
            self.gateways,
            self.targets,
            self.discovery,
            self.store,
            self.leader,
            executor,
            self.drains,
            self.counters,
        )
        self._page = Page()
        self.events = self._build_events()
        self._watch = Watch(self.backend, self.members, settings.budgets, intervals.watch_s)
        self.metrics = MetricsPage(
            self.counters, self.members, self.dispatcher, waiting, self.sessions, self.store, self.leader, seat
        )
        metrics_keys = [key for key in (settings.metrics_key, settings.admin_key) if key and not settings.metrics_open]
        self._metrics_keys = Keys(metrics_keys, open_if_empty=settings.metrics_open)
        self._admin: FastAPI = build_admin_app(admin)
        self._admin_keys = Keys([settings.admin_key] if settings.admin_key else [], open_if_empty=False)
        self._intervals = intervals
        self._loops: list[asyncio.Task[None]] = []
        self._is_closing = self._is_closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http" if self._is_closed or (self._is_closing and scope["path"] in HEALTH_PATHS):
                await Reply(send).fail(ShuttingDown("This gateway is shutting down. Try again."))
            case "http" if scope["path"] == EVENTS_PATH:
                await self._guarded(self._admin_keys, self.events, scope, receive, send)
            case "http" if scope["path"].startswith("/admin/"):
                await self._guarded(self._admin_keys, self._admin, scope, receive, send)
            case "http" if scope["path"] == "/metrics":
                await self._guarded(self._metrics_keys, self.metrics, scope, receive, send)
            case "http" if self._page.serves(scope["path"]):
                await self._page(scope, receive, send)
            case "http":
                await self._routes(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case _:
                await send({"type": "websocket.close", "code": 1003})

    async def start(self) -> None:
        """One round of discovery first, so that the first request finds instances."""
        await self.metrics.start()
        await asyncio.gather(self._first_beat(), self.targets.resolve_names())
        await self.discovery.probe_all()
        self._run(
            "discovery", run_forever("discovery", self.discovery.probe_all, self._intervals.probe_s, self.counters)
        )
        self._run("registry", run_forever("registry", self._publish_registry, self._intervals.probe_s, self.counters))
        self._run("targets", run_forever("targets", self.targets.resolve_names, TARGETS_S, self.counters))
        self._run("beat", run_forever("beat", self.replicas.beat, self._intervals.beat_s, self.counters))
        self._run("calls", run_forever("calls", self.replicas.listen, 0, self.counters))
        if self._keys_file is not None:
            look = self._keys_file.look
            self._run("keys_file", run_forever("keys_file", look, self._intervals.keys_file_s, self.counters))
        self._run("limits", run_forever("limits", self.limiter.tick, self._intervals.limits_s, self.counters))
        self._run("records", run_forever("records", self.records.flush, RECORDS_INTERVAL_S, self.counters))
        self._run("leader", run_forever("leader", self.leader.tick, self._intervals.leader_tick_s, self.counters))
        self._run("drains", run_forever("drains", self._follow_drains, self._intervals.leader_tick_s, self.counters))
        self._run("metrics", run_forever("metrics", self._forget_gone, self._intervals.probe_s, self.counters))
        self._run("waiting", run_forever("waiting", self.waiting.look, TICK_S, self.counters))
        self._run("watch", run_forever("watch", self._watch.look, self._intervals.watch_s, self.counters))
        log("started", gateway=self.gateway_id, instances_healthy=self.members.healthy_count())

    async def stop(self) -> None:
        self.metrics.close()
        await self.events.stop()
        await cancel_all(self._loops)
        await self.targets.stop()
        await self.drains.stop()
        await self.replicas.stop()
        await self.leader.release()
        await self.records.flush()
        self._routes.bodies.close()
        await self.stored.close()
        await self.limiter.close()
        await self._limits_store.close()
        await self.waiting.close()
        await self._order_store.close()
        await self.backend.close()
        await self.llumlets.close()
        await self.store.close()
        await self._tracer.stop()
        log("stopped", gateway=self.gateway_id)

    def begin_closing(self) -> None:
        """Called in a signal handler: ``/health`` says so from now on, and everything else goes on."""
        self._is_closing = True

    def refuse_new(self) -> None:
        self._is_closed = True
        self.events.close()

    def end_requests(self) -> int:
        """Each with an error event, or a status if nothing of it has been sent."""
        return self.deadlines.end_all(ShuttingDown("This gateway is shutting down, and the request took too long."))

    def _build_events(self) -> Events:
        """What the dashboard is made from."""
        state = State(
            self.gateway_id,
            self.members,
            self.dispatcher,
            self.waiting,
            self.sessions,
            self.leader,
            self.store,
            self.replicas,
            self.counters,
            self.journal,
        )
        parts = build_parts(self.gateway_id, state, self.journal, self._glances, self.replicas)
        return Events(parts, self.counters, state.begin)

    async def _answer(self, kind: str, words: Mapping[str, Any]) -> Mapping[str, Any]:
        """Another gateway's question."""
        if kind == GLANCE_QUESTION:
            return self._glances.own()
        return self.gateways.own() if kind == GATEWAYS_QUESTION else await self._own_requests.answer(kind, words)

    async def _first_beat(self) -> None:
        """For what operators have ordered; without Redis the start does not wait for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_BEAT_S):
                await self.replicas.beat()

    def _reported(self) -> None:
        self.dispatcher.reported()
        self.waiting.wake()

    async def _follow_drains(self) -> None:
        lease = self.leader.lease
        await self.drains.follow(lease.token if lease is not None else None)

    async def _publish_registry(self) -> None:
        if (lease := self.leader.lease) is not None:
            await self.discovery.publish(lease)

    def _loops_of(self, url: str) -> list[Coroutine[Any, Any, None]]:
        """What follows one instance's address. Each has a loop of its own: one that hangs delays none of the others."""
        pulse = Pulse(url, self.members, self.llumlets, self._pulse_timeout_s)
        loads = LoadReader(url, self.members, self.llumlets, self._pulse_timeout_s)
        reports = ReportReader(url, self.members, self.llumlets, self.counters)
        pulse_s = self._intervals.pulse_s
        return [
            run_forever("reports", reports.run, RETRY_MOST_S, self.counters),
            run_forever("pulse", pulse.feel, pulse_s, self.counters, random.uniform(0, pulse_s)),
            run_forever("loads", loads.read, pulse_s, self.counters, random.uniform(0, pulse_s)),
        ]

    async def _forget_gone(self) -> None:
        """Instances and models that are no more, whether anybody reads the metrics or not."""
        self.metrics.forget_gone()
        self.dispatcher.forget(self.members.get)
        self.backend.forget(self.members.get)
        self.llumlets.keep(self.targets.urls())

    def _run(self, name: str, loop: Coroutine[Any, Any, None]) -> None:
        self._loops.append(asyncio.create_task(loop, name=name))

    async def _guarded(self, keys: Keys, application: Application, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            keys.check(scope["headers"])
        except Unauthorized as error:
            await Reply(send).fail(error)
            return
        await application(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})
