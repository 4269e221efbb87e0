"""The lease and the snapshot, whatever becomes of messages and clocks. Real gateways' leaders, a real Redis.

Time is a number that the test moves on. What a leader asks of Redis or of an instance is held back until the test lets
it through: late, twice, in another order, or never. Each leader reads a clock of its own, which began elsewhere and
runs a little too fast or too slow; wall clocks step by a minute at any moment, and nobody may care. Redis ends a lease
when its own time has come, and may lose all that it holds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import redis
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gateway import wire
from gateway.cluster import keys, store
from gateway.cluster.members import Instance, Members
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from gateway.policy.decide import Action, PolicySettings
from gateway.scheduler import leader as leader_module
from gateway.scheduler.executor import Executor
from gateway.scheduler.leader import Leader
from tests.fake_instance import MODEL, FakeInstance
from tests.test_leader import nothing_kept

LEASE_S = 1_000.0
"""In the test's time. So long that Redis's own clock never ends one; the test does."""
DRIFT_MAX = 0.04
"""A tenth of a lease is the margin (store.LEASE_MARGIN): clocks may differ by less."""
GATEWAYS = 3
SHARES = (0.0, 0.05, 0.45, 0.98, 1.02)
"""Of a lease: just before its end and just after it is where clocks that differ would show."""


@dataclass(slots=True, eq=False)
class Message:
    """To Redis or to the instance; ``answer`` is what its sender waits for."""

    sender: int
    arrive: Callable[[], Any]
    answer: asyncio.Future[Any]


@dataclass(slots=True)
class World:
    client: redis.Redis
    now_s: float = 0.0
    ends_at: float = 0.0
    """When Redis ends the lease that it holds."""
    messages: list[Message] = field(default_factory=list)
    fence: int = 0
    """Of the one instance."""
    obeyed: list[tuple[int, int]] = field(default_factory=list)
    """Sender and token of the orders that it has taken."""


class HeldStore(Store):
    """Redis behind a network that the test is."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number

    async def _eval(self, script: str, key_names: list[str], arguments: list[str]) -> Any:
        world = self.world

        def arrive() -> Any:
            before = world.client.get(keys.LEADER)
            answer = world.client.eval(script, len(key_names), *key_names, *arguments)
            if script == store._TAKE_LEASE and answer:
                world.ends_at = world.now_s + LEASE_S
            assert before is None or script != store._PUBLISH or world.client.get(keys.LEADER) == before
            return answer

        return await send(world, self.number, arrive)


class HeldExecutor(Executor):
    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number

    async def run(self, action: Action, fence: int) -> None:
        world = self.world

        def arrive() -> None:
            """As the llumlet does it."""
            if fence >= world.fence:
                world.fence = fence
                world.obeyed.append((self.number, fence))

        await send(world, self.number, arrive)


async def send(world: World, sender: int, arrive: Callable[[], Any]) -> Any:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    world.messages.append(Message(sender, arrive, answer))
    return await answer


class Clock:
    """A gateway's ``time`` module: its monotonic clock, and a wall clock that nobody should look at."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.began_at = world, random.Random(number).uniform(0, 1e6)
        self.rate = 1 + (number - 1) * DRIFT_MAX

    def monotonic(self) -> float:
        return self.began_at + self.world.now_s * self.rate

    def time(self) -> float:
        raise AssertionError("a wall clock says nothing about a lease")


def members_of(world: World, fake: FakeInstance, now: float) -> Members:
    """Somebody to move from and to, so that there is always an order to give."""
    members = Members(1e9, 1e9)
    for instance_id, freeness in (("a", 1.0), ("b", 10_000.0)):
        other = FakeInstance(instance_id, freeness_steps=freeness, report_changes={"requests_running": 4})
        card = {"id": MODEL, "root": MODEL, "parent": None}
        members.probed(Instance(instance_id, "http://x", "boot-1"), [card], True, None, now)
        members.reported(wire.Report.from_json(other.report()), now)
    return members


class Leases(RuleBasedStateMachine):
    client: redis.Redis

    @initialize()
    def start(self) -> None:
        self.client.delete(keys.LEADER, keys.LEADER_TOKEN, keys.SNAPSHOT)
        self.loop = asyncio.new_event_loop()
        self.world = World(self.client)
        self.clocks = [Clock(self.world, number) for number in range(GATEWAYS)]
        self.members = [members_of(self.world, FakeInstance("a"), clock.monotonic()) for clock in self.clocks]
        self.leaders = [
            Leader(
                f"g{number}",
                HeldStore(self.world, number),
                self.members[number],
                HeldExecutor(self.world, number),
                PolicySettings(),
                LEASE_S,
                Counters(),
                nothing_kept,
            )
            for number in range(GATEWAYS)
        ]
        self.ticks: list[asyncio.Task[None] | None] = [None] * GATEWAYS
        self.late: list[Message] = []
        self.lost_until = 0.0
        self.snapshot = (0, 0)
        self.sequence = 1

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        tasks = [tick for tick in self.ticks if tick is not None and not tick.done()]
        for tick in tasks:
            tick.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()

    @contextmanager
    def as_gateway(self, number: int) -> Iterator[None]:
        """What runs now reads this gateway's clock."""
        modules: list[Any] = [store, leader_module]
        for module in modules:
            module.time = self.clocks[number]
        try:
            yield
        finally:
            for module in modules:
                module.time = time

    def turn(self, number: int) -> None:
        with self.as_gateway(number):
            for _ in range(5):
                self.loop.run_until_complete(asyncio.sleep(0))

    def begin(self, number: int) -> asyncio.Task[None]:
        """One that still waits for an answer begins no other."""
        tick = self.ticks[number]
        if tick is None or tick.done():
            tick = self.ticks[number] = self.loop.create_task(self.leaders[number].tick())
        self.turn(number)
        return tick

    def deliver(self, message: Message, answered: bool = True) -> None:
        """It may come again. Without an answer its sender gives up waiting."""
        result = message.arrive()
        self.late.append(message)
        if not message.answer.done():
            if answered:
                message.answer.set_result(result)
            else:
                message.answer.set_exception(StoreUnavailable("the test has lost the answer"))
        self.turn(message.sender)

    @rule(number=st.integers(0, GATEWAYS - 1), rounds=st.integers(1, 3), share=st.sampled_from(SHARES))
    def rounds_that_go_well(self, number: int, rounds: int, share: float) -> None:
        """After some time in which nothing happened."""
        self.time_goes_on(share)
        for _ in range(rounds):
            tick = self.begin(number)
            while not tick.done():
                message = next(one for one in self.world.messages if one.sender == number)
                self.world.messages.remove(message)
                self.deliver(message)

    @rule(number=st.integers(0, GATEWAYS - 1))
    def a_round_begins(self, number: int) -> None:
        self.begin(number)

    @rule(index=st.integers(0, 10), answered=st.booleans())
    def a_message_arrives(self, index: int, answered: bool) -> None:
        if self.world.messages:
            self.deliver(self.world.messages.pop(index % len(self.world.messages)), answered)

    @rule(count=st.integers(1, 8))
    def messages_come_again(self, count: int) -> None:
        """Out of buffers, the last one first, when their senders have long sent others or have given up."""
        for message in reversed(self.late[-count:]):
            message.arrive()

    @rule(share=st.sampled_from(SHARES))
    def time_goes_on(self, share: float) -> None:
        self.world.now_s += share * LEASE_S
        if self.world.now_s >= self.world.ends_at:
            self.client.delete(keys.LEADER)

    @rule()
    def the_instance_reports(self) -> None:
        """To every gateway: what it has obeyed is known then."""
        self.sequence += 1
        for number, members in enumerate(self.members):
            fake = FakeInstance("a", freeness_steps=1.0)
            changes = {"requests_running": 4, "fence": self.world.fence, "sequence": self.sequence}
            members.reported(wire.Report.from_json(fake.report() | changes), self.clocks[number].monotonic())

    @rule(really=st.integers(0, 9))
    def redis_loses_its_memory(self, really: int) -> None:
        """For one lease there may be two that believe they lead: the instance decides between them."""
        if really:  # Seldom: most of what is to be seen needs its memory.
            return
        self.client.delete(keys.LEADER, keys.LEADER_TOKEN, keys.SNAPSHOT)
        self.lost_until = self.world.now_s + 2 * LEASE_S
        self.snapshot = (0, 0)

    @invariant()
    def one_leads_at_a_time(self) -> None:
        if self.world.now_s < self.lost_until:
            return
        leading = []
        for number, leader in enumerate(self.leaders):
            with self.as_gateway(number):
                if leader.is_leading:
                    leading.append(number)
        assert len(leading) <= 1, leading

    @invariant()
    def orders_are_obeyed_in_the_order_of_their_leases(self) -> None:
        tokens = [token for _, token in self.world.obeyed]
        assert tokens == sorted(tokens)
        if self.lost_until == 0.0:
            for token in set(tokens):
                assert len({sender for sender, one in self.world.obeyed if one == token}) == 1, "a token of two"

    @invariant()
    def the_snapshot_never_goes_back(self) -> None:
        holder, number = cast(list[str | None], self.client.hmget(keys.SNAPSHOT, "holder", "number"))
        if holder is None or number is None:
            return
        snapshot = int(holder.rpartition(":")[2]), int(number)
        assert snapshot >= self.snapshot
        self.snapshot = snapshot


def test_one_leads_and_nothing_older_is_obeyed_or_published(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        Leases.client = client
        profile = settings()
        examples = min(profile.max_examples, 1_000)
        run = settings(profile, max_examples=examples, stateful_step_count=40, phases=[Phase.explicit, Phase.generate])
        run_state_machine_as_test(Leases, settings=run)  # Not made shorter when it fails: that takes minutes.
        client.delete(keys.LEADER, keys.LEADER_TOKEN, keys.SNAPSHOT)


@pytest.mark.parametrize("seed", range(20))
def test_reports_that_come_late_or_twice_or_of_an_old_life_never_take_a_newer_ones_place(seed: int) -> None:
    """Their order is their own number's; no clock is asked, neither the instance's nor the wall's."""
    chance = random.Random(seed)
    fake = FakeInstance("a")
    members = Members(10.0)
    lives = ["boot-1", "boot-2"]
    reports = {life: [wire.Report.from_json(fake.report() | {"boot_id": life}) for _ in range(10)] for life in lives}
    for life in lives:
        members.probed(Instance("a", "http://x", life), [], True, None, 0.0)
        coming = [report for one in lives[: lives.index(life) + 1] for report in reports[one]] * 2
        chance.shuffle(coming)
        newest = -1
        for at, report in enumerate(coming):
            members.reported(report, float(at))
            if report.boot_id == life:
                newest = max(newest, report.sequence)
            (member,) = members.all()
            assert (None if member.report is None else member.report.sequence) == (newest if newest >= 0 else None)
            assert member.report is None or member.report.boot_id == life
