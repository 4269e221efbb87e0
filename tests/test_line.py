"""Two gateways' waiting requests of one class, over a real Redis: who starts first. Docs: docs/waiting.md."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import pytest

from gateway import wire
from gateway.cluster import keys
from gateway.cluster.members import Instance, Members
from gateway.cluster.order import SharedOrder
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.policy.waiting import WaitingRules
from gateway.serving.dispatch import Dispatcher
from gateway.serving.waiting import Ticket, Waiting, WaitingLimits
from gateway.telemetry import run_forever
from gateway.wire import PriorityClass
from tests.conftest import until, until_true
from tests.fake_instance import FakeInstance

HIGH, NORMAL, LOW = sorted(PriorityClass)
INSTANCE = Instance("a", "http://a:1", "boot-1")
NEVER_AGED = WaitingRules(aged_s=1e9)
LIMITS = WaitingLimits(instance_wait_s=1e9, room_wait_s=1e9, waiters_max=1_000)
APART_S = 60.0
"""Between two requests: no machine stands still for so long between saying an age and Redis's reading it."""


@dataclass(slots=True)
class Side:
    """One gateway, as far as waiting goes."""

    waiting: Waiting
    members: Members
    order: SharedOrder
    started: list[str]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def report(self, report: wire.Report) -> None:
        self.members.reported(report, time.monotonic())

    def ask(self, ticket: Ticket) -> None:
        self.tasks.append(asyncio.create_task(self._start(ticket)))

    async def _start(self, ticket: Ticket) -> None:
        await self.waiting.start(ticket)
        self.started.append(ticket.request_id)


class Cluster:
    """``started``: in order, wherever."""

    def __init__(self, redis_url: str, model: str) -> None:
        self.model = model
        self.started: list[str] = []
        self.stores: list[Store] = []
        self.sides: list[Side] = []
        self._report = wire.Report.from_json(FakeInstance("a").report())
        for _ in range(2):
            store, members, gateway_id = Store(redis_url), Members(1e9, 1e9), uuid.uuid4().hex
            members.probed(INSTANCE, [{"id": model}], True, None, time.monotonic())
            order = SharedOrder(store, gateway_id, 60.0, Counters())
            dispatcher = Dispatcher(members)
            waiting = Waiting(dispatcher, order, NEVER_AGED, LIMITS, Counters(), binds_late=True)
            members.on_report = waiting.wake
            self.stores.append(store)
            self.sides.append(Side(waiting, members, order, self.started))
        self.has_room(0)

    def has_room(self, places: int) -> None:
        self._report = dataclasses.replace(
            self._report, sequence=self._report.sequence + 1, room_blocks=100, room_places=places
        )
        for side in self.sides:
            side.report(self._report)

    async def told(self, count: int) -> bool:
        return int(await self.stores[0]._redis.zcard(keys.waiting_order(self.model))) == count

    async def all_started(self, count: int) -> list[str]:
        """With room for one at a time."""
        for index in range(count):
            self.has_room(1)
            await until(lambda index=index: len(self.started) > index, 30)  # type: ignore[misc]
            self.has_room(0)
        return self.started


@contextlib.asynccontextmanager
async def cluster(redis_url: str) -> AsyncIterator[Cluster]:
    made = Cluster(redis_url, uuid.uuid4().hex)
    loops = [asyncio.create_task(run_forever("waiting", side.waiting.look, 0.01, Counters())) for side in made.sides]
    try:
        yield made
    finally:
        for task in (*loops, *(task for side in made.sides for task in side.tasks)):
            task.cancel()
        for side in made.sides:
            await side.waiting.close()
        for store in made.stores:
            await store.close()


def tickets(model: str, classes: Iterable[PriorityClass]) -> list[Ticket]:
    """The first is the oldest."""
    people = list(classes)
    now = time.monotonic()
    return [
        Ticket(f"{one.word}-{index}", model, one, 1, since=now - APART_S * (len(people) - index))
        for index, one in enumerate(people)
    ]


@pytest.mark.parametrize("seed", [1, 2])
async def test_requests_of_one_class_start_by_age_whichever_gateway_they_wait_in(redis_url: str, seed: int) -> None:
    chance = random.Random(seed)
    async with cluster(redis_url) as both:
        people = tickets(both.model, [NORMAL] * 12)
        for ticket in chance.sample(people, len(people)):  # Whoever is told of first.
            chance.choice(both.sides).ask(ticket)
        await until_true(lambda: both.told(12), 30)
        assert await both.all_started(12) == [ticket.request_id for ticket in people]


async def test_classes_come_before_ages_whichever_gateway_they_wait_in(redis_url: str) -> None:
    async with cluster(redis_url) as both:
        people = tickets(both.model, [LOW, NORMAL, HIGH] * 3)
        for index, ticket in enumerate(people):
            both.sides[index % 2].ask(ticket)
        await until_true(lambda: both.told(9), 30)
        in_order = sorted(people, key=lambda one: (one.priority_class, one.since))
        assert await both.all_started(9) == [ticket.request_id for ticket in in_order]


async def test_a_line_of_others_is_looked_at_again_while_somebody_waits_here_for_another_model(redis_url: str) -> None:
    """Else a line that is long ago no more would have everyone turned away who comes here for that model."""
    async with cluster(redis_url) as both:
        here, there = both.sides
        waiting = here.waiting
        for side in both.sides:
            side.members.probed(INSTANCE, [{"id": both.model}, {"id": "another"}], True, None, time.monotonic())
        there.ask(Ticket("there", both.model, NORMAL, 1))
        await until(lambda: waiting.length(both.model) == 1)
        here.ask(Ticket("here", "another", NORMAL, 1))
        await until(lambda: waiting.length("another") == 1)
        there.tasks[0].cancel()
        await until(lambda: waiting.length(both.model) == 0, 30)
        assert waiting.length("another") == 1


async def test_who_started_while_redis_was_away_stands_in_nobodys_way_when_it_is_back(redis_url: str) -> None:
    """Redis was told that it waits, and could not be told that it does no more."""
    async with cluster(redis_url) as both:
        here, there = both.sides
        ghost, waits = tickets(both.model, [NORMAL] * 2)
        here.ask(ghost)
        await until_true(lambda: both.told(1), 30)
        former_id = here.order.own_id
        here.order._trip("as if it had not answered")
        here.report(dataclasses.replace(both._report, sequence=10**6, room_places=1))
        await until(lambda: both.started == [ghost.request_id], 30)
        here.report(dataclasses.replace(both._report, sequence=10**6 + 1, room_places=0))
        assert await both.told(1)
        there.ask(waits)
        await until(lambda: here.order.is_shared, 30)
        here.ask(Ticket("later", both.model, NORMAL, 1))
        gateways = both.stores[0]._redis

        async def is_told() -> bool:
            return await gateways.zscore(keys.WAITING_GATEWAYS, here.order.own_id) is not None

        await until_true(is_told, 30)
        assert await gateways.zscore(keys.WAITING_GATEWAYS, former_id) is None
        await until(lambda: there.waiting.length(both.model) == here.waiting.length(both.model) == 2, 30)
        assert await both.told(2)
