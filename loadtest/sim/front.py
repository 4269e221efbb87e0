"""The gateway in a simulation: what it knows of the instances, who waits, and where each request is sent.

It decides with the code of the live one: ``NamedPolicy.start_at`` for those policies that start requests at once, and
for late binding ``Lineup.best_site``, ``site`` and ``allot`` in the order in which ``gateway/serving/waiting.py`` calls
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gateway.policy.dispatch import queue_length, rank
from gateway.policy.lineup import Lineup, Standing
from gateway.policy.policies import NamedPolicy, Start
from gateway.policy.view import ClusterView
from gateway.policy.waiting import Room, Site, Waiter, allot, kept_instance, site
from loadtest.sim.engine import Request
from loadtest.sim.node import Node

TICK_S = 0.05
"""Between two looks at those that wait (``gateway.serving.waiting``)."""


class Clock(Protocol):
    now: float

    def at(self, time: float, event: Callable[[], object]) -> None: ...


class Front:
    def __init__(
        self,
        policy: NamedPolicy,
        model: str,
        nodes: Mapping[str, Node],
        clock: Clock,
        send: Callable[[Node, Request], None],
        protected: frozenset[int] = frozenset(),
    ) -> None:
        """``protected``: classes with headroom."""
        self._protected = protected
        self._policy = policy
        self._model = model
        self._nodes = nodes
        self._clock = clock
        self._send = send
        self.binds_late = policy.start is Start.WHEN_ROOM
        self._lineup = Lineup()
        self._changed: set[str] = set()
        self._line: dict[str, Request] = {}
        """Those that wait here, in the order in which they came."""
        self._last: str | None = None
        self._looks_at = -1.0
        self._looked_at = -TICK_S

    def __len__(self) -> int:
        return len(self._line)

    def waiting(self) -> list[Request]:
        return list(self._line.values())

    # What happens.

    def arrived(self, request: Request) -> None:
        if self._line or not self._start_at_once(request):
            self._line[request.request_id] = request
            self._wake()

    def returned(self, node: Node, request: Request, said: Room) -> None:
        """The instance has not let it in. It keeps its place."""
        node.says_busy(said)
        self.changed(node)
        self._line[request.request_id] = request
        self._wake()

    def changed(self, node: Node) -> None:
        """It has reported, or is about to, or is gone."""
        self._changed.add(node.instance_id)
        if self._line:
            self._wake()

    # What is decided.

    def view(self) -> ClusterView:
        views = (node.view for node in self._nodes.values())
        waiting_tokens = sum(request.total_tokens for request in self._line.values())
        return ClusterView(tuple(view for view in views if view is not None), self._kept_ids(), waiting_tokens)

    def _start_at_once(self, request: Request) -> bool:
        if self.binds_late:
            self._prepare()
            best = self._lineup.best_site(self._waiter(request))
            chosen = best.instance_id if best is not None else None
        elif self._policy.start is Start.FREEST and request.execution_priority not in self._protected:
            self._prepare()
            chosen = self._lineup.best()
        else:
            sent = {one.instance_id: one.on_its_way() for one in self._nodes.values()}
            views = (node.view for node in self._nodes.values())
            view = ClusterView(tuple(view for view in views if view is not None))
            tokens = request.total_tokens if request.execution_priority in self._protected else None
            chosen = self._policy.start_at(view, self._model, sent, self._last, tokens)
        if chosen is None:
            return False
        self._give(self._nodes[chosen], request)
        return True

    def _give(self, node: Node, request: Request) -> None:
        node.sent(request.total_tokens + 1)
        self._last = node.instance_id
        self._changed.add(node.instance_id)
        self._send(node, request)

    def _wake(self) -> None:
        """At most once a tick."""
        if self._looks_at < self._clock.now:
            self._looks_at = max(self._clock.now, self._looked_at + TICK_S)
            self._clock.at(self._looks_at, self._look)

    def _look(self) -> None:
        self._looked_at, self._looks_at = self._clock.now, -1.0
        if not self._line:
            return
        if not self.binds_late:
            while self._line and self._start_at_once(next(iter(self._line.values()))):
                del self._line[next(iter(self._line))]
            return
        self._prepare()
        sites = self._lineup.sites()
        for allotment in allot(self._waiters(sites), sites, self._policy.waiting):
            self._give(self._nodes[allotment.instance_id], self._line.pop(allotment.request_id))

    def _kept_ids(self) -> frozenset[str]:
        if not self.binds_late or not self._line:
            return frozenset()
        oldest = self._waiter(self._oldest())
        if oldest.waited_s < self._policy.waiting.aged_s:
            return frozenset()
        self._prepare()
        kept_id = kept_instance([oldest], self._lineup.sites(), self._policy.waiting)
        return frozenset() if kept_id is None else frozenset({kept_id})

    def _oldest(self) -> Request:
        return min(self._line.values(), key=lambda request: (request.arrived_at, request.request_id))

    def _waiters(self, sites: Sequence[Site]) -> list[Waiter]:
        """Those for whom there is room somewhere, and the one for whom an instance may be kept: looking at all others
        as well would change nothing, and take most of a run's time under overload."""
        room_tokens = max((one.room.blocks * one.block_size for one in sites if one.room.places > 0), default=0)
        oldest = self._oldest()
        return [
            self._waiter(request)
            for request in self._line.values()
            if request.total_tokens <= room_tokens or request is oldest
        ]

    def _waiter(self, request: Request) -> Waiter:
        waited_s = self._clock.now - request.arrived_at
        is_protected = request.execution_priority in self._protected
        return Waiter(request.request_id, request.priority, waited_s, request.total_tokens, is_protected=is_protected)

    def _prepare(self) -> None:
        """As ``gateway.serving.dispatch`` does: what has changed since the last look, and nothing else."""
        on_the_way = set()
        for instance_id in sorted(self._changed):
            node = self._nodes[instance_id]
            view = node.view
            if node.has_reports_on_the_way:
                on_the_way.add(instance_id)
            if view is None or not view.usable:
                self._lineup.drop(instance_id)
                continue
            sent = node.on_its_way()
            found = site(view, sent) if self.binds_late else _NO_SITE
            if node.said_busy is not None:
                less = Room(
                    min(found.room.blocks, node.said_busy.blocks), min(found.room.places, node.said_busy.places)
                )
                found = dataclasses.replace(found, room=less)
            self._lineup.put(Standing(view, rank(view, sent), queue_length(view, sent), sent.in_flight, False, found))
        self._changed = on_the_way


_NO_SITE = Site("", Room(0, 0), 1, 1, 0.0, 0)
