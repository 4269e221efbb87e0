"""Engines, a gateway's policy and the time between them: an event loop in virtual time.

What is decided is decided by ``gateway.policy`` alone: dispatch by ``choose_instance``, migration by ``decide``, both
on views made from reports that are as old as in the real system. What is modelled here is everything around it: when
a report arrives, what a gateway knows of its own dispatches, how long a copy takes and what it costs.

    cluster = Cluster(ClusterSettings(instances=16, ...))
    records = cluster.run(requests)

``at`` puts anything else into the same time (a crash, a drain, a new instance), so faults need no hooks of their own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gateway.policy.decide import Memory, Pair, PolicySettings, Unpair, decide
from gateway.policy.dispatch import Sent, choose_instance
from gateway.policy.view import ClusterView, InstanceView
from loadtest.sim.engine import Engine, EngineSettings, Outcome, Request, State
from loadtest.sim.profile import Profile
from loadtest.sim.reports import Identity, make_view

MODEL = "simulated"
STAGES_MAX = 64

Choose = Callable[[ClusterView, Mapping[str, Sent]], str | None]
"""Dispatch: the id of an instance, or ``None``: the request waits at the gateway until a report comes."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    instances: int
    engine: EngineSettings
    profile: Profile
    policy: PolicySettings = field(default_factory=PolicySettings)
    report_interval_s: float = 0.1
    report_delay_s: float = 0.005
    """From an instance to the gateway."""
    tick_s: float = 0.2
    """The leader's."""
    control_delay_s: float = 0.002
    """From the gateway, or a peer, to an instance."""
    migrations_out_max: int = 1
    migrations_in_max: int = 4
    settle_s: float = 1.0
    """A request that has just moved is not picked again before this; nor is a destination that has refused."""
    copies_tail: bool = False
    """The last tokens, which fill no block, are copied as well (Llumnix); else the destination computes them."""


@dataclass(slots=True)
class Record:
    """What became of one request. Times are in seconds, ``None`` where it did not come to that."""

    request: Request
    dispatched_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    moves: int = 0
    downtime_s: float = 0.0
    preemption_loss_s: float = 0.0
    """From each preemption to the next token."""
    instance_id: str | None = None
    lost: bool = False
    preempted_at: float | None = None


@dataclass(slots=True, eq=False)
class Node:
    """An instance, and what the gateway knows of it."""

    instance_id: str
    engine: Engine
    identity: Identity
    view: InstanceView | None = None
    """Of the last report that has arrived."""
    sent: deque[tuple[float, int]] = field(default_factory=deque)
    """Time and tokens of dispatches that this report cannot know of."""
    alive: bool = True
    draining: bool = False
    pairing: str | None = None
    rests_until: float = 0.0
    moves_out: dict[str, Move] = field(default_factory=dict)
    moves_in: int = 0
    settled_at: dict[str, float] = field(default_factory=dict)
    """Of requests that have moved here: when they may move on."""


@dataclass(slots=True, eq=False)
class Move:
    """One live migration."""

    request: Request
    source: Node
    destination: Node
    blocks: int
    """At the destination so far."""
    preemptions: int
    stages: int = 0
    frozen: bool = False
    over: bool = False
    copying: bool = False

    @property
    def reservation_id(self) -> str:
        return f"{self.source.instance_id}/{self.request.request_id}"


class Cluster:
    def __init__(self, settings: ClusterSettings, choose: Choose | None = None) -> None:
        self.settings = settings
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.records: dict[str, Record] = {}
        self.moves_begun = self.moves_done = self.preemptions = 0
        self._choose = choose or _freest
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._waiting: deque[Request] = deque()
        """At the gateway, since no instance was chosen."""
        self._unfinished = 0
        self._memory = Memory()
        for number in range(settings.instances):
            self.add_instance(offset_s=settings.report_interval_s * number / settings.instances)
        self.at(0.0, self._tick)

    def __repr__(self) -> str:
        return f"<Cluster at {self.now:.3f} s, {len(self.nodes)} instances, {self._unfinished} requests to finish>"

    # Time.

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Events at the same time come in the order in which they were put in, so that runs repeat."""
        self._sequence += 1
        heapq.heappush(self._events, (max(time, self.now), self._sequence, event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay_s, event)

    def run(self, requests: Iterable[Request], until_s: float = float("inf")) -> list[Record]:
        """Ends when all requests have, or at ``until_s``. ``requests`` are in the order of their arrival."""
        arrivals = iter(requests)
        self._arrive_next(arrivals)
        while self._events and self._unfinished and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return list(self.records.values())

    def _arrive_next(self, arrivals: Iterable[Request]) -> None:
        """One at a time: the queue of events stays small, and an endless workload is possible."""
        for request in arrivals:
            self._unfinished += 1
            self.at(request.arrived_at, lambda request=request: self._arrive(request, arrivals))  # type: ignore[misc]
            return

    # Instances.

    def add_instance(self, offset_s: float = 0.0) -> Node:
        """Ready ``offset_s`` from now, with its first report."""
        instance_id = f"i{len(self.nodes):04d}"
        engine = Engine(self.settings.engine, self.settings.profile)
        node = Node(instance_id, engine, Identity(instance_id, "boot", (MODEL,), "simulated"))
        self.nodes[instance_id] = node
        self.after(offset_s, lambda: self._report(node))
        return node

    def crash(self, instance_id: str) -> list[Request]:
        """It is gone, with all that ran there, which is returned: resume it with ``restart``, or count it as lost."""
        node = self.nodes[instance_id]
        node.alive, node.view = False, None
        for move in [move for other in self.nodes.values() for move in other.moves_out.values()]:
            if node in (move.source, move.destination):
                self._end_move(move)
        lost = node.engine.requests()
        for request in lost:
            node.engine.abort(request.request_id)
        return lost

    def restart(self, request: Request) -> None:
        """Dispatch it anew with the tokens that it has: a resume that computes everything again."""
        self._dispatch(request)

    def lose(self, request: Request) -> None:
        self.records[request.request_id].lost = True
        self._unfinished -= 1

    def drain(self, instance_id: str) -> None:
        self.nodes[instance_id].draining = True

    # The gateway.

    def view(self) -> ClusterView:
        return ClusterView(tuple(node.view for node in self.nodes.values() if node.view is not None))

    def sent(self) -> dict[str, Sent]:
        return {
            instance_id: Sent(len(node.sent), sum(count for _, count in node.sent), len(node.sent))
            for instance_id, node in self.nodes.items()
            if node.sent
        }

    def _arrive(self, request: Request, arrivals: Iterable[Request]) -> None:
        self.records[request.request_id] = Record(request)
        self._dispatch(request)
        self._arrive_next(arrivals)

    def _dispatch(self, request: Request) -> None:
        if self._waiting or not self._send(request):
            self._waiting.append(request)

    def _send(self, request: Request) -> bool:
        chosen = self._choose(self.view(), self.sent())
        if chosen is None:
            return False
        node = self.nodes[chosen]
        node.sent.append((self.now, request.total_tokens + 1))
        record = self.records[request.request_id]
        record.dispatched_at = self.now
        record.instance_id = chosen
        self.after(self.settings.control_delay_s, lambda: self._receive(node, request))
        return True

    def _receive(self, node: Node, request: Request) -> None:
        if not node.alive:
            self.restart(request)
            return
        node.engine.add(request)
        self._kick(node)

    def _tick(self) -> None:
        actions, self._memory = decide(self.view(), self._memory, self.now, self.settings.policy)
        for action in actions:
            destination = action.destination_id if isinstance(action, Pair) else None
            assert isinstance(action, (Pair, Unpair))
            self.after(self.settings.control_delay_s, self._pairing(self.nodes[action.source_id], destination))
        self.after(self.settings.tick_s, self._tick)

    def _pairing(self, node: Node, destination: str | None) -> Callable[[], None]:
        def event() -> None:
            node.pairing = destination

        return event

    # Reports, and what a llumlet does with each.

    def _report(self, node: Node) -> None:
        if not node.alive:
            return
        view, made_at = make_view(node.engine, node.identity, draining=node.draining), self.now
        self.after(self.settings.report_delay_s, lambda: self._reported(node, view, made_at))
        self.after(self.settings.report_interval_s, lambda: self._report(node))
        self._follow_pairing(node)

    def _reported(self, node: Node, view: InstanceView, made_at: float) -> None:
        if not node.alive:
            return
        node.view = view
        arrived_before = made_at - self.settings.control_delay_s
        while node.sent and node.sent[0][0] <= arrived_before:
            node.sent.popleft()
        while self._waiting and self._send(self._waiting[0]):
            self._waiting.popleft()

    def _follow_pairing(self, node: Node) -> None:
        if node.pairing is None or self.now < node.rests_until:
            return
        destination = self.nodes[node.pairing]
        while len(node.moves_out) < self.settings.migrations_out_max:
            request = self._pick(node)
            if request is None or not self._begin_move(node, destination, request):
                return

    def _pick(self, node: Node) -> Request | None:
        """Lowest execution priority first, then the shortest (``vllm_plugin.llumlet``)."""
        movable = [
            (request.execution_priority, request.total_tokens, request.request_id)
            for request in node.engine.requests()
            if (request.state is State.RUNNING or (node.draining and request.state is State.WAITING))
            and request.request_id not in node.moves_out
            and node.settled_at.get(request.request_id, 0.0) <= self.now
        ]
        return node.engine.get(min(movable)[2]) if movable else None

    # Steps.

    def _kick(self, node: Node) -> None:
        """Something has changed: an idle engine may have something to do."""
        if node.alive and node.engine.is_idle:
            self._after_step(node, node.engine.step(self.now))

    def _step_ends(self, node: Node) -> None:
        if node.alive:
            self._after_step(node, node.engine.step(self.now))

    def _after_step(self, node: Node, outcome: Outcome) -> None:
        if outcome.ends_at is not None:
            self.at(outcome.ends_at, lambda: self._step_ends(node))
        for request in outcome.sampled:
            if request.output_tokens == 1 or request.preemptions:
                self._note_token(self.records[request.request_id])
        for request in outcome.preempted:
            self.preemptions += 1
            self.records[request.request_id].preempted_at = self.now
        for request in outcome.finished:
            self.records[request.request_id].finished_at = self.now
            node.settled_at.pop(request.request_id, None)
            self._unfinished -= 1
        for move in list(node.moves_out.values()):
            if move.request.state is State.ENDED or move.request.preemptions != move.preemptions:
                self._end_move(move)
            elif move.frozen and node.engine.is_settled(move.request.request_id):
                move.frozen = False  # Once.
                self.after(self._downtime_s(move), lambda move=move: self._hand_over(move))  # type: ignore[misc]

    def _note_token(self, record: Record) -> None:
        if record.first_token_at is None:
            record.first_token_at = self.now
        if record.preempted_at is not None:
            record.preemption_loss_s += self.now - record.preempted_at
            record.preempted_at = None

    # Migrations.

    def _begin_move(self, source: Node, destination: Node, request: Request) -> bool:
        """Reserve, and copy what is finished. False if the destination refuses."""
        exported = source.engine.export(request.request_id)
        assert exported is not None
        move = Move(request, source, destination, 0, request.preemptions)
        reservation = None
        if destination.alive and not destination.draining and destination.moves_in < self.settings.migrations_in_max:
            reservation = destination.engine.reserve(move.reservation_id, request, len(exported.blocks))
        if reservation is None:
            source.rests_until = self.now + self.settings.settle_s
            return False
        self.moves_begun += 1
        source.moves_out[request.request_id] = move
        destination.moves_in += 1
        move.blocks = reservation.reused
        self.after(self.settings.control_delay_s, lambda: self._copy(move))
        return True

    def _copy(self, move: Move) -> None:
        """One stage: what was finished since the last one."""
        if move.over:
            return
        exported = move.source.engine.export(move.request.request_id)
        assert exported is not None
        blocks = len(exported.blocks)
        fresh = blocks - move.blocks
        if not move.destination.engine.extend(move.reservation_id, blocks):
            self._end_move(move)
            move.source.rests_until = self.now + self.settings.settle_s
            return
        self._count_copy(move, copying=True)
        copy_s = self.settings.profile.copy_s(max(fresh, 0) * self.settings.engine.block_size)
        self.after(copy_s + self.settings.control_delay_s, lambda: self._copied(move, blocks, fresh))

    def _copied(self, move: Move, blocks: int, fresh: int) -> None:
        if move.over:
            return
        self._count_copy(move, copying=False)
        move.destination.engine.receive(move.reservation_id, move.request, blocks)
        move.blocks = max(move.blocks, blocks)
        move.stages += 1
        if fresh > 1 and move.stages < STAGES_MAX:
            self._copy(move)
        elif move.source.engine.freeze(move.request.request_id):
            move.frozen = True
            if move.source.engine.is_settled(move.request.request_id):
                move.frozen = False
                self.after(self._downtime_s(move), lambda: self._hand_over(move))

    def _downtime_s(self, move: Move) -> float:
        return self.settings.profile.downtime_s(move.request.total_tokens) + self.settings.control_delay_s

    def _hand_over(self, move: Move) -> None:
        """The request has stood still at the source; what it grew by last is topped up here."""
        if move.over:
            return
        request, source, destination = move.request, move.source, move.destination
        size = self.settings.engine.block_size
        full = request.computed_tokens // size
        if not destination.engine.extend(move.reservation_id, max(full, request.total_tokens // size)):
            self._end_move(move)
            source.rests_until = self.now + self.settings.settle_s
            return
        destination.engine.receive(move.reservation_id, request, full)
        computed = request.computed_tokens if self.settings.copies_tail else None
        assert source.engine.detach(request.request_id)
        assert destination.engine.adopt(move.reservation_id, request, computed)
        record = self.records[request.request_id]
        record.moves += 1
        record.instance_id = destination.instance_id
        record.downtime_s += self._downtime_s(move)
        destination.settled_at[request.request_id] = self.now + self.settings.settle_s
        self.moves_done += 1
        self._end_move(move)
        self._kick(destination)

    def check_empty(self) -> None:
        """Raises AssertionError unless nothing of what has ended is left anywhere."""
        for node in self.nodes.values():
            node.engine.check()
            if node.alive:
                assert node.engine.is_empty, node.engine
                assert (node.moves_out, node.moves_in, node.engine.transfers) == ({}, 0, 0), node.instance_id
                assert node.engine.pool.free == node.engine.settings.blocks_total, node.engine

    def _end_move(self, move: Move) -> None:
        """Both sides let go of it, however it ended."""
        move.over = True
        source, destination = move.source, move.destination
        self._count_copy(move, copying=False)
        del source.moves_out[move.request.request_id]
        destination.moves_in -= 1
        destination.engine.release(move.reservation_id)
        source.engine.unfreeze(move.request.request_id)
        self._kick(source)
        self._kick(destination)

    def _count_copy(self, move: Move, *, copying: bool) -> None:
        change = int(copying) - int(move.copying)
        move.copying = copying
        move.source.engine.transfers += change
        move.destination.engine.transfers += change


def _freest(view: ClusterView, sent: Mapping[str, Sent]) -> str | None:
    return choose_instance(view, MODEL, sent)
