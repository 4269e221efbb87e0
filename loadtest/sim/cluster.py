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
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.policy.autoscale import Add, Drain, ScaleMemory, ScaleSettings, TakeBack, scale
from gateway.policy.decide import Memory, Pair, Policy, Unpair, decide
from gateway.policy.picking import Movable, pick
from gateway.policy.policies import POLICIES, NamedPolicy
from gateway.policy.view import InstanceView
from gateway.policy.waiting import Room
from gateway.wire import Busy
from loadtest.sim.admission import judge
from loadtest.sim.engine import Engine, EngineSettings, Outcome, Request, State
from loadtest.sim.front import Front
from loadtest.sim.node import Move, Node, Record
from loadtest.sim.profile import Profile
from loadtest.sim.reports import Identity, view_later

MODEL = "simulated"
STAGES_MAX = 64
UNDONE_WITHIN_S = 10.0
SCALE_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    instances: int
    engine: EngineSettings
    profile: Profile
    policy: NamedPolicy = POLICIES["kvferry"]
    headroom_blocks: Mapping[int, int] = field(default_factory=dict)
    """By class; a policy that knows no classes has none."""
    report_interval_s: float = 0.1
    report_delay_s: float = 0.005
    """From an instance to the gateway."""
    tick_s: float = 0.2
    """The leader's."""
    control_delay_s: float = 0.002
    """From the gateway, or a peer, to an instance."""
    migrations_in_max: int = 4
    scale: ScaleSettings | None = None
    cold_start_s: float = 60.0
    """From the order of an instance to its first report; it costs from the order on."""
    rest_s: float = 1.0
    """A pairing whose destination has refused is left alone so long."""
    copies_tail: bool = False
    """The last tokens, which fill no block, are copied as well (Llumnix); else the destination computes them."""
    looks_ahead: bool = True
    """Many times faster, with the same result; not with a prefix cache."""
    keeps_token_times: bool = False
    """In the records, for an engine that does not look ahead."""


class Cluster:
    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.records: dict[str, Record] = {}
        self.moves_begun = self.moves_done = self.preemptions = self.busy_answers = 0
        self.report_delays_s: Callable[[float], Sequence[float]] = lambda made_at: (settings.report_delay_s,)
        """Of a report made then, on its way to the gateway: none if it is lost, several if it comes more than once."""
        self.copy_factor = 1.0
        """So many times as long as by the profile."""
        self._headroom_blocks = settings.headroom_blocks if settings.policy.knows_classes else {}
        self.front = Front(settings.policy, MODEL, self.nodes, self, self._send, frozenset(self._headroom_blocks))
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = 0
        self._unfinished = 0
        self._memory = Memory()
        self._way_s = settings.control_delay_s + settings.profile.request_ms / 1000
        for number in range(settings.instances):
            self.add_instance(offset_s=settings.report_interval_s * number / settings.instances)
        if settings.policy.leader.policy is not Policy.NONE:
            self.at(0.0, self._tick)
        self._scale_memory = ScaleMemory()
        if settings.scale is not None:
            self.at(SCALE_TICK_S, self._scale)

    def __repr__(self) -> str:
        return f"<Cluster at {self.now:.3f} s, {len(self.nodes)} instances, {self._unfinished} requests to finish>"

    # Time.

    def at(self, time: float, event: Callable[[], object]) -> None:
        """Events at the same time come in the order in which they were put in, so that runs repeat."""
        self._sequence += 1
        heapq.heappush(self._events, (max(time, self.now), self._sequence, event))

    def after(self, delay_s: float, event: Callable[[], object]) -> None:
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
        engine = Engine(self.settings.engine, self.settings.profile, looks_ahead=self.settings.looks_ahead)
        node = self.nodes[instance_id] = Node(
            Identity(instance_id, "boot", (MODEL,), "simulated"),
            engine,
            lambda: self.now,
            self._wake,
            self._view_later,
            self.settings.control_delay_s,
        )
        self.after(offset_s, lambda: self._report(node))
        return node

    def crash(self, instance_id: str) -> list[Request]:
        """It is gone, with all that ran there, which is returned: resume it with ``restart``, or count it as lost."""
        node = self.nodes[instance_id]
        engine = node.engine
        node.alive, node.ended_at = False, self.now
        node.forget_view()
        self.front.changed(node)
        for move in [move for other in self.nodes.values() for move in other.moves_out.values()]:
            if node in (move.source, move.destination):
                self._end_move(move)
        lost = engine.requests()
        for request in lost:
            engine.abort(request.request_id)
        return lost

    def restart(self, request: Request) -> None:
        """Dispatch it anew with the tokens that it has: a resume that computes everything again."""
        request.is_admitted = False
        self.front.arrived(request)

    def lose(self, request: Request) -> None:
        self.records[request.request_id].lost = True
        self._unfinished -= 1

    def drain(self, instance_id: str) -> None:
        self.nodes[instance_id].draining = True

    def remove(self, instance_id: str) -> None:
        """It is empty, and stops."""
        node = self.nodes[instance_id]
        assert node.engine.is_empty, node
        node.alive, node.ended_at = False, self.now
        node.forget_view()
        self.front.changed(node)

    # The gateway.

    def _arrive(self, request: Request, arrivals: Iterable[Request]) -> None:
        record = self.records[request.request_id] = Record(request, priority=request.execution_priority)
        if not self.settings.policy.knows_classes:
            request.priority = request.execution_priority = 0
        self.front.arrived(request)
        assert record.finished_at is None
        self._arrive_next(arrivals)

    def _send(self, node: Node, request: Request) -> None:
        record = self.records[request.request_id]
        record.dispatched_at = self.now
        record.instance_id = node.instance_id
        self.after(self._way_s, lambda: self._receive(node, request))

    def _receive(self, node: Node, request: Request) -> None:
        if not node.alive:
            self.restart(request)
            return
        engine = node.engine
        if self.front.binds_late:
            busy = judge(engine, request, self.settings.policy.growth_tokens) if not node.draining else Busy(0, 0, 0)
            if busy is not None:
                self.busy_answers += 1
                said = Room(busy.room_blocks, busy.room_places)
                self.after(self.settings.control_delay_s, lambda: self.front.returned(node, request, said))
                return
            request.is_admitted = True
        engine.add(request)
        self._kick(node)

    def _tick(self) -> None:
        actions, self._memory = decide(self.front.view(), self._memory, self.now, self.settings.policy.leader)
        for action in actions:
            destination = action.destination_id if isinstance(action, Pair) else None
            assert isinstance(action, (Pair, Unpair))
            self.after(self.settings.control_delay_s, self._pairing(self.nodes[action.source_id], destination))
        self.after(self.settings.tick_s, self._tick)

    def _scale(self) -> None:
        """Adds, drains, and stops what is drained and empty."""
        settings = self.settings.scale
        assert settings is not None
        for node in self.nodes.values():
            is_empty = not node.on_its_way().requests and not node.moves_in and node.engine_ahead.is_empty
            if node.alive and node.draining and is_empty:
                self.remove(node.instance_id)
        alive = [node for node in self.nodes.values() if node.alive]
        starting = sum(node.view is None for node in alive)
        step, self._scale_memory = scale(self.front.view(), starting, self._scale_memory, self.now, settings)
        match step:
            case Add() if len(alive) < settings.instances_max:
                self.add_instance(offset_s=self.settings.cold_start_s)
            case Drain():
                self.nodes[step.instance_id].draining = True
            case TakeBack() if self.nodes[step.instance_id].alive:
                self.nodes[step.instance_id].draining = False
            case _:
                pass
        self.after(SCALE_TICK_S, self._scale)

    def _pairing(self, node: Node, destination: str | None) -> Callable[[], None]:
        def event() -> None:
            node.pairing = destination

        return event

    # Reports, and what a llumlet does with each.

    def _report(self, node: Node) -> None:
        if not node.alive:
            return
        for delay_s in self.report_delays_s(self.now):
            node.report(self.now + delay_s)
            if self.front:
                self.after(delay_s, lambda: self.front.changed(node))
            else:
                self.front.changed(node)  # Nobody waits for it: it is looked at when somebody comes.
        self.after(self.settings.report_interval_s, lambda: self._report(node))
        if node.pairing is not None:
            self._follow_pairing(node)

    def _view_later(self, node: Node, made_at: float, draining: bool) -> Callable[[], InstanceView]:
        return view_later(
            node.engine_ahead,
            node.identity,
            draining=draining,
            headroom_blocks=self._headroom_blocks,
            now=made_at,
            says_room=self.front.binds_late,
            growth_tokens=self.settings.policy.growth_tokens,
        )

    def _follow_pairing(self, node: Node) -> None:
        if node.pairing is None or self.now < node.rests_until:
            return
        destination = self.nodes[node.pairing]
        while len(node.moves_out) < self.settings.policy.moves_at_once:
            request = self._pick(node)
            if request is None or not self._begin_move(node, destination, request):
                return

    def _pick(self, node: Node) -> Request | None:
        engine = node.engine
        candidates = []
        for request in engine.requests():
            if request.request_id not in node.moves_out and request.state is not State.FROZEN:
                record = self.records[request.request_id]
                settled_s = self.now - record.moved_at if record.moved_at is not None else math.inf
                is_running = request.state is State.RUNNING
                candidates.append(
                    Movable(
                        request.request_id,
                        request.execution_priority,
                        request.total_tokens,
                        is_running,
                        record.moves,
                        settled_s,
                        request.execution_priority in self._headroom_blocks,
                    )
                )
        chosen = pick(candidates, self.settings.policy.picking, draining=node.draining)
        return engine.get(chosen) if chosen is not None else None

    # Steps.

    def _kick(self, node: Node) -> None:
        """Something has changed: an idle engine may have something to do."""
        if node.alive and node.engine_ahead.is_idle:
            self._after_step(node, node.step())

    def _wake(self, node: Node, ends_at: float) -> None:
        node.steps_at = ends_at
        self.at(ends_at, lambda: self._step_ends(node, ends_at))

    def _step_ends(self, node: Node, ends_at: float) -> None:
        if node.alive and node.steps_at == ends_at:
            node.steps_at = None
            self._after_step(node, node.step())

    def _after_step(self, node: Node, outcome: Outcome) -> None:
        if outcome.ends_at is not None:
            self._wake(node, outcome.ends_at)
        for request in outcome.sampled:
            if request.output_tokens == 1 or request.preemptions:
                self._note_token(self.records[request.request_id])
            if self.settings.keeps_token_times:
                self.records[request.request_id].token_times.append(self.now)
        for request in outcome.preempted:
            self.preemptions += 1
            self.records[request.request_id].preempted_at = self.now
        for request in outcome.finished:
            self.records[request.request_id].finished_at = self.now
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
            source.rests_until = self.now + self.settings.rest_s
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
            move.source.rests_until = self.now + self.settings.rest_s
            return
        self._count_copy(move, copying=True)
        copy_s = self.settings.profile.copy_s(max(fresh, 0) * self.settings.engine.block_size)
        copy_s *= self.copy_factor
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
            source.rests_until = self.now + self.settings.rest_s
            return
        destination.engine.receive(move.reservation_id, request, full)
        computed = request.computed_tokens if self.settings.copies_tail else None
        assert source.engine.detach(request.request_id)
        assert destination.engine.adopt(move.reservation_id, request, computed)
        record = self.records[request.request_id]
        if record.moved_from == destination.instance_id and self.now - (record.moved_at or 0.0) <= UNDONE_WITHIN_S:
            record.undone += 1
        record.moves, record.moved_at, record.moved_from = record.moves + 1, self.now, source.instance_id
        record.instance_id = destination.instance_id
        record.downtime_s += self._downtime_s(move)
        self.moves_done += 1
        self._end_move(move)
        self._kick(destination)

    def instance_s(self) -> float:
        """Seconds of instances, from their start, cold or not, to their end."""
        return sum((self.now if one.ended_at is None else one.ended_at) - one.began_at for one in self.nodes.values())

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
