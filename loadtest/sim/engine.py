"""A vLLM engine without a model and without a clock: blocks, batches, a queue, and how long each step takes.

    outcome = engine.step(now)      # what the step that ends now has brought; plans and begins the next one
    outcome.ends_at                 # call again then; None: idle, call again when anything has changed

Anything: a request that is added, adopted or unfrozen, but also room that a detached or released one leaves.

The caller owns the time, so one model runs in virtual time (a simulation) and in real time (``loadtest/fake_vllm``).
Everything else may be called at any time, also in the middle of a step: what is in flight is delivered when it ends.

Both of vLLM's schedulers are here. ``CHUNKED`` is today's (V1): running requests first, then queued ones, within a
budget of tokens a step. ``WHOLE_PROMPT`` is the one of the paper's time: a step computes either whole prompts, as many
as fit, or one token of each running request. In both, the queue is ordered by priority and then by arrival, a request
enters when all of its tokens fit, and when a running one finds no block, the last by that order is preempted: it loses
its blocks and computes everything again.

A migration is made of: at the source ``export`` (what is finished), ``freeze``, and, once it ``is_settled``, ``detach``
or ``unfreeze``; at the destination ``reserve``, ``extend``, ``receive``, and then ``adopt`` or ``release``. A frozen
request and a reservation keep a place in the batch, so that neither can fail for want of one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from loadtest.sim import tokens
from loadtest.sim.blocks import BlockPool
from loadtest.sim.profile import Profile


class Prefill(StrEnum):
    """How prompts are computed."""

    CHUNKED = "chunked"
    WHOLE_PROMPT = "whole_prompt"


class State(StrEnum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FROZEN = "frozen"
    """Out of the batch with its blocks, between ``freeze`` and ``detach`` or ``unfreeze``."""
    ENDED = "ended"
    """Finished, aborted or detached: the engine does not know it any more."""


class EngineError(ValueError):
    """The engine cannot take this, for a reason that its caller could have known."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    block_size: int = 16
    blocks_total: int = 851
    batch_max: int = 256
    """vLLM's max_num_seqs."""
    step_tokens_max: int = 2048
    """vLLM's max_num_batched_tokens."""
    sequence_tokens_max: int = 8192
    """vLLM's max_model_len: prompt and output."""
    prefill: Prefill = Prefill.CHUNKED
    prefix_caching: bool = True
    watermark: float = 0.0
    """Part of the blocks that stay free when a request enters from the queue."""

    def __post_init__(self) -> None:
        for name in ("block_size", "blocks_total", "batch_max", "step_tokens_max", "sequence_tokens_max"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1")
        if not 0 <= self.watermark < 1:
            raise EngineError("watermark must be at least 0 and less than 1")
        if self.blocks_for(self.sequence_tokens_max) + self.watermark_blocks > self.blocks_total:
            raise EngineError("the longest sequence (sequence_tokens_max) does not fit into blocks_total")
        if self.prefill is Prefill.WHOLE_PROMPT and self.step_tokens_max < self.sequence_tokens_max:
            raise EngineError("without chunks a step must hold the longest sequence: raise step_tokens_max")

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.blocks_total)

    def blocks_for(self, count: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-count // self.block_size)


Key = tuple[int, float, str]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Its length is known beforehand, to the engine; ``prompt`` may be a lazy sequence."""

    request_id: str
    prompt: Sequence[int]
    output_tokens_max: int
    arrived_at: float = 0.0
    priority: int = 0
    """vLLM's: lower comes sooner."""
    execution_priority: int = 0
    """The policy's: higher is better protected (``RequestUsage``)."""
    seed: int = 0
    output_tokens: int = 0
    """Made so far, here or elsewhere."""
    is_admitted: bool = False
    """Let in because it could start now (``admission``): while it is queued, nobody takes that away from it."""
    # The engine's own.
    state: State = State.NEW
    computed_tokens: int = 0
    """Leading tokens whose KV is here; at most all but the one sampled last."""
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache when the request was first scheduled."""
    prompt_tokens: int = field(init=False)
    _capacity_tokens: int = field(default=0, init=False, repr=False)
    _contents: list[int] = field(default_factory=list, init=False, repr=False)
    _output_key: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.prompt)

    @property
    def key(self) -> Key:
        """The queue's order; the last by it is the first to be preempted."""
        return (self.priority, self.arrived_at, self.request_id)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def output_token_ids(self, begin: int, end: int) -> list[int]:
        """Output tokens number ``begin`` to ``end``, made or yet to be made."""
        if self._output_key is None:
            self._output_key = tokens.output_key(tokens.digest(0, self.prompt), self.seed)
        return [tokens.output_token_id(self._output_key, position) for position in range(begin, end)]

    def contents(self, count: int, block_size: int) -> list[int]:
        """Digests of the first ``count`` blocks, which must be full of tokens that are made."""
        while len(self._contents) < count:
            begin = len(self._contents) * block_size
            end = begin + block_size
            block = list(self.prompt[begin:end])
            if end > self.prompt_tokens:
                block += self.output_token_ids(max(0, begin - self.prompt_tokens), end - self.prompt_tokens)
            self._contents.append(tokens.digest(self._contents[-1] if self._contents else 0, block))
        return self._contents[:count]


@dataclass(slots=True)
class Outcome:
    """What a step that has ended brought, and what was decided for the next one."""

    sampled: list[Request] = field(default_factory=list)
    """Each has one more output token; the ended ones are among them."""
    finished: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    """Left the queue for the step that has begun."""
    preempted: list[Request] = field(default_factory=list)
    ends_at: float | None = None


@dataclass(frozen=True, slots=True)
class Promised:
    """``blocks`` of the free ones, to prompts of which only a part is computed and to requests queued before.

    ``places`` in the batch are taken, by those that run, arrive or are queued before.
    """

    blocks: int
    places: int


@dataclass(slots=True)
class Reservation:
    """Blocks, and a place in the batch, for a request that is arriving."""

    blocks: list[int]
    reused: int
    """Leading ones that the prefix cache held."""
    received: int
    """Leading ones whose content is here."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What a migration's stage may send of a request."""

    blocks: list[int]
    """Finished ones, all from the first on."""
    output_tokens: int
    preemptions: int


class Load(NamedTuple):
    """Numbers for one report, kept up to date so that a look costs next to nothing.

    Frozen requests count as running, reservations on their own.
    """

    blocks_free: int
    blocks_reserved: int
    running: int
    running_blocks: Mapping[int, int]
    """By execution priority, of the classes that have any."""
    waiting: int
    head_of_line_blocks: int
    queued_blocks: int
    step_ms: float


@dataclass(slots=True)
class _Step:
    planned: dict[Request, int]
    ends_at: float


AHEAD_STEPS_MAX = 64
"""More would mostly be thrown away, since something happens before."""


@dataclass(slots=True)
class _Ahead:
    """The step under way and those after it in which each running request gets one token and nothing else happens.

    They stand here as numbers; :meth:`Engine.catch_up` makes what has passed of them true.
    """

    ends_at: list[float]
    blocks: dict[int, list[int]]
    """Held more than now, by execution priority, once the step of that number has begun."""
    durations_ms: list[float]


class Engine:
    def __init__(self, settings: EngineSettings, profile: Profile, *, looks_ahead: bool = False) -> None:
        """``looks_ahead``: a stretch of steps that only decode is one step to the caller, which must call ``catch_up``
        before anything but ``step`` and ``load``. Only without prefix cache; the last tokens alone are delivered."""
        self.looks_ahead = looks_ahead and not settings.prefix_caching
        self._ahead: _Ahead | None = None
        self.settings = settings
        self.profile = profile
        self.pool = BlockPool(settings.blocks_total, caching=settings.prefix_caching)
        self.transfers = 0
        """Copies from or to here that are under way, which make steps longer; the caller's to count."""
        self.steps = 0
        self.step_ms = 0.0
        """Moving average."""
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[tuple[Key, Request]] = []
        self._frozen: dict[str, Request] = {}
        self._reservations: dict[str, Reservation] = {}
        self._step: _Step | None = None
        self._held_blocks: dict[int, int] = {}
        """Of all requests, by execution priority."""
        self._queued_blocks = 0
        """Demand of all that wait."""

    def __repr__(self) -> str:
        counts = f"{len(self._running)} running, {len(self._waiting)} waiting, {len(self._frozen)} frozen"
        return f"<Engine {counts}, {len(self._reservations)} reserved, {self.pool.free} blocks free>"

    # Time.

    def step(self, now: float) -> Outcome:
        """End the step that is due, if one is, and begin the next. Early calls change nothing."""
        outcome = Outcome()
        if self._step is not None:
            ends_at = self._step.ends_at if self._ahead is None else self._ahead.ends_at[-1]
            if now < ends_at:
                outcome.ends_at = ends_at
                return outcome
            self.catch_up(ends_at)
            self._end(self._step, outcome)
        self._begin(now, outcome)
        return outcome

    def catch_up(self, now: float) -> float | None:
        """Make the steps true that have ended before ``now``. When the one under way ends, if the caller has been told
        otherwise."""
        ahead, step = self._ahead, self._step
        if ahead is None or step is None:
            return None
        self._ahead = None
        done = min(bisect_left(ahead.ends_at, now), len(ahead.ends_at) - 1)
        if done:
            size = self.settings.block_size
            for request in self._running:
                request.computed_tokens += done
                request.output_tokens += done
                if request.computed_tokens + 1 > request._capacity_tokens:
                    self._hold(request, self.pool.take(-(-(request.computed_tokens + 1) // size) - len(request.blocks)))
            for duration_ms in ahead.durations_ms[1 : done + 1]:
                self.step_ms = 0.9 * self.step_ms + 0.1 * duration_ms
            self.steps += done
            step.ends_at = ahead.ends_at[done]
        return step.ends_at

    @property
    def is_idle(self) -> bool:
        """No step is under way; ``step`` begins one if there is anything to do."""
        return self._step is None

    @property
    def is_empty(self) -> bool:
        return not self._requests and not self._reservations

    # Requests.

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def requests(self) -> list[Request]:
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Queue a request, also one that has made tokens elsewhere. Raises EngineError if it could never run here."""
        self._accept(request)
        request.state = State.WAITING
        self._enqueue(request)

    def abort(self, request_id: str) -> Request | None:
        """End it now, whatever it is doing; ``None`` if it is not here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remove(request)
        return request

    def missing_blocks(self, request: Request) -> int:
        """Free blocks that go when a request that is not running is given all that its tokens need."""
        return self._blocks_missing(request, self._hits(request))

    def promised(self, request: Request | None = None) -> Promised:
        """What is spoken for before ``request``, or before one that would come last: for an admission's verdict.

        Of those that are queued, by all that come before it, and by all that are admitted.
        """
        blocks = self.settings.watermark_blocks if self._running else 0
        for one in self._running if self._ahead is None else ():  # Ahead, all of them only decode.
            if one.total_tokens - one.computed_tokens > 1:
                blocks += max(0, self.settings.blocks_for(one.total_tokens) - len(one.blocks))
        places = len(self._running) + len(self._frozen) + len(self._reservations)
        for key, one in self._waiting:
            if request is not None and key > request.key and not one.is_admitted:
                continue
            blocks += self.missing_blocks(one)
            places += 1
        return Promised(blocks, places)

    def load(self, now: float | None = None) -> Load:
        """``now``: needed by an engine that looks ahead."""
        free, held = self.pool.free, self._held_blocks
        if self._ahead is not None and now is not None:
            ahead = self._ahead
            done = min(bisect_left(ahead.ends_at, now), len(ahead.ends_at) - 1)
            held = dict(held)
            for priority, blocks in ahead.blocks.items():
                free -= blocks[done]
                held[priority] += blocks[done]
        reservations = self._reservations
        return Load(
            blocks_free=free,
            blocks_reserved=sum(len(one.blocks) for one in reservations.values()) if reservations else 0,
            running=len(self._running) + len(self._frozen),
            running_blocks=held,
            waiting=len(self._waiting),
            head_of_line_blocks=self.demand_blocks(self._waiting[0][1]) if self._waiting else 0,
            queued_blocks=self._queued_blocks,
            step_ms=self.step_ms,
        )

    def running(self) -> list[Request]:
        """And frozen."""
        return [*self._running, *self._frozen.values()]

    def waiting(self) -> list[Request]:
        """In the order in which they will be let in."""
        return [request for _, request in self._waiting]

    def demand_blocks(self, request: Request) -> int:
        """What a queued request needs to enter and make its next token."""
        return self.settings.blocks_for(request.total_tokens + 1)

    # Migration, at the source.

    def export(self, request_id: str) -> Exported | None:
        """Of a request that is running, waiting or frozen here; ``None`` if it is not."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        full = request.computed_tokens // self.settings.block_size
        return Exported(request.blocks[:full], request.output_tokens, request.preemptions)

    def freeze(self, request_id: str) -> bool:
        """Keep it out of the steps from the next one on; False unless it is running or waiting."""
        request = self._requests.get(request_id)
        if request is None or request.state not in (State.RUNNING, State.WAITING):
            return False
        if request.state is State.RUNNING:
            self._running.remove(request)
        else:
            self._unqueue(request)
        request.state = State.FROZEN
        self._frozen[request_id] = request
        return True

    def is_settled(self, request_id: str) -> bool:
        """Whether a frozen request is in no step any more: this is the step boundary at which it may be detached."""
        request = self._frozen.get(request_id)
        return request is not None and (self._step is None or request not in self._step.planned)

    def unfreeze(self, request_id: str) -> bool:
        """Go on here, where it was; False if it is not frozen."""
        request = self._frozen.pop(request_id, None)
        if request is None:
            return False
        if request.blocks:
            request.state = State.RUNNING
            self._running.append(request)
        else:
            request.state = State.WAITING
            self._enqueue(request)
        return True

    def detach(self, request_id: str) -> bool:
        """End a frozen, settled request here: another engine has it. False if it is not frozen any more."""
        request = self._frozen.get(request_id)
        if request is None:
            return False
        assert self.is_settled(request_id), "detach comes at a step boundary"
        self._remove(request)
        return True

    # Migration, at the destination.

    def reserve(
        self, reservation_id: str, arriving: Request, blocks: int, *, copied: bool = True
    ) -> Reservation | None:
        """Set ``blocks`` blocks and one for the tail aside, the leading ones from the prefix cache if it has them.

        ``arriving`` is a request of the same tokens, which is not changed. ``None`` unless all of it would fit now. Not
        ``copied``: nothing but a place is kept, since everything will be computed again.
        """
        if reservation_id in self._reservations:
            raise EngineError("the reservation's id is in use")
        caches = copied and self.pool.caching
        hits = self.pool.find(arriving.contents(blocks, self.settings.block_size)) if caches else []
        all_blocks = max(blocks, arriving.total_tokens // self.settings.block_size) + 1
        if not self._has_place() or all_blocks - len(hits) + self.pool.free_among(hits) > self.pool.free:
            return None
        self.pool.touch(hits)
        new = self.pool.take(blocks + 1 - len(hits)) if copied else []
        reservation = Reservation([*hits, *new], len(hits), len(hits))
        self._reservations[reservation_id] = reservation
        return reservation

    def reservation(self, reservation_id: str) -> Reservation | None:
        return self._reservations.get(reservation_id)

    def extend(self, reservation_id: str, blocks: int) -> bool:
        """The request has grown meanwhile: ``blocks`` blocks and one for the tail. False if they do not fit."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return False
        missing = blocks + 1 - len(reservation.blocks)
        if missing > self.pool.free:
            return False
        reservation.blocks += self.pool.take(max(0, missing))
        return True

    def receive(self, reservation_id: str, arriving: Request, blocks: int) -> None:
        """The first ``blocks`` blocks of ``arriving`` are here."""
        reservation = self._reservations[reservation_id]
        assert blocks <= len(reservation.blocks)
        if self.pool.caching:
            contents = arriving.contents(blocks, self.settings.block_size)
            for index in range(reservation.received, blocks):
                self.pool.fill(reservation.blocks[index], contents[index])
        reservation.received = max(reservation.received, blocks)

    def adopt(self, reservation_id: str, request: Request, computed_tokens: int | None = None) -> bool:
        """Go on with a request here, in the next step. False, and the reservation stays, if its blocks do not suffice.

        ``computed_tokens``: what was copied, if not just the received blocks. With no block received it is queued, and
        computes everything again.
        """
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            return False
        if computed_tokens is None:
            computed_tokens = reservation.received * self.settings.block_size
        computed_tokens = min(computed_tokens, request.total_tokens - 1)
        if computed_tokens > 0 and not self.extend(reservation_id, self.settings.blocks_for(request.total_tokens) - 1):
            return False
        self._accept(request)
        del self._reservations[reservation_id]
        if computed_tokens <= 0:
            self.pool.give(reservation.blocks)
            request.state = State.WAITING
            self._enqueue(request)
            return True
        request.state = State.RUNNING
        request.computed_tokens = computed_tokens
        self._hold(request, reservation.blocks)
        self._running.append(request)
        return True

    def release(self, reservation_id: str) -> bool:
        """Give a reservation up; what was received stays in the prefix cache as long as nobody needs the room."""
        reservation = self._reservations.pop(reservation_id, None)
        if reservation is None:
            return False
        self.pool.give(reservation.blocks)
        return True

    # One step.

    def _begin(self, now: float, outcome: Outcome) -> None:
        planned = self._plan(outcome)
        preempted = 0
        while not planned and len(outcome.preempted) > preempted:
            # One that had to preempt itself has ended the planning, and has left room for the others.
            preempted = len(outcome.preempted)
            planned = self._plan(outcome)
        if not planned:
            return
        duration_ms = self._duration_ms(planned)
        self.steps += 1
        self.step_ms = duration_ms if self.step_ms == 0.0 else 0.9 * self.step_ms + 0.1 * duration_ms
        self._step = _Step(planned, now + duration_ms / 1000)
        outcome.ends_at = self._step.ends_at
        if self.looks_ahead and not outcome.admitted and not outcome.preempted:
            self._look_ahead(self._step, duration_ms)
            if self._ahead is not None:
                outcome.ends_at = self._ahead.ends_at[-1]

    def _plan(self, outcome: Outcome) -> dict[Request, int]:
        planned: dict[Request, int] = {}
        if not self._running and not self._waiting:
            return planned
        if self.settings.prefill is Prefill.CHUNKED:
            budget = self._plan_running(planned, outcome, self.settings.step_tokens_max)
            if not outcome.preempted or not planned:  # A request that finds only itself to preempt leaves room.
                self._plan_waiting(planned, outcome, budget)
        else:
            self._plan_waiting(planned, outcome, self.settings.step_tokens_max)
            if not planned:
                self._plan_running(planned, outcome, self.settings.step_tokens_max)
        return planned

    def _look_ahead(self, step: _Step, duration_ms: float) -> None:
        """Up to the step in which one finishes, or before the one for which blocks are missing. What waits could not
        enter now and cannot meanwhile, since nothing gets freer."""
        planned, profile, size = step.planned, self.profile, self.settings.block_size
        count = len(planned)
        if count != len(self._running):
            return
        kv_tokens, steps_max = 0, AHEAD_STEPS_MAX
        needs: dict[int, list[int]] = {}
        later: list[tuple[int, int]] = []
        for request in planned:
            computed, made = request.computed_tokens, request.output_tokens
            if not made or request.prompt_tokens + made - computed != 1:
                return
            kv_tokens += computed
            steps_max = min(steps_max, request.output_tokens_max - made)
            first = request._capacity_tokens - computed  # The step, counted from this one, that needs a new block.
            slots = needs.get(request.execution_priority)
            if slots is None:
                slots = needs[request.execution_priority] = [0] * size
            if first < size:
                slots[first] += 1
            else:
                later.append((first, request.execution_priority))
        if steps_max < 2:
            return
        later.sort(reverse=True)
        free, ends_at = self.pool.free, step.ends_at
        fixed_ms, token_ms, floor_ms = (
            profile.decode_request_ms * count,
            profile.decode_kv_token_ms,
            profile.step_floor_ms,
        )
        base_ms, slower = profile.decode_base_ms, 1 + profile.copy_slowdown if self.transfers > 0 else 1.0
        ahead = _Ahead([ends_at], {priority: [0] for priority in needs}, [duration_ms])
        for number in range(1, min(steps_max, AHEAD_STEPS_MAX)):
            while later and later[-1][0] <= number:
                first, priority = later.pop()
                needs[priority][first % size] += 1
            slot = number % size
            for priority, slots in needs.items():
                free -= slots[slot]
                held = ahead.blocks[priority]
                held.append(held[-1] + slots[slot])
            if free < 0:
                break
            kv_tokens += count
            duration_ms = base_ms + (fixed_ms + token_ms * kv_tokens)
            duration_ms = (max(floor_ms, duration_ms)) * slower
            ends_at += duration_ms / 1000
            ahead.ends_at.append(ends_at)
            ahead.durations_ms.append(duration_ms)
        if len(ahead.ends_at) > 1:
            self._ahead = ahead

    def _plan_running(self, planned: dict[Request, int], outcome: Outcome, budget: int) -> int:
        """Each running request gets its next token, or its next chunk; what is left of the budget."""
        running = self._running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            count = request.prompt_tokens + request.output_tokens - request.computed_tokens
            if count > budget:
                count = budget
            after = request.computed_tokens + count
            if after > request._capacity_tokens:
                missing = self.settings.blocks_for(after) - len(request.blocks)
                while missing > self.pool.free:
                    victim = max(running, key=lambda one: one.key)
                    if running.index(victim) < index:
                        index -= 1
                    budget += planned.pop(victim, 0)
                    self._preempt(victim, outcome)
                    if victim is request:
                        return budget
                self._hold(request, self.pool.take(missing))
            planned[request] = count
            budget -= count
            index += 1
        return budget

    def _plan_waiting(self, planned: dict[Request, int], outcome: Outcome, budget: int) -> None:
        """Let queued requests in, strictly in their order."""
        chunked = self.settings.prefill is Prefill.CHUNKED
        while self._waiting and budget > 0 and self._has_place():
            request = self._waiting[0][1]
            hits = self._hits(request)
            computed = len(hits) * self.settings.block_size
            count = request.total_tokens - computed
            if count > budget and not chunked:
                return
            if self._blocks_missing(request, hits) + self._watermark() > self.pool.free:
                return
            count = min(count, budget)
            self._unqueue(request)
            self.pool.touch(hits)
            self._hold(request, hits + self.pool.take(self.settings.blocks_for(computed + count) - len(hits)))
            request.computed_tokens = computed
            if request.cached_tokens is None:
                request.cached_tokens = min(computed, request.prompt_tokens)
            request.state = State.RUNNING
            self._running.append(request)
            planned[request] = count
            outcome.admitted.append(request)
            budget -= count

    def _duration_ms(self, planned: dict[Request, int]) -> float:
        prefills: list[tuple[int, int]] = []
        decodes = kv_tokens = 0
        for request, count in planned.items():
            if count == 1 and request.output_tokens:
                decodes += 1
                kv_tokens += request.computed_tokens
            else:
                prefills.append((request.computed_tokens, count))
        duration_ms = self.profile.step_ms(prefills, decodes, kv_tokens)
        return duration_ms * (1 + self.profile.copy_slowdown) if self.transfers > 0 else duration_ms

    def _end(self, step: _Step, outcome: Outcome) -> None:
        self._step = None
        block_size, caching = self.settings.block_size, self.pool.caching
        for request, count in step.planned.items():
            before = request.computed_tokens
            after = request.computed_tokens = before + count
            if caching and after // block_size > before // block_size:
                self._fill(request, before // block_size, after // block_size)
            if after == request.prompt_tokens + request.output_tokens:
                request.output_tokens += 1
                outcome.sampled.append(request)
                if request.output_tokens >= request.output_tokens_max:
                    outcome.finished.append(request)
        for request in outcome.finished:
            self._remove(request)

    def _fill(self, request: Request, begin: int, end: int) -> None:
        contents = request.contents(end, self.settings.block_size)
        for index in range(begin, end):
            self.pool.fill(request.blocks[index], contents[index])

    # Blocks and places.

    def _has_place(self) -> bool:
        return len(self._running) + len(self._frozen) + len(self._reservations) < self.settings.batch_max

    def _watermark(self) -> int:
        """Kept free beside what enters; in vLLM V1 only while anything runs."""
        always = self.settings.prefill is Prefill.WHOLE_PROMPT
        return self.settings.watermark_blocks if always or self._running else 0

    def _hits(self, request: Request) -> list[int]:
        """Blocks of the prefix cache with which it could begin; at least one token is left to compute."""
        if not self.pool.caching:
            return []
        full = (request.total_tokens - 1) // self.settings.block_size
        return self.pool.find(request.contents(full, self.settings.block_size))

    def _blocks_missing(self, request: Request, hits: list[int]) -> int:
        """Free blocks that go when all of its tokens are to be held, ``hits`` among them."""
        return self.settings.blocks_for(request.total_tokens) - len(hits) + self.pool.free_among(hits)

    def _hold(self, request: Request, blocks: list[int]) -> None:
        request.blocks += blocks
        held = self._held_blocks
        held[request.execution_priority] = held.get(request.execution_priority, 0) + len(blocks)
        request._capacity_tokens = len(request.blocks) * self.settings.block_size

    def _accept(self, request: Request) -> None:
        assert request.state in (State.NEW, State.ENDED), f"{request.request_id} is {request.state}"
        if request.request_id in self._requests:
            raise EngineError(f"the request {request.request_id} is here already")
        if request.prompt_tokens < 1 or request.output_tokens >= request.output_tokens_max:
            raise EngineError("a request needs a prompt, and an output token to make")
        if request.prompt_tokens + request.output_tokens_max > self.settings.sequence_tokens_max:
            raise EngineError(f"the sequence is longer than {self.settings.sequence_tokens_max} tokens")
        request.blocks, request._capacity_tokens, request.computed_tokens = [], 0, 0
        self._requests[request.request_id] = request

    def _preempt(self, request: Request, outcome: Outcome) -> None:
        self._running.remove(request)
        self._free(request)
        request.preemptions += 1
        request.state = State.WAITING
        self._enqueue(request)
        outcome.preempted.append(request)

    def _free(self, request: Request) -> None:
        if request.blocks:
            self.pool.give(request.blocks)
            left = self._held_blocks[request.execution_priority] - len(request.blocks)
            if left:
                self._held_blocks[request.execution_priority] = left
            else:
                del self._held_blocks[request.execution_priority]
        request.blocks, request._capacity_tokens, request.computed_tokens = [], 0, 0

    def _remove(self, request: Request) -> None:
        match request.state:
            case State.RUNNING:
                self._running.remove(request)
            case State.WAITING:
                self._unqueue(request)
            case State.FROZEN:
                del self._frozen[request.request_id]
            case _:
                raise AssertionError(f"{request.request_id} is {request.state}")
        self._free(request)
        if self._step is not None:
            self._step.planned.pop(request, None)  # Its token is lost; the step takes as long as before.
        request.state = State.ENDED
        del self._requests[request.request_id]

    def _enqueue(self, request: Request) -> None:
        insort(self._waiting, (request.key, request))
        self._queued_blocks += self.demand_blocks(request)

    def _unqueue(self, request: Request) -> None:
        index = bisect_left(self._waiting, request.key, key=lambda entry: entry[0])
        assert self._waiting[index][1] is request
        del self._waiting[index]
        self._queued_blocks -= self.demand_blocks(request)

    def check(self) -> None:
        """Raises AssertionError unless what the engine holds adds up."""
        assert len(self._running) + len(self._frozen) + len(self._reservations) <= self.settings.batch_max
        queued = [request for _, request in self._waiting]
        known = [*self._running, *self._frozen.values(), *queued]
        assert {request.request_id for request in known} == set(self._requests)
        assert len(known) == len(self._requests)
        assert [key for key, _ in self._waiting] == sorted(request.key for request in queued)
        holders = [*(request.blocks for request in known), *(one.blocks for one in self._reservations.values())]
        self.pool.check(holders)
        held: dict[int, int] = {}
        for request in known:
            if request.blocks:
                held[request.execution_priority] = held.get(request.execution_priority, 0) + len(request.blocks)
        assert held == self._held_blocks
        assert self._queued_blocks == sum(map(self.demand_blocks, queued))
        for request in known:
            assert request.computed_tokens < max(request.total_tokens, 1)
            assert request.computed_tokens <= request._capacity_tokens
            assert not (queued and request in queued and request.blocks)
