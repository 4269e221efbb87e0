"""The leader pairs instances; without Redis requests go on and moves pause."""

from __future__ import annotations

import asyncio
import time

from gateway import wire
from gateway.cluster.members import Instance, Members
from gateway.cluster.store import Lease, Store
from gateway.counters import Counters
from gateway.policy.decide import Action, PolicySettings
from gateway.scheduler.executor import Executor
from gateway.scheduler.leader import Leader
from loadtest.processes import free_port
from tests.conftest import StartGateway, until, until_true
from tests.fake_instance import MODEL, FakeInstance, instances
from tests.scripts import moves_after, normal


async def test_a_full_instance_is_paired_with_a_free_one_until_it_is_no_longer_full(
    start_gateway: StartGateway,
) -> None:
    async with instances("a", "b") as (a, b):
        a.freeness_steps = 10
        a.report_changes = {"requests_running": 4}
        async with start_gateway(a, b) as running:
            await until(lambda: len(a.pairings) >= 3)
            pairing = a.pairings[-1]
            assert pairing is not None
            assert (pairing.destination_id, pairing.destination_url) == ("b", b.url)
            assert pairing.lease_ms > 2 * running.gateway._intervals.leader_tick_s * 1000
            a.freeness_steps = 300
            await until(lambda: a.pairings[-1] is None)
            assert not b.pairings


async def test_one_gateway_leads_and_another_takes_over(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as second:
        async with start_gateway(a) as first:
            leaders = [first.gateway.leader, second.gateway.leader]
            await until(lambda: any(leader.is_leading for leader in leaders))
            assert sum(leader.is_leading for leader in leaders) == 1
        await until(lambda: second.gateway.leader.is_leading)


async def test_the_leader_publishes_reports_and_the_registry(start_gateway: StartGateway, redis_url: str) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b):
        store = Store(redis_url)

        async def published() -> bool:
            snapshot, registered = await store.snapshot(), await store.registered()
            reported = {report["instance_id"] for report in snapshot["reports"]} if snapshot is not None else set()
            return reported == set(registered) == {"a", "b"} and registered["a"]["url"] == a.url

        await until_true(published)
        await store.close()


async def test_without_redis_requests_run_and_move(start_gateway: StartGateway) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    async with instances("a", "b") as (a, b), start_gateway(a, b, redis_url=nowhere) as running:
        unmoved = normal(await running.stream())
        a.script = moves_after(3, b)
        assert normal(await running.stream()) == unmoved
        assert not running.gateway.leader.is_leading
        response = await running.admin("POST", "/admin/migrate", json={"request": "x", "destination": "b"})
        assert response.status_code == 503  # It may be another gateway's, and those cannot be asked.


async def test_a_redis_that_never_answers_holds_up_no_request(start_gateway: StartGateway) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    frozen = await asyncio.start_server(swallow, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{frozen.sockets[0].getsockname()[1]}/0"
    async with instances("a") as (a,), start_gateway(a, redis_url=url) as running:
        async with asyncio.timeout(10):
            for _ in range(5):
                assert (await running.chat()).status_code == 200
    frozen.close()
    await frozen.wait_closed()


async def test_moves_are_recorded_in_redis(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = moves_after(3, b)
        await running.stream()
        request_id = a.received[0].headers["x-request-id"]
        store = running.gateway.store

        async def recorded() -> bool:
            known = any(one["request"] == request_id for one in await store.migrations(20))
            return known and await store.owner(request_id) is None

        await until_true(recorded)


async def test_what_the_leader_orders_names_its_lease(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        a.freeness_steps, a.report_changes = 10, {"requests_running": 4}
        async with start_gateway(a, b) as running:
            await until(lambda: len(a.pairings) >= 2)
            lease = running.gateway.leader.lease
            assert lease is not None
            a.freeness_steps = 300
            await until(lambda: a.pairings[-1] is None)
            assert set(a.fences) == {lease.token}


async def test_a_leader_that_an_instance_refuses_for_its_old_lease_leads_on_with_a_newer_one(
    start_gateway: StartGateway,
) -> None:
    """Redis has lost its count, and the instance remembers a higher one."""
    async with instances("a", "b") as (a, b):
        a.freeness_steps, a.report_changes = 10, {"requests_running": 4}
        async with start_gateway(a, b):
            await until(lambda: len(a.pairings) >= 1)
            a.fence += 5
            newest = a.fence
            await until(lambda: a.fence > newest)
            assert a.pairings[-1] is not None


class Slow(Executor):
    """Its orders take for ever."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def run(self, action: Action, fence: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Leases(Store):
    """Redis, as far as a leader asks it."""

    def __init__(self, lasts_s: float) -> None:
        self.lasts_s = lasts_s
        self.published = 0

    async def take_lease(self, gateway_id: str, lease_s: float, seen: int = 0) -> Lease | None:
        return Lease(gateway_id, 1, time.monotonic() + self.lasts_s)

    async def publish_snapshot(self, lease: Lease, snapshot: object, number: int) -> bool:
        self.published += 1
        return True


def leader_of(store: Store, executor: Executor, lease_s: float = 1.0) -> Leader:
    """It has somebody to move from, and somebody to move to."""
    members = Members(60.0)
    for instance_id, freeness in (("a", 1.0), ("b", 10_000.0)):
        fake = FakeInstance(instance_id, freeness_steps=freeness, report_changes={"requests_running": 4})
        card = {"id": MODEL, "root": MODEL, "parent": None}
        members.probed(Instance(instance_id, "http://x", "boot-1"), [card], True, None, time.monotonic())
        members.reported(wire.Report.from_json(fake.report()), time.monotonic())
    return Leader("g", store, members, executor, PolicySettings(), lease_s, Counters(), nothing_kept)


async def nothing_kept() -> frozenset[str]:
    return frozenset()


async def test_an_instance_that_hangs_costs_the_leader_a_share_of_its_lease_and_not_the_lease() -> None:
    store, executor = Leases(0.9), Slow()
    leader = leader_of(store, executor)
    await leader.tick()
    assert (executor.cancelled, store.published) == (1, 1)


async def test_what_a_leader_does_ends_with_its_lease_however_large_its_share_would_be() -> None:
    """A renewal that came late has left little of the lease."""
    store, executor = Leases(0.2), Slow()
    leader = leader_of(store, executor, lease_s=1e6)
    await asyncio.wait_for(leader.tick(), 30)
    assert (executor.cancelled, leader.is_leading) == (1, False)


async def test_a_lease_that_was_over_before_its_grant_was_read_orders_nothing() -> None:
    """As after SIGSTOP: the answer has waited in the socket meanwhile."""
    store, executor = Leases(-0.001), Slow()
    leader = leader_of(store, executor)
    await leader.tick()
    assert (executor.cancelled, store.published, leader.is_leading) == (0, 0, False)


class PassedOn(Leases):
    """The lease is another's by the time that anything is written in its name."""

    async def publish_snapshot(self, lease: Lease, snapshot: object, number: int) -> bool:
        return False


async def test_a_leader_whose_snapshot_is_refused_leads_no_more() -> None:
    leader = leader_of(PassedOn(0.9), Slow())
    await leader.tick()
    assert not leader.is_leading
