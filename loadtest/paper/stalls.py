"""How long an engine's step waits for its scheduler (Llumnix, figure 16).

Engines run in virtual time. Whatever decides is the real code, and the processor time that it takes here is what it
takes there: a scheduler is one thread, which does one thing after the other, and whoever waits for it waits.

``central`` is what the paper compares with: one scheduler that is told the state of every request of every instance at
each step, and without whose answer no step begins. In ``kvferry`` an engine waits for its own llumlet alone: for a
report ten times a second, and for a verdict whenever a request comes; the gateway works beside it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from gateway import wire
from gateway.policy.decide import Memory, decide
from gateway.policy.dispatch import Sent, queue_length, rank
from gateway.policy.lineup import Lineup, Standing
from gateway.policy.policies import POLICIES
from gateway.policy.usage import RequestUsage, freeness_steps, virtual_usage_blocks
from gateway.policy.view import ClusterView, InstanceView
from gateway.policy.waiting import Waiter, site
from loadtest.paper.parameters import ENGINE
from loadtest.sim.admission import judge
from loadtest.sim.engine import Engine, Request
from loadtest.sim.metrics import percentile
from loadtest.sim.profile import LLAMA_7B_A10
from loadtest.sim.reports import Identity, groups_of, make_report, view_of
from loadtest.sim.tokens import SyntheticPrompt

TOKENS = 64
"""Of a prompt, and of an output: the paper's are short, so that steps are many and requests come and go."""
WARM_UP_S, MEASURED_S = 6.0, 2.0
REPORT_INTERVAL_S = 0.1
TICK_S = 0.2
GATEWAY_RPS = 1000.0
MODELS = ("m",)
POLICY = POLICIES["kvferry"]

T = TypeVar("T")


@dataclass(slots=True)
class Thread:
    """One that decides. ``busy_s`` is of the measured time only."""

    free_at: float = 0.0
    busy_s: float = 0.0

    def run(self, now: float, work: Callable[[], T]) -> tuple[T, float]:
        """What it came to, and when it was done."""
        found, taken_s = timed(work)
        return found, self.spend(now, taken_s)

    def spend(self, now: float, taken_s: float) -> float:
        self.free_at = max(now, self.free_at) + taken_s
        if now >= WARM_UP_S:
            self.busy_s += taken_s
        return self.free_at


def timed(work: Callable[[], T]) -> tuple[T, float]:
    began_ns = time.thread_time_ns()
    found = work()
    return found, (time.thread_time_ns() - began_ns) / 1e9


class Scheduler(Protocol):
    """Decides for all engines, and says how long each time somebody has to wait for it."""

    threads: list[Thread]
    engines: list[Engine]

    def chosen(self, request: Request, now: float) -> tuple[int, float]:
        """Where a request starts, and when that is known."""

    def step_may_begin(self, index: int, now: float) -> float:
        """An engine's step has ended: when it may begin the next one."""

    def events(self) -> list[tuple[float, Callable[[float], float | None]]]:
        """What it does beside that: when first, and what; which says when again."""


class RequestState(msgspec.Struct, array_like=True):
    request_id: str
    blocks: int
    demand_blocks: int
    is_queued: bool
    priority: int


class InstanceState(msgspec.Struct, array_like=True):
    requests: list[RequestState]
    blocks_free: int


class Central:
    """Knows every request of every instance as of its last step."""

    def __init__(self, engines: list[Engine], rate_rps: float) -> None:
        self.engines, self.threads = engines, [Thread()]
        self._requests: list[dict[str, RequestState]] = [{} for _ in engines]
        self._lineup = Lineup()
        self._decoder = msgspec.json.Decoder(InstanceState)
        self._encoder = msgspec.json.Encoder()
        self._views: dict[int, InstanceView] = {}
        self._sent: list[int] = [0 for _ in engines]
        for index in range(len(engines)):
            self._know(index, self._told(index))

    def events(self) -> list[tuple[float, Callable[[float], float | None]]]:
        return []

    def chosen(self, request: Request, now: float) -> tuple[int, float]:
        def work() -> int:
            best = self._lineup.best()
            assert best is not None
            index = int(best)
            self._sent[index] += 1
            self._stand(index)
            return index

        return self.threads[0].run(now, work)

    def step_may_begin(self, index: int, now: float) -> float:
        told = self._told(index)
        _, at = self.threads[0].run(now, lambda: self._know(index, told))
        return at

    def _told(self, index: int) -> bytes:
        """By the instance, in its own time."""
        engine = self.engines[index]
        running = [RequestState(one.request_id, len(one.blocks), 0, False, 0) for one in engine.running()]
        queued = [RequestState(one.request_id, 0, engine.demand_blocks(one), True, 0) for one in engine.waiting()]
        return self._encoder.encode(InstanceState(running + queued, engine.load().blocks_free))

    def _know(self, index: int, told: bytes) -> bytes:
        """Everything of one instance, and what it is to compute next: those that run, and queued ones that fit."""
        state = self._decoder.decode(told)
        requests = {one.request_id: one for one in state.requests}
        self._requests[index] = requests
        usages, chosen, free = [], [], state.blocks_free
        is_head, queued_blocks, head_blocks, running = True, 0, 0, 0
        for one in requests.values():
            usages.append(RequestUsage(one.blocks, one.demand_blocks, one.is_queued, one.is_queued and is_head))
            if one.is_queued:
                head_blocks = one.demand_blocks if is_head else head_blocks
                is_head, queued_blocks = False, queued_blocks + one.demand_blocks
                free -= one.demand_blocks
            running += not one.is_queued
            if free >= 0:
                chosen.append(one.request_id)
        usage = virtual_usage_blocks(usages)
        view = InstanceView(
            f"{index:05d}",
            groups_of(MODELS),
            True,
            False,
            False,
            None,
            ENGINE.block_size,
            ENGINE.blocks_total,
            usage,
            head_blocks,
            queued_blocks,
            running,
            len(requests) - running,
            freeness_steps(ENGINE.blocks_total, usage, running, ENGINE.block_size),
            ENGINE.batch_max,
        )
        self._views[index], self._sent[index] = view, 0
        self._stand(index)
        return self._encoder.encode(chosen)

    def _stand(self, index: int) -> None:
        view, sent = self._views[index], Sent(self._sent[index], self._sent[index] * TOKENS)
        self._lineup.put(Standing(view, rank(view, sent), queue_length(view, sent), 0, False, site(view, sent)))


class Distributed:
    """Gateways with reports, and each engine's llumlet, which is a thread of that engine's.

    Each gateway reads every report and takes its share of the requests, a thousand a second at most; the first one
    leads. They know of each other's requests here, which in truth they do with the next report.
    """

    def __init__(self, engines: list[Engine], rate_rps: float) -> None:
        self.engines, self.threads = engines, [Thread() for _ in range(math.ceil(rate_rps / GATEWAY_RPS))]
        self._turns = itertools.cycle(self.threads)
        self._identities = [Identity(f"{index:05d}", "b", MODELS, "kv") for index in range(len(engines))]
        self._report_due = [REPORT_INTERVAL_S * index / len(engines) for index in range(len(engines))]
        self._owed_s = [0.0 for _ in engines]
        """Of each engine: verdicts that it has given since its last step."""
        self._arriving: deque[tuple[float, bytes]] = deque()
        self._views: dict[str, InstanceView] = {}
        self._sent: dict[str, int] = {}
        self._lineup = Lineup()
        self._decoder = msgspec.json.Decoder(wire.Report)
        self._encoder = msgspec.json.Encoder()
        self._memory = Memory()
        self._sequence = itertools.count(1)
        for index in range(len(engines)):
            self._read(self._report(index))

    def events(self) -> list[tuple[float, Callable[[float], float | None]]]:
        return [(0.0, self._tick)]

    def chosen(self, request: Request, now: float) -> tuple[int, float]:
        self._catch_up(now)
        instance_id, at = next(self._turns).run(now, lambda: self._choose(request))
        index = int(instance_id)
        _, taken_s = timed(lambda: judge(self.engines[index], request, POLICY.growth_tokens))
        self._owed_s[index] += taken_s
        return index, at

    def step_may_begin(self, index: int, now: float) -> float:
        owed_s, self._owed_s[index] = self._owed_s[index], 0.0
        if now >= self._report_due[index]:
            self._report_due[index] = now + REPORT_INTERVAL_S
            told, taken_s = timed(lambda: self._report(index))
            owed_s += taken_s
            self._arriving.append((now, told))
        return now + owed_s

    def _report(self, index: int) -> bytes:
        return self._encoder.encode(make_report(self.engines[index], self._identities[index], next(self._sequence)))

    def _catch_up(self, now: float) -> None:
        while self._arriving:
            at, told = self._arriving.popleft()
            _, taken_s = timed(lambda told=told: self._read(told))  # type: ignore[misc]
            for thread in self.threads:
                thread.spend(at, taken_s)

    def _read(self, told: bytes) -> None:
        view = view_of(self._decoder.decode(told))
        self._views[view.instance_id] = view
        self._sent[view.instance_id] = 0
        self._stand(view)

    def _stand(self, view: InstanceView) -> None:
        count = self._sent[view.instance_id]
        sent = Sent(count, count * TOKENS)
        self._lineup.put(Standing(view, rank(view, sent), queue_length(view, sent), 0, False, site(view, sent)))

    def _choose(self, request: Request) -> str:
        best = self._lineup.best_site(Waiter(request.request_id, 0, 0.0, request.total_tokens))
        instance_id = best.instance_id if best is not None else self._lineup.best()
        assert instance_id is not None
        self._sent[instance_id] += 1
        self._stand(self._views[instance_id])
        return instance_id

    def _tick(self, now: float) -> float:
        self._catch_up(now)
        self.threads[0].run(now, self._decide)
        return now + TICK_S

    def _decide(self) -> None:
        view = ClusterView(tuple(self._views.values()))
        _, self._memory = decide(view, self._memory, 0.0, POLICY.leader)


SCHEDULERS: dict[str, Callable[[list[Engine], float], Scheduler]] = {"central": Central, "kvferry": Distributed}


@dataclass(slots=True)
class Seen:
    stalls_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    dispatches_s: list[float] = field(default_factory=list)


def run(policy: str, instances: int, rate_rps: float, seed: int, measured_s: float = MEASURED_S) -> dict[str, Any]:
    """One run. Stalls are of steps, between their being due and their beginning."""
    engines = [Engine(ENGINE, LLAMA_7B_A10) for _ in range(instances)]
    scheduler = SCHEDULERS[policy](engines, rate_rps)
    seen = _play(scheduler, rate_rps, random.Random(seed), WARM_UP_S + measured_s)
    stalls, steps, dispatches = (sorted(values) for values in (seen.stalls_s, seen.steps_s, seen.dispatches_s))
    return {
        "stall_mean_ms": 1000 * statistics.fmean(stalls),
        "stall_p99_ms": 1000 * percentile(stalls, 0.99),
        "stall_max_ms": 1000 * stalls[-1],
        "step_mean_ms": 1000 * statistics.fmean(steps),
        "dispatch_mean_ms": 1000 * statistics.fmean(dispatches),
        "dispatch_p99_ms": 1000 * percentile(dispatches, 0.99),
        "scheduler_threads": len(scheduler.threads),
        "scheduler_busy_share": max(thread.busy_s for thread in scheduler.threads) / measured_s,
        "steps_measured": len(steps),
    }


def _play(scheduler: Scheduler, rate_rps: float, dice: random.Random, until_s: float) -> Seen:
    seen = Seen()
    numbers = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    idle = [True for _ in scheduler.engines]

    def at(when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(numbers), event))

    def repeat(when: float, event: Callable[[float], float | None]) -> None:
        def happen(now: float) -> None:
            if (again := event(now)) is not None:
                repeat(again, event)

        at(when, happen)

    def arrive(now: float) -> None:
        number = next(numbers)
        request = Request(f"r{number}", SyntheticPrompt(number, TOKENS), TOKENS, arrived_at=now)
        index, known_at = scheduler.chosen(request, now)
        if now >= WARM_UP_S:
            seen.dispatches_s.append(known_at - now)
        at(known_at, lambda then: start(index, request, then))
        at(now + dice.expovariate(rate_rps), arrive)

    def start(index: int, request: Request, now: float) -> None:
        scheduler.engines[index].add(request)
        if idle[index]:
            idle[index] = False
            at(now, lambda then: step(index, then))

    def step(index: int, now: float) -> None:
        """The one before has ended; the engine's own look at it is part of every scheduler, and is not counted."""
        begins_at = scheduler.step_may_begin(index, now)
        ends_at = scheduler.engines[index].step(begins_at).ends_at
        if ends_at is None:
            idle[index] = True
            return
        if now >= WARM_UP_S:
            seen.stalls_s.append(begins_at - now)
            seen.steps_s.append(ends_at - begins_at)
        at(ends_at, lambda then: step(index, then))

    at(0.0, arrive)
    for when, event in scheduler.events():
        repeat(when, event)
    while events[0][0] < until_s:
        now, _, event = heapq.heappop(events)
        event(now)
    return seen
