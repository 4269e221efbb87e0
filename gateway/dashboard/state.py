"""What is shown of the cluster: what this gateway knows of all instances, and what it has measured itself."""

from __future__ import annotations

import statistics
from typing import Any

from gateway.cluster.members import Member, Members
from gateway.cluster.replicas import Replicas
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.dashboard.journal import Journal
from gateway.dashboard.window import Window
from gateway.scheduler.leader import Leader
from gateway.serving.dispatch import Dispatcher
from gateway.serving.session import Sessions
from gateway.serving.waiting import Waiting
from gateway.version import installed_version
from gateway.wire import PriorityClass, Report

MODELS_SHOWN_MAX = 8


class State:
    def __init__(
        self,
        gateway_id: str,
        members: Members,
        dispatcher: Dispatcher,
        waiting: Waiting,
        sessions: Sessions,
        leader: Leader,
        store: Store,
        replicas: Replicas,
        counters: Counters,
        journal: Journal,
    ) -> None:
        self._gateway_id = gateway_id
        self._members = members
        self._dispatcher = dispatcher
        self._waiting = waiting
        self._sessions = sessions
        self._leader = leader
        self._store = store
        self._replicas = replicas
        self._counters = counters
        self._journal = journal
        self._window = Window(counters)
        self._version = installed_version()

    def begin(self) -> None:
        """Somebody looks, after nobody did."""
        self._window.begin()
        self._journal.forget_states()

    def look(self, now: float) -> dict[str, Any]:
        instances = [self._instance(member, now) for member in self._members.all()]
        self._journal.look({one["id"]: one["state"] for one in instances})
        return {
            "gateway": {
                "id": self._gateway_id,
                "version": self._version,
                "leading": self._leader.is_leading,
                "others": sorted(self._replicas.others),
                "redis": self._store.up,
                "requests": self._sessions.count(),
                "waiting": {one.word: count for one, count in self._waiting.waiting_by_class().items()},
            },
            "measured": self._window.look(self._tokens(), now),
            "freeness": _freeness(instances),
            "instances": instances,
        }

    def _tokens(self) -> int:
        ended = sum(self._counters.counts("output_tokens").values())
        return ended + sum(tokens for _, tokens in self._sessions.tokens_live())

    def _instance(self, member: Member, now: float) -> dict[str, Any]:
        instance_id = member.instance.instance_id
        in_flight = self._dispatcher.in_flight(instance_id)
        shown = {
            "id": instance_id,
            "state": self._state(member, in_flight, now),
            "reason": member.reason or member.health.ejected_why,
            "models": sorted(member.models)[:MODELS_SHOWN_MAX],
            "plugin": member.instance.managed,
            "in_flight": in_flight,
        }
        if member.report is not None:
            return shown | _of_report(member.report, member.draining, now - member.reported_at)
        return shown | _of_load(member)

    def _state(self, member: Member, in_flight: int, now: float) -> str:
        """As `kvferry status` has it."""
        if not member.usable:
            return "down"
        if member.draining:
            return "draining" if in_flight or _has_requests(member.report) else "drained"
        return "stale" if self._members.is_stale(member, now) else "ready"


def _has_requests(report: Report | None) -> bool:
    return report is None or report.requests_running + report.requests_waiting + report.migrations_in > 0


def _of_report(report: Report, draining: bool, age_s: float) -> dict[str, Any]:
    return {
        "freeness_steps": None if draining else report.freeness_steps,
        "block_size": report.block_size,
        "blocks_total": report.blocks_total,
        "blocks_used": max(0, report.blocks_total - report.blocks_free - report.blocks_reserved),
        "blocks_reserved": report.blocks_reserved,
        "head_of_line_blocks": report.head_of_line_blocks,
        "queued_blocks": report.queued_blocks,
        "running": report.requests_running,
        "running_max": report.requests_running_max,
        "running_by_class": _by_class(report.running_by_priority),
        "waiting": report.requests_waiting,
        "step_ms": round(report.step_ms, 2),
        "migrations_in": report.migrations_in,
        "migrations_out": report.migrations_out,
        "age_ms": round(age_s * 1000, -1),
    }


def _of_load(member: Member) -> dict[str, Any]:
    """Without the plugin, by its metrics; nothing at all while those are not known."""
    load = member.load
    if load is None:
        return {}
    return {
        "block_size": load.block_size,
        "blocks_total": load.blocks_total,
        "blocks_used": round(load.kv_usage * load.blocks_total),
        "running": load.requests_running,
        "running_by_class": {"normal": load.requests_running},
        "waiting": load.requests_waiting,
    }


def _by_class(by_priority: dict[str, int]) -> dict[str, int]:
    """vLLM's priorities are a hundred apart, and count down within a class: the nearest one is meant."""
    counts = dict.fromkeys((one.word for one in PriorityClass), 0)
    for priority, count in by_priority.items():
        try:
            value = int(priority)
        except ValueError:
            continue
        counts[min(PriorityClass, key=lambda one: abs(one - value)).word] += count
    return counts


def _freeness(instances: list[dict[str, Any]]) -> dict[str, Any]:
    """Of those that take requests now."""
    known = [
        one["freeness_steps"] for one in instances if one["state"] == "ready" and one.get("freeness_steps") is not None
    ]
    if not known:
        return {"instances": 0, "mean_steps": None, "least_steps": None}
    return {
        "instances": len(known),
        "mean_steps": round(statistics.fmean(known), 1),
        "least_steps": round(min(known), 1),
    }
