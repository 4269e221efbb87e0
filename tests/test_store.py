"""The cluster's state in a real Redis."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import cast

import pytest
import pytest_asyncio

from gateway.cluster import keys
from gateway.cluster.records import Records
from gateway.cluster.store import LEASE_MARGIN, Lease, Owner, Store
from gateway.counters import Counters
from gateway.errors import StoreUnavailable
from loadtest.processes import free_port
from tests.conftest import until_true


@pytest_asyncio.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store(redis_url)
    await forget_all(store)
    yield store
    await forget_all(store)
    await store.close()


async def forget_all(store: Store) -> None:
    if ours := await every_key(store):  # The server may be shared: nothing else is touched.
        await store._redis.delete(*ours)


async def every_key(store: Store) -> list[str]:
    return [key async for key in store._redis.scan_iter(keys.PREFIX + "*")]


async def test_one_holder_at_a_time_and_each_lease_has_a_higher_token(store: Store) -> None:
    first = await store.take_lease("one", 10)
    assert first is not None
    assert await store.take_lease("two", 10) is None
    renewed = await store.take_lease("one", 10)
    assert renewed is not None
    assert renewed.token == first.token
    await store.drop_lease(first)
    second = await store.take_lease("two", 10)
    assert second is not None
    assert second.token > first.token


async def test_a_lease_ends_by_itself_and_by_its_holders_own_clock(store: Store) -> None:
    before = time.monotonic()
    lease = await store.take_lease("one", 0.05)
    assert lease is not None
    kept_s = 0.05 * (1 - LEASE_MARGIN)
    assert before + kept_s <= lease.ends_at <= time.monotonic() + kept_s
    await until_true(lambda: store.take_lease("two", 10), 2)


async def test_a_late_leader_neither_publishes_nor_ends_its_successors_lease(store: Store) -> None:
    old = Lease("one", 1, time.monotonic() + 10)
    new = await store.take_lease("two", 10)
    assert new is not None
    assert not await store.publish_snapshot(old, {"by": "one"}, 1)
    await store.drop_lease(old)
    assert await store.publish_snapshot(new, {"by": "two"}, 1)
    assert await store.snapshot() == {"by": "two"}
    again = Lease("two", new.token - 1, time.monotonic() + 10)
    assert not await store.publish_snapshot(again, {"by": "an older two"}, 2)


async def test_a_snapshot_that_comes_late_replaces_none_that_is_newer(store: Store) -> None:
    """A Redis that stood still reads what two connections have sent meanwhile in any order."""
    lease = await store.take_lease("one", 10)
    assert lease is not None
    for number in (2, 1, 2, 1):
        assert await store.publish_snapshot(lease, {"number": number}, number)
        assert await store.snapshot() == {"number": 2}
    await store.drop_lease(lease)
    successor = await store.take_lease("two", 10)
    assert successor is not None
    assert await store.publish_snapshot(successor, {"number": 0}, 0)
    assert await store.snapshot() == {"number": 0}


async def test_a_redis_that_has_lost_its_count_goes_on_above_every_token_that_was_seen(store: Store) -> None:
    first = await store.take_lease("one", 10)
    assert first is not None
    await store._redis.delete(keys.LEADER, keys.LEADER_TOKEN)
    again = await store.take_lease("one", 10, seen=first.token + 6)
    assert again is not None
    assert again.token == first.token + 7
    renewed = await store.take_lease("one", 10, seen=again.token)
    assert renewed is not None
    assert renewed.token == again.token
    higher = await store.take_lease("one", 10, seen=again.token + 1)  # An instance knows of a newer lease than its own.
    assert higher is not None
    assert higher.token == again.token + 2


async def test_operators_orders_are_bounded_and_old_removals_make_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "TARGETS_MAX", 2)
    assert await store.order_target("http://a:1", added=True) == "added"
    removed = await store.order_target("http://b:1", added=False)
    assert removed is not None
    assert removed.startswith("removed:")
    assert await store.order_target("http://c:1", added=True) is None
    assert await store.order_target("http://b:1", added=True) == "added"
    await store.order_target("http://b:1", added=False)
    monkeypatch.setattr(keys, "TARGETS_REMOVED_KEPT_S", -1)
    assert await store.order_target("http://c:1", added=True) == "added"
    assert (await store.beat("g", "e")).orders == {"http://a:1": "added", "http://c:1": "added"}


async def test_the_oldest_question_goes_first_when_nobody_takes_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "CALLS_MAX", 3)
    for number in range(5):
        await store.call("g", {"n": number})
    assert [await store.next_call("g") for _ in range(3)] == [{"n": 2}, {"n": 3}, {"n": 4}]


async def test_the_registry_is_replaced_as_a_whole(store: Store) -> None:
    lease = await store.take_lease("one", 10)
    assert lease is not None
    assert await store.register(lease, {"a": {"url": "x"}, "b": {"url": "y"}})
    assert await store.register(lease, {"b": {"url": "z"}})
    assert await store.registered() == {"b": {"url": "z"}}
    assert not await store.register(Lease("two", lease.token, lease.ends_at), {"c": {"url": "x"}})
    assert await store.registered() == {"b": {"url": "z"}}
    assert await store.register(lease, {})
    assert await store.registered() == {}


async def test_owners_are_written_and_forgotten_together(store: Store) -> None:
    owner = Owner("g", "a", "m")
    await store.write_owners({"r1": owner, "r2": owner})
    await store.write_owners({"r1": None})
    assert await store.owner("r1") is None
    assert await store.owner("r2") == owner
    assert 0 < await store._redis.ttl(keys.owner("r2")) <= keys.OWNER_TTL_S


async def test_migrations_are_bounded_and_the_newest_comes_first(store: Store) -> None:
    await store.add_migrations([{"n": number} for number in range(keys.MIGRATIONS_MAX + 5)])
    await store.add_migrations([{"n": "last"}])
    assert await store.migrations(2) == [{"n": "last"}, {"n": keys.MIGRATIONS_MAX + 4}]
    assert len(await store.migrations(10 * keys.MIGRATIONS_MAX)) == keys.MIGRATIONS_MAX


async def test_every_key_expires_but_the_token_counter_and_the_operators_orders(store: Store) -> None:
    lease = await store.take_lease("one", 10)
    assert lease is not None
    await store.publish_snapshot(lease, {}, 1)
    await store.register(lease, {"a": {}})
    await store.write_owners({"r": Owner("g", "a", "m")})
    await store.add_migrations([{}])
    await store.beat("g", "e")
    await store.order_target("http://a:1", added=True)
    await store.call("g", {})
    await store.answer("c", {})
    await store.keep_response("r", "a", "b")
    kinds = {name for name in vars(keys) if name.isupper() and not name.endswith(("_MAX", "_MS", "_S"))}
    written = {name for name in kinds if any(key.startswith(getattr(keys, name)) for key in await every_key(store))}
    assert kinds - written == {
        "LIMIT",
        "LIMIT_PROBE",
        "WAITING",
        "WAITING_GATEWAYS",
    }
    lasting = {key for key in await store._redis.keys(keys.PREFIX + "*") if await store._redis.ttl(key) == -1}
    assert lasting == {keys.LEADER_TOKEN, keys.TARGETS}


async def test_a_redis_that_is_not_there_is_one_kind_of_error() -> None:
    store = Store(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreUnavailable):
        await store.take_lease("one", 1)
    with pytest.raises(StoreUnavailable):
        await store.write_owners({"r": None})
    await store.close()


async def test_records_wait_while_redis_is_gone_and_are_written_when_it_is_back(redis_url: str, store: Store) -> None:
    records = Records(Store(f"redis://127.0.0.1:{free_port()}/0"), 60, Counters())
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    records.own(one, Owner("g", "a", "m"))
    records.own(two, Owner("g", "a", "m"))
    records.migrated({"request": one, "n": 1})
    records.migrated({"request": one, "n": 2})
    await records.flush()
    records.forget(two)
    await records._store.close()
    records._store = store
    await records.flush()
    assert await store.owner(one) == Owner("g", "a", "m")
    assert await store.owner(two) is None
    assert [record["n"] for record in await store.migrations(10)] == [2, 1]


async def test_records_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cluster.records.PENDING_MAX", 3)
    counters = Counters()
    records = Records(store, 60, counters)
    for number in range(5):
        records.own(str(number), Owner("g", "a", "m"))
    assert counters.get("records_dropped") == 2


class Stuck:
    """A store that takes nothing until ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.owners: dict[str, Owner | None] = {}

    async def write_owners(self, owners: dict[str, Owner | None]) -> None:
        await self.go.wait()
        self.owners |= owners


async def test_a_request_that_is_over_before_the_next_round_is_not_written_at_all() -> None:
    store = Stuck()
    store.go.set()
    records = Records(cast(Store, store), 60, Counters())
    for request_id in ("short", "long"):
        records.own(request_id, Owner("g", "a", "m"))
    records.forget("short")
    await records.flush()
    assert store.owners == {"long": Owner("g", "a", "m")}
    records.forget("long")
    await records.flush()
    assert store.owners == {"long": None}


async def test_what_a_cancelled_round_had_begun_to_write_is_written_by_the_next() -> None:
    """A gateway that ends cancels its loops first, and flushes what is left then."""
    store = Stuck()
    records = Records(cast(Store, store), 60, Counters())
    records.own("r1", Owner("g", "a", "m"))
    flushing = asyncio.create_task(records.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.wait({flushing})
    store.go.set()
    await records.flush()
    assert store.owners == {"r1": Owner("g", "a", "m")}
