"""The llumlet's half in the engine core: freeze, export, reserve, adopt. Runs on the engine's thread, between steps.

Source side: ``export`` says which blocks of a request are finished, ``freeze`` takes it out of the batch (what is in
flight is still delivered), then ``detach`` ends it here or ``unfreeze`` lets it go on. Destination side: ``reserve``
and ``extend`` set blocks aside, ``received`` enters copied blocks into the prefix cache, ``commit`` queues the parked
request with its output tokens, and the stock scheduler finds the copied blocks as a prefix hit. A reservation is
released when the request has been scheduled, cancelled, or when its lease is over.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.policy.waiting import GROWTH_TOKENS
from gateway.wire import class_of
from vllm_plugin import compat
from vllm_plugin.admission import Admission
from vllm_plugin.settings import FREEZE_LIMIT_S, NEXT_BLOCK_LIMIT_S, PIN_LIMIT_S, RESERVATION_LEASE_S

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger("vllm.kvferry.engine")

ARRIVALS_KEPT = 64
MOVABLE_STATES = ("running", "waiting")


@dataclass
class Frozen:
    """A request that is out of the batch until ``detach``, ``unfreeze`` or the deadline."""

    request: compat.Request
    deadline: float
    drained: Future[dict[str, Any]] | None
    """Waits for the steps in flight; ``None`` once it was answered."""
    blocks_from: int
    tokens_from: int


@dataclass
class Awaited:
    """A source that waits for a running request's next finished block."""

    answer: Future[dict[str, Any]]
    deadline: float
    blocks_from: int
    tokens_from: int


@dataclass
class Reservation:
    """Blocks set aside for a sequence that is arriving, and the hashes under which they become findable."""

    shadow: compat.Request | None
    """``None`` where only tokens are expected."""
    blocks: list[KVCacheBlock]
    received: int
    """Leading blocks whose content is here."""
    spare: list[KVCacheBlock]
    """For the tail that did not fill a block; free again when the request is queued."""
    deadline: float
    tokens: list[int] = field(default_factory=list)
    """Output tokens so far. A parked request is given them as they come, so that little is left for the commit."""
    parked: compat.Request | None = None
    rejection: str | None = None
    """Why the parked request cannot go on after these tokens."""
    committed: bool = False
    writing: bool = False
    """A worker writes into the blocks, from ``extend`` until ``received`` or ``written``: they must not be freed."""
    doomed: bool = False
    """To be released as soon as nothing writes any more."""


@dataclass
class Pins:
    """Blocks of a source that a peer reads: their content stays even if the request ends or is preempted meanwhile."""

    blocks: list[KVCacheBlock]
    deadline: float


@dataclass(frozen=True)
class Arrival:
    """What a resumed request cost here, for status and tests."""

    request_id: str
    resume_id: str
    output_tokens: int
    computed_tokens: int
    """Tokens that the first step here had to compute: at most one block's worth if the copy was used."""


@dataclass
class EngineAgent:
    """One operation a method; ``handle`` finds it by name. All answers are plain JSON values (or futures of them)."""

    port: compat.EnginePort
    managed: dict[str, compat.Request] = field(default_factory=dict)
    frozen: dict[str, Frozen] = field(default_factory=dict)
    awaited: dict[str, Awaited] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    pins: dict[str, Pins] = field(default_factory=dict)
    admitted: dict[str, str] = field(default_factory=dict)
    """Engine request id -> resume id, from ``commit`` until first scheduled."""
    arrivals: deque[Arrival] = field(default_factory=lambda: deque(maxlen=ARRIVALS_KEPT))
    staying: Counter[str] = field(default_factory=Counter)
    """Requests that came here and cannot move, by a reason that only the engine knows."""
    arrived_at: dict[str, float] = field(default_factory=dict)
    step_ms: float = 0.0
    growth_tokens: int = GROWTH_TOKENS
    admission: Admission = field(init=False)
    _last_step: float | None = None

    def __post_init__(self) -> None:
        self.admission = Admission(self.port, self.growth_tokens)

    def handle(self, operation: str, payload: dict[str, Any]) -> Any:
        self.expire()
        match operation:
            case "verdict":
                return self.admission.verdict(**payload)
            case "describe":
                return self.describe()
            case "report":
                return self.report()
            case "requests":
                return [self.status(request_id) for request_id in self.managed]
            case "export":
                return self.export(**payload)
            case "next_block":
                return self.next_block(**payload)
            case "freeze":
                return self.freeze(**payload)
            case "unfreeze":
                return self.unfreeze(**payload)
            case "detach":
                return self.detach(**payload)
            case "reserve":
                return self.reserve(**payload)
            case "extend":
                return self.extend(**payload)
            case "received":
                return self.mark_received(**payload)
            case "written":
                return self.mark_written(**payload)
            case "unpin":
                return self.unpin(**payload)
            case "commit":
                return self.commit(**payload)
            case "cancel":
                return self.cancel(**payload)
            case "arrivals":
                return [vars(arrival) for arrival in self.arrivals]
            case _:
                raise ValueError(f"unknown operation {operation!r}")

    # What the scheduler tells.

    def receive(self, request: compat.Request) -> bool:
        """A new request: note it if a gateway manages it. True: it is not to be queued, for it is to be resumed, and
        kept until then, or it was to start at once and cannot."""
        extra = request.sampling_params.extra_args if request.sampling_params is not None else None
        if not extra or (request_id := extra.get(compat.REQUEST_KEY)) is None:
            return False
        if compat.ADMIT_KEY in extra and not self.admission.judge(request, self._places_reserved()):
            return True
        self.managed[request_id] = request
        if (reason := compat.why_engine_cannot_move(request)) is not None:
            self.staying[reason] += 1
        resume_id = extra.get(compat.RESUME_KEY)
        if resume_id is None:
            return False
        self.port.park(request)
        reservation = self.reservations.get(resume_id)
        if reservation is None:  # The lease is over, or a resume that has only tokens: nothing to adopt, still parked.
            reservation = self.reservations[resume_id] = self._reservation(None, [], [])
        reservation.parked = request
        self._feed(reservation)
        return True

    def after_schedule(self, output: compat.SchedulerOutput) -> None:
        self.port.give_all_tokens(output)
        if not self.admitted:
            return
        for engine_id in [engine_id for engine_id in self.admitted if engine_id in output.num_scheduled_tokens]:
            resume_id = self.admitted.pop(engine_id)
            reservation = self.reservations.pop(resume_id)
            assert reservation.parked is not None
            self._release(reservation)
            request_id = _managed_id(reservation.parked)
            computed = output.num_scheduled_tokens[engine_id]
            arrival = Arrival(request_id, resume_id, reservation.parked.num_output_tokens, computed)
            self.arrivals.append(arrival)
            self.arrived_at[request_id] = time.monotonic()
            logger.info(
                "resume %s as %s at output token %d, %d tokens to compute",
                request_id, resume_id, arrival.output_tokens, computed,
            )  # fmt: skip

    def after_step(self) -> None:
        now = time.monotonic()
        if self._last_step is not None and now - self._last_step < 1.0:
            step_ms = (now - self._last_step) * 1000
            self.step_ms = step_ms if self.step_ms == 0.0 else 0.9 * self.step_ms + 0.1 * step_ms
        self._last_step = now
        for request_id in list(self.frozen):
            self._answer_if_drained(request_id)
        for request_id in list(self.awaited):
            self._answer_if_finished(request_id)
        for request_id, request in list(self.managed.items()):
            if request.is_finished():
                self._forget(request_id, request)

    def after_finish(self, finished: list[compat.Request]) -> None:
        for request in finished:
            extra = request.sampling_params.extra_args if request.sampling_params is not None else None
            if not extra or compat.REQUEST_KEY not in extra:
                continue
            self._forget(extra[compat.REQUEST_KEY], request)
            self.admitted.pop(request.request_id, None)
            resume_id = extra.get(compat.RESUME_KEY)
            reservation = self.reservations.get(resume_id)
            if reservation is not None and reservation.parked is request:
                self._drop(resume_id, reservation)

    def expire(self) -> None:
        """Leases and deadlines that are over; called at least with every report."""
        now = time.monotonic()
        for request_id, frozen in list(self.frozen.items()):
            if frozen.deadline < now:
                logger.warning("unfreeze %s: the final stage took too long", request_id)
                self.unfreeze(request_id)
        for request_id in [request_id for request_id, awaited in self.awaited.items() if awaited.deadline < now]:
            self._answer_awaited(request_id)
        for request_id in [request_id for request_id, pins in self.pins.items() if pins.deadline < now]:
            self.unpin(request_id)
        for resume_id, reservation in list(self.reservations.items()):
            if reservation.deadline < now and not reservation.committed and not reservation.writing:
                logger.warning("reservation %s expired", resume_id)
                self.cancel(resume_id)

    # Operations: describe and report.

    def describe(self) -> dict[str, Any]:
        return {
            "block_size": self.port.block_size,
            "blocks_total": self.port.blocks_total,
            "requests_running_max": self.port.requests_running_max,
            "copy_obstacle": self.port.copy_obstacle(),
        }

    def report(self) -> dict[str, Any]:
        """Counts for one report; blocks of frozen requests count as running, reservations on their own."""
        running = [*self.port.running(), *(frozen.request for frozen in self.frozen.values())]
        waiting = self.port.waiting()
        room = self.admission.room(self._places_reserved())
        return {
            "room_blocks": room.blocks,
            "room_places": room.places,
            "blocks_total": self.port.blocks_total,
            "blocks_free": self.port.blocks_free,
            "blocks_reserved": sum(
                len(entry.blocks) + len(entry.spare) for entry in self.reservations.values()
            ),
            "running": [len(self.port.held_blocks(request)) for request in running],
            "waiting": [self._demand(request) for request in waiting],
            "running_by_class": _by_class(running),
            "waiting_by_class": _by_class(waiting),
            "step_ms": round(self.step_ms, 3),
            "staying": dict(self.staying),
        }  # fmt: skip

    def _state(self, request_id: str, request: compat.Request) -> str:
        if request_id in self.frozen:
            return "migrating"
        if request.status == compat.RequestStatus.RUNNING:
            return "running"
        reservation = self.reservations.get(request.sampling_params.extra_args.get(compat.RESUME_KEY, ""))
        if reservation is not None and reservation.parked is request:
            return "arriving" if reservation.committed else "parked"
        return "waiting" if self.port.is_queued(request) else "blocked"

    def status(self, request_id: str) -> dict[str, Any]:
        request = self.managed[request_id]
        state = self._state(request_id, request)
        reason = compat.why_engine_cannot_move(request) or (None if state in MOVABLE_STATES else f"it is {state}")
        return {
            "request_id": request_id,
            "state": state,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            "blocks": len(self.port.held_blocks(request)),
            "priority": request.priority,
            "settled_s": time.monotonic() - self.arrived_at[request_id] if request_id in self.arrived_at else None,
            "reason": reason,
        }  # fmt: skip

    # Operations: source side.

    def export(self, request_id: str, blocks_from: int = 0, tokens_from: int = 0) -> dict[str, Any]:
        """What a stage may send: finished blocks from number ``blocks_from`` on, output tokens from ``tokens_from``.

        The blocks are pinned until the next export of the request, or ``unpin``.
        """
        request = self.managed.get(request_id)
        if request is None or not self.port.is_live(request):
            return {"state": "gone", "reason": "the request has finished"}
        status = self.status(request_id)
        full_blocks = self.port.computed_tokens(request) // self.port.block_size
        blocks = self.port.held_blocks(request)[blocks_from:full_blocks]
        self._pin(request_id, blocks)
        return {
            "state": status["state"],
            "reason": status["reason"],
            "block_ids": [block.block_id for block in blocks],
            "output_token_ids": list(request.output_token_ids[tokens_from:]),
            "preemptions": request.num_preemptions,
            "prompt_tokens": request.num_prompt_tokens,
            "prompt_token_ids": list(request.prompt_token_ids or ()) if tokens_from == blocks_from == 0 else [],
            "cache_salt": request.cache_salt,
            "cached_tokens": compat.prefix_hit_tokens(request),
            "steps_to_next_block": self.port.block_size - request.num_tokens % self.port.block_size,
            "tokens_left": request.max_tokens - request.num_output_tokens,
        }

    def next_block(self, request_id: str, blocks_from: int, tokens_from: int) -> Any:
        """Answers like ``export``, as a future, at the step boundary at which another block is finished.

        Right after it the destination has least to compute of its own, and the client least to wait for. Answered
        without one after NEXT_BLOCK_LIMIT_S, and when the request stops running.
        """
        self._answer_awaited(request_id)
        if request_id not in self.managed:
            return {"state": "gone", "reason": "the request has finished"}
        answer: Future[dict[str, Any]] = Future()
        self.awaited[request_id] = Awaited(answer, time.monotonic() + NEXT_BLOCK_LIMIT_S, blocks_from, tokens_from)
        self._answer_if_finished(request_id)
        return answer

    def freeze(
        self,
        request_id: str,
        preemptions: int,
        blocks_from: int,
        tokens_from: int,
        limit_s: float = FREEZE_LIMIT_S,
    ) -> Any:
        """Stop a request, running or queued; answers like ``export``, as a future, once no step in flight holds it.

        It goes on by itself after ``limit_s``.
        """
        request = self.managed.get(request_id)
        if request is None or not self.port.is_live(request):
            return {"state": "gone", "reason": "the request has finished"}
        if self._state(request_id, request) not in MOVABLE_STATES:
            return {"state": "busy", "reason": "the request is neither running nor queued"}
        if request.num_preemptions != preemptions:
            return {"state": "busy", "reason": "the request was preempted"}
        self.port.stop_scheduling(request)
        drained: Future[dict[str, Any]] = Future()
        deadline = time.monotonic() + limit_s
        self.frozen[request_id] = Frozen(request, deadline, drained, blocks_from, tokens_from)
        self._answer_if_drained(request_id)
        return drained

    def unfreeze(self, request_id: str) -> dict[str, Any]:
        frozen = self.frozen.pop(request_id, None)
        if frozen is None:
            return {"unfrozen": False}
        if frozen.drained is not None:
            frozen.drained.set_result({"state": "busy", "reason": "the final stage took too long"})
        if self.port.is_live(frozen.request):
            self.port.resume_scheduling(frozen.request)
        return {"unfrozen": True}

    def detach(self, request_id: str) -> dict[str, Any]:
        """End a frozen request here: the destination has it. False if it went on by itself meanwhile."""
        frozen = self.frozen.pop(request_id, None)
        if frozen is None or not self.port.is_live(frozen.request):
            return {"detached": False}
        self.port.finish(frozen.request)
        return {"detached": True}

    def unpin(self, request_id: str) -> dict[str, Any]:
        pins = self.pins.pop(request_id, None)
        if pins is not None:
            self.port.free_blocks(pins.blocks)
        return {}

    # Operations: destination side.

    def reserve(
        self,
        resume_id: str,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        cache_salt: str | None,
        blocks: int,
        copy: bool,
    ) -> dict[str, Any]:
        """Set ``blocks`` blocks aside, and one for the tail; the leading ones from the prefix cache if it has them.

        Refused unless all of the sequence would fit now: what is not copied is computed again.
        """
        if resume_id in self.reservations:
            return {"accepted": False, "reason": "the migration id is in use"}
        if self.port.batch_is_full(len(self.reservations)):
            return {"accepted": False, "reason": "the destination's batch is full"}
        token_ids = prompt_token_ids + output_token_ids
        shadow = self.port.shadow(token_ids, cache_salt)
        cached = self.port.take_cached_blocks(shadow) if copy else []
        held = cached[:blocks]
        self.port.free_blocks(cached[blocks:])
        missing = (blocks - len(held)) if copy else 0
        if max(missing, len(token_ids) // self.port.block_size - len(held)) + 1 > self.port.blocks_free:
            self.port.free_blocks(held)
            return {"accepted": False, "reason": "the destination has too few free blocks"}
        new = self.port.new_blocks(missing)
        reservation = self._reservation(shadow, [*held, *new], self.port.new_blocks(1))
        reservation.received = len(held)
        reservation.tokens = output_token_ids
        self.reservations[resume_id] = reservation
        return {"accepted": True, "reused": len(held), "block_ids": [block.block_id for block in new]}

    def extend(self, resume_id: str, blocks: int, output_token_ids: list[int]) -> dict[str, Any]:
        """More blocks for a sequence that has grown to ``blocks`` finished ones; renews the lease."""
        reservation = self.reservations.get(resume_id)
        if reservation is None or reservation.doomed or reservation.shadow is None:
            return {"accepted": False, "reason": "the reservation has expired"}
        reservation.deadline = time.monotonic() + RESERVATION_LEASE_S
        reservation.shadow.append_output_token_ids(output_token_ids)
        reservation.tokens.extend(output_token_ids)
        if (refusal := self._feed(reservation)) is not None:
            return {"accepted": False, "reason": refusal}
        missing = blocks - len(reservation.blocks)
        if missing > self.port.blocks_free:
            return {"accepted": False, "reason": "the destination has too few free blocks"}
        new = self.port.new_blocks(missing) if missing > 0 else []
        reservation.blocks.extend(new)
        pending = reservation.blocks[reservation.received : blocks]
        reservation.writing = bool(pending)
        return {"accepted": True, "block_ids": [block.block_id for block in pending]}

    def mark_received(self, resume_id: str, blocks: int) -> dict[str, Any]:
        """The first ``blocks`` blocks are here: make the new ones findable."""
        reservation = self.reservations.get(resume_id)
        if reservation is None or reservation.doomed or reservation.shadow is None:
            self.mark_written(resume_id)
            return {"accepted": False, "reason": "the reservation has expired"}
        self.port.cache_blocks(reservation.shadow, reservation.blocks, reservation.received, blocks)
        reservation.received = max(reservation.received, blocks)
        reservation.deadline = time.monotonic() + RESERVATION_LEASE_S
        reservation.writing = False
        return {"accepted": True}

    def mark_written(self, resume_id: str) -> dict[str, Any]:
        """Nothing writes into the blocks any more, and what was written is of no use."""
        reservation = self.reservations.get(resume_id)
        if reservation is not None:
            reservation.writing = False
            reservation.deadline = time.monotonic() + RESERVATION_LEASE_S
            if reservation.doomed:
                self._drop(resume_id, reservation)
        return {}

    def commit(self, resume_id: str, tokens_from: int, output_token_ids: list[int]) -> dict[str, Any]:
        """Queue the parked request, first in line, to go on after the output tokens that it has with these.

        Those before number ``tokens_from`` came with the stages; ``lacks_tokens`` in the answer asks for all of them.
        ``compiling``: its grammar is not ready, ask again. ``finish``: the tokens are all that it may have, there is
        nothing to run.
        """
        reservation = self.reservations.get(resume_id)
        if reservation is None or reservation.parked is None or reservation.committed or reservation.doomed:
            return {"accepted": False, "reason": "the request is not waiting here"}
        if len(reservation.tokens) < tokens_from:
            return {"accepted": False, "lacks_tokens": True, "reason": "the output tokens are not complete"}
        reservation.tokens[tokens_from:] = output_token_ids
        if self.port.grammar_is_compiling(reservation.parked):
            return {"accepted": False, "compiling": True, "reason": "the grammar is not ready"}
        if (refusal := self._feed(reservation)) is not None:
            return {"accepted": False, "reason": refusal}
        ending = self.port.ending(reservation.parked)
        if ending is not None:
            self.cancel(resume_id)
            return {"accepted": True, "finish": ending}
        reservation.committed = True
        self.port.free_blocks(reservation.spare)
        reservation.spare = []
        self.admitted[reservation.parked.request_id] = resume_id
        self.port.admit(reservation.parked, begun=bool(reservation.tokens or reservation.received))
        return {"accepted": True, "finish": None}

    def cancel(self, resume_id: str) -> dict[str, Any]:
        """Give a reservation up, with the request that was parked for it."""
        reservation = self.reservations.get(resume_id)
        if reservation is None:
            return {"cancelled": False}
        parked, reservation.parked = reservation.parked, None
        self._drop(resume_id, reservation)
        if parked is not None and self.port.is_live(parked):
            self.port.finish(parked)
        return {"cancelled": True}

    # Helpers.

    def _places_reserved(self) -> int:
        """For requests that are on their way here, until they are queued; a frozen one may come back to its own."""
        return len(self.frozen) + sum(not reservation.committed for reservation in self.reservations.values())

    def _reservation(
        self, shadow: compat.Request | None, blocks: list[KVCacheBlock], spare: list[KVCacheBlock]
    ) -> Reservation:
        return Reservation(shadow, blocks, 0, spare, time.monotonic() + RESERVATION_LEASE_S)

    def _feed(self, reservation: Reservation) -> str | None:
        """Give the parked request the output tokens that it does not have yet; why they do not fit, if so."""
        parked = reservation.parked
        if parked is not None and reservation.rejection is None and not self.port.grammar_is_compiling(parked):
            try:
                self.port.take_output(parked, reservation.tokens[parked.num_output_tokens :])
            except compat.GrammarRejected as error:
                reservation.rejection = str(error)
        return reservation.rejection

    def _pin(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        self.port.pin_blocks(blocks)
        self.unpin(request_id)
        if blocks:
            self.pins[request_id] = Pins(blocks, time.monotonic() + PIN_LIMIT_S)

    def _drop(self, resume_id: str, reservation: Reservation) -> None:
        """Release a reservation, now or when nothing writes into its blocks any more."""
        if reservation.writing:
            reservation.doomed = True
            reservation.parked = None
            return
        del self.reservations[resume_id]
        self._release(reservation)

    def _release(self, reservation: Reservation) -> None:
        self.port.free_blocks([*reservation.blocks, *reservation.spare])
        reservation.blocks, reservation.spare = [], []

    def _forget(self, request_id: str, request: compat.Request) -> None:
        if self.managed.get(request_id) is request:
            del self.managed[request_id]
            self.arrived_at.pop(request_id, None)
        self._answer_awaited(request_id)
        frozen = self.frozen.get(request_id)
        if frozen is not None and frozen.request is request:
            del self.frozen[request_id]
            if frozen.drained is not None:
                frozen.drained.set_result({"state": "gone", "reason": "the request has finished"})

    def _answer_if_finished(self, request_id: str) -> None:
        request, awaited = self.managed[request_id], self.awaited[request_id]
        full_blocks = self.port.computed_tokens(request) // self.port.block_size
        if full_blocks > awaited.blocks_from or self._state(request_id, request) != "running":
            self._answer_awaited(request_id)

    def _answer_awaited(self, request_id: str) -> None:
        awaited = self.awaited.pop(request_id, None)
        if awaited is not None:
            awaited.answer.set_result(self.export(request_id, awaited.blocks_from, awaited.tokens_from))

    def _answer_if_drained(self, request_id: str) -> None:
        frozen = self.frozen[request_id]
        if frozen.drained is None:
            return
        if not self.port.is_live(frozen.request):
            self._forget(request_id, frozen.request)
        elif frozen.request.num_in_flight_tokens == 0:
            drained, frozen.drained = frozen.drained, None
            drained.set_result(self.export(request_id, frozen.blocks_from, frozen.tokens_from))

    def _demand(self, request: compat.Request) -> int:
        return int(-(-(request.num_tokens + 1) // self.port.block_size))


def _by_class(requests: Iterable[compat.Request]) -> dict[str, int]:
    return dict(Counter(str(class_of(request.priority)) for request in requests))


def _managed_id(request: compat.Request) -> str:
    return str(request.sampling_params.extra_args[compat.REQUEST_KEY])
