"""``GET /metrics``: what the gateway counts and what it knows of the instances, for Prometheus.

prometheus_client writes the page. Nothing is kept here: each reading is made from what is true at that moment, so
what is gone leaves no series behind. With several workers it has the series of all of them, by ``worker``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from gateway.cluster.members import Member, Members
from gateway.cluster.store import Store
from gateway.counters import FAMILIES, Counters, Distribution, Labels
from gateway.errors import MethodNotAllowed, WholeReply
from gateway.routes import Receive, Scope
from gateway.scheduler.leader import Leader
from gateway.serving.dispatch import Dispatcher
from gateway.serving.reply import Reply, Send
from gateway.serving.session import Sessions
from gateway.serving.waiting import Waiting
from gateway.version import installed_version
from gateway.worker_pages import Part, Seat, WorkerPages

PREFIX = "kvferry_"

INSTANCE_GAUGES = {
    "healthy": "Whether its last probe went well.",
    "ejected": "Whether it is held back on suspicion, though it answers.",
    "plain": "Whether it runs without the plugin.",
    "draining": "Whether it gets no new requests, for it is to be emptied.",
    "stale": "Whether its last report is too old to rely on.",
    "report_age_seconds": "Time since its last report.",
    "heard_age_seconds": "Time since its API server last answered /health.",
    "requests_in_flight": "What this gateway has there: legs that are open, waiting ones included.",
    "requests_running": "Requests in its engine's batch, of all gateways.",
    "requests_waiting": "Requests in its engine's queue, of all gateways.",
    "freeness_steps": "Decode steps that it has room for; -Inf while it drains.",
    "virtual_usage_blocks": "KV blocks that count as used in its freeness; +Inf while it drains.",
    "blocks": "KV blocks that it has.",
    "blocks_free": "Of those, the free ones.",
    "blocks_reserved": "Of those, set aside for requests that are on their way there.",
    "step_seconds": "Duration of its last engine steps.",
    "migrations_in": "Migrations under way to it.",
    "migrations_out": "Migrations under way from it.",
}
"""By name, less the prefix ``kvferry_instance_``. The last ones come from its report, and are missing without one."""
INSTANCE_TOTALS = {
    "migrations_ended": "Migrations away from it, whoever ordered them, by how they ended.",
    "migration_stages": "Stages of those that were committed.",
    "migration_blocks": "KV blocks that they sent.",
    "migration_bytes": "Bytes that they sent.",
    "migration_seconds": "How long they took, together.",
    "migration_final_seconds": "Of that, from the last step there to the acknowledged commit.",
}
"""By name, less the prefix ``kvferry_instance_``: since its start, as its last report says."""
GAUGES = {
    "instances": "Instances that are known.",
    "instances_healthy": "Of those, the ones that answer and are not ejected.",
    "model_instances": "Instances that can take a request for the model now.",
    "requests_in_flight": "Generation requests under way.",
    "requests_waiting": "Requests that wait here for an instance to have room, by priority class.",
    "leader": "Whether this gateway decides for all.",
    "redis_up": "Whether Redis answered the last command.",
    "redis_answer_age_seconds": "Time since Redis last answered; absent until it has.",
    "build_info": "The gateway's version; always 1.",
    "worker_up": "Whether the worker has told its part of this page.",
}
"""By name, less the prefix ``kvferry_``."""

Families = list[Any]


class MetricsPage:
    """An ASGI application, guarded before anything here runs."""

    def __init__(
        self,
        counters: Counters,
        members: Members,
        dispatcher: Dispatcher,
        waiting: Waiting,
        sessions: Sessions,
        store: Store,
        leader: Leader,
        seat: Seat | None = None,
    ) -> None:
        """``seat``: among several workers."""
        self._counters = counters
        self._members = members
        self._dispatcher = dispatcher
        self._waiting = waiting
        self._sessions = sessions
        self._store = store
        self._leader = leader
        self._version = installed_version()
        self._workers = WorkerPages(seat, self._part) if seat is not None else None

    async def start(self) -> None:
        if self._workers is not None:
            await self._workers.start()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        if scope["method"] != "GET":
            await reply.fail(MethodNotAllowed("This route takes GET only.", "GET"))
            return
        accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        encode, content_type = choose_encoder(accept.decode("latin-1"))
        # Written out beside the event loop: thousands of series take milliseconds, and streams go on meanwhile.
        text: bytes = await asyncio.to_thread(encode, Reading(await self._families()))
        await reply.whole(WholeReply(200, (("content-type", content_type),), text))

    def forget_gone(self) -> None:
        self._counters.keep("instance_id", lambda instance_id: self._members.get(instance_id) is not None)
        self._counters.keep("model", self._members.knows_model)

    async def _families(self) -> Families:
        if self._workers is None:
            return self._own()
        parts = await self._workers.all()
        came: dict[Labels, float] = {(str(index),): part is not None for index, part in enumerate(parts)}
        return [*_merged(parts), _gauge("worker_up", came, ["worker"])]

    def _own(self) -> Families:
        """All at one instant."""
        self.forget_gone()
        process = ProcessCollector(registry=None)
        return [*self._counted(), *self._instances(), *self._gauges(), *process.collect()]

    def _part(self) -> Part:
        """Of what several workers have to say, this one's."""
        return [
            [family.name, family.documentation, family.type, [list(sample[:3]) for sample in family.samples]]
            for family in self._own()
        ]

    def _counted(self) -> Iterator[Any]:
        for name, family in FAMILIES.items():
            if family.bounds:
                yield _histogram(name, self._counters.distributions(name))
            else:
                counts = self._counters.counts(name)
                if name == "output_tokens":
                    counts = self._with_live_tokens(counts)
                yield _counter(name, counts)
        yield _counter("redis_failures", {(): self._store.failures}, "Commands that Redis did not answer.")

    def _with_live_tokens(self, counts: dict[Labels, int]) -> dict[Labels, int]:
        for model, tokens in self._sessions.tokens_live():
            counts[(model,)] = counts.get((model,), 0) + tokens
        return counts

    def _instances(self) -> Families:
        gauges = {
            name: GaugeMetricFamily(f"{PREFIX}instance_{name}", text, labels=["instance_id"])
            for name, text in INSTANCE_GAUGES.items()
        }
        info = GaugeMetricFamily(
            f"{PREFIX}instance_info", "What it is; always 1.", labels=["instance_id", "vllm", "url"]
        )
        ejections = CounterMetricFamily(
            f"{PREFIX}instance_ejections", "Times that it was held back on suspicion.", labels=["instance_id"]
        )
        totals = {
            name: CounterMetricFamily(
                f"{PREFIX}instance_{name}",
                text,
                labels=["instance_id", "outcome"] if name == "migrations_ended" else ["instance_id"],
            )
            for name, text in INSTANCE_TOTALS.items()
        }
        now = time.monotonic()
        self._members.refresh(now)
        for member in self._members.all():
            instance = member.instance
            for name, labels, total in _migrations(member):
                totals[name].add_metric([instance.instance_id, *labels], total)
            ejections.add_metric([instance.instance_id], member.health.ejections_total)
            for name, value in self._of_instance(member, now):
                gauges[name].add_metric([instance.instance_id], value)
            version = member.report.vllm_version if member.report is not None else "unknown"
            # The instance's own word: one that is no text must not cost the whole page.
            info.add_metric([instance.instance_id, version.encode(errors="replace").decode(), instance.url], 1)
        return [*gauges.values(), *totals.values(), info, ejections]

    def _of_instance(self, member: Member, now: float) -> Iterable[tuple[str, float]]:
        yield "healthy", float(member.healthy)
        yield "ejected", float(member.health.ejected_why is not None)
        yield "plain", float(not member.instance.managed)
        yield "draining", float(member.draining)
        yield "stale", float(self._members.is_stale(member, now))
        yield "requests_in_flight", self._dispatcher.in_flight(member.instance.instance_id)
        if member.heard_at > float("-inf"):
            yield "heard_age_seconds", now - member.heard_at
        report, load = member.report, member.load
        if load is not None:
            yield "requests_running", load.requests_running
            yield "requests_waiting", load.requests_waiting
            yield "blocks", load.blocks_total
        if report is None:
            return
        yield "report_age_seconds", now - member.reported_at
        if (view := self._members.view_of(member.instance.instance_id)) is not None:
            yield "freeness_steps", view.freeness_steps
            yield "virtual_usage_blocks", view.virtual_usage_blocks
        yield "blocks", report.blocks_total
        yield "step_seconds", report.step_ms / 1000
        for name in ("requests_running", "requests_waiting", "blocks_free", "blocks_reserved"):
            yield name, getattr(report, name)
        yield "migrations_in", report.migrations_in
        yield "migrations_out", report.migrations_out

    def _gauges(self) -> Iterator[Any]:
        members, now = self._members.all(), time.monotonic()
        usable: dict[Labels, float] = {(model,): 0.0 for member in members for model in member.models}
        for one in self._members.view(now).instances:
            for model in {group.name for group in one.groups}:
                usable[(model,)] += one.usable
        yield _gauge("instances", {(): len(members)})
        yield _gauge("instances_healthy", {(): self._members.healthy_count()})
        yield _gauge("model_instances", usable, ["model"])
        yield _gauge("requests_in_flight", {(): self._sessions.count()})
        waiting: dict[Labels, float] = {
            (one.word,): float(count) for one, count in self._waiting.waiting_by_class().items()
        }
        yield _gauge("requests_waiting", waiting, ["priority"])
        yield _gauge("leader", {(): float(self._leader.is_leading)})
        yield _gauge("redis_up", {(): float(self._store.up)})
        age_s = now - self._store.answered_at
        yield _gauge("redis_answer_age_seconds", {(): age_s} if age_s < float("inf") else {})
        yield _gauge("build_info", {(self._version,): 1}, ["version"])


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """In place of a registry."""

    families: Families

    def collect(self) -> Families:
        return self.families


def _migrations(member: Member) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name, labels beside the instance's, and value."""
    ended = member.report.migrations_ended if member.report is not None else None
    if ended is None:
        return
    yield "migrations_ended", ("committed",), ended.committed
    yield "migrations_ended", ("aborted",), ended.aborted
    yield "migration_stages", (), ended.stages
    yield "migration_blocks", (), ended.blocks_sent
    yield "migration_bytes", (), ended.bytes_sent
    yield "migration_seconds", (), ended.duration_ms / 1000
    yield "migration_final_seconds", (), ended.final_ms / 1000


def _merged(parts: Iterable[Part | None]) -> Families:
    """The same families once, each series with its worker's number."""
    families: dict[str, Any] = {}
    for worker, part in enumerate(parts):
        for name, text, kind, samples in part or ():
            family = families.setdefault(name, Metric(name, text, kind))
            for sample, labels, value in samples:
                family.add_sample(sample, {**labels, "worker": str(worker)}, value)
    return [*families.values()]


def _counter(name: str, counts: dict[Labels, int], text: str = "") -> Any:
    """A count without labels is there from the beginning, as 0: so that its first rise is seen."""
    family = FAMILIES.get(name)
    labels = family.labels if family is not None else ()
    metric = CounterMetricFamily(PREFIX + name, text or (family.help if family is not None else ""), labels=labels)
    for values, count in (counts or ({} if labels else {(): 0})).items():
        metric.add_metric(values, count)
    return metric


def _gauge(name: str, values: MutableMapping[Labels, float], labels: Iterable[str] = ()) -> Any:
    metric = GaugeMetricFamily(PREFIX + name, GAUGES[name], labels=labels)
    for key, value in values.items():
        metric.add_metric(key, value)
    return metric


def _histogram(name: str, distributions: dict[Labels, Distribution]) -> Any:
    metric = HistogramMetricFamily(PREFIX + name, FAMILIES[name].help, labels=FAMILIES[name].labels)
    for values, distribution in distributions.items():
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        metric.add_metric(values, buckets, distribution.sum)
    return metric
