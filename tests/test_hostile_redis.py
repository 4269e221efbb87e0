"""What stands in Redis under our names, and was not written by a gateway of this version: nothing depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as redis

from gateway import wire
from gateway.cluster import keys
from gateway.cluster.limits import Limiter
from gateway.cluster.order import Ask, Entry, SharedOrder
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.policy.limits import Granted, KeyLimits, Refused
from gateway.wire import PriorityClass
from loadtest.redis_server import RedisServer
from tests.conftest import StartGateway, until, until_true
from tests.fake_instance import instances
from tests.test_replicas import knows_each_other

MODEL = "m"
BUDGET_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest_asyncio.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    """``Any``: its types allow no bytes that are no text."""
    async with redis.Redis.from_url(server.url) as client:
        await client.flushall()
        yield client


@pytest_asyncio.fixture
async def store(server: RedisServer, client: Any) -> AsyncIterator[Store]:
    store = Store(server.url)
    yield store
    await store.close()


NAMES = [
    *(keys.LEADER, keys.LEADER_TOKEN, keys.SNAPSHOT, keys.INSTANCES, keys.EPOCH, keys.GATEWAYS, keys.TARGETS),
    *(keys.MIGRATIONS, keys.RESPONSES, keys.WAITING_GATEWAYS, keys.waiting_order(MODEL), keys.waiting_details(MODEL)),
    *(keys.limit_requests("k"), keys.limit_tokens("k"), keys.limit_running("k")),
]


async def put_wrong_types(client: Any) -> None:
    async with client.pipeline(transaction=True) as pipeline:
        for name in NAMES:
            pipeline.delete(name).sadd(name, b"\xff\xfe", "not ours")
        await pipeline.execute()


async def test_a_value_of_another_type_under_one_of_our_names_goes(store: Store, client: Any) -> None:
    await put_wrong_types(client)
    lease = await store.take_lease("one", 10)
    assert lease is not None
    assert await store.publish_snapshot(lease, {}, 1)
    assert await store.register(lease, {"a": {}})
    assert (await store.beat("one", "epoch")).gateways == {"one"}
    assert await store.order_target("http://a:1", added=True) == "added"
    await store.add_migrations([{"request": "x"}])
    await store.keep_response("resp", "a", "boot")
    limits = KeyLimits(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=3)
    limiter = Limiter(store, BUDGET_S, Counters())
    place = await limiter.admit("k", limits, "r", 10)
    assert not isinstance(place, Refused)
    assert place.is_shared
    await limiter.release_and_wait(place, 5)
    await limiter.close()
    order = SharedOrder(store, "one", BUDGET_S, Counters())
    assert await order.look([Ask(MODEL, [waits("r")], [])]) is not None
    assert await order.lengths([MODEL]) == {MODEL: 1}


def waits(request_id: str, waited_s: float = 1.0) -> Entry:
    return Entry(request_id, PriorityClass.NORMAL, waited_s, 10)


@pytest.mark.parametrize("holder", ["", "one", ":", "one:x", "two:" + "9" * 40, "two:1.5"])
async def test_what_is_no_lease_keeps_nobody_from_leading(store: Store, client: Any, holder: str) -> None:
    await client.set(keys.LEADER, holder)
    assert await store.take_lease("one", 10) is not None


async def test_a_lease_without_an_end_gets_one(store: Store, client: Any) -> None:
    await client.set(keys.LEADER, "two:5")
    assert await store.take_lease("one", 0.05) is None
    await until_true(lambda: store.take_lease("one", 10))


@pytest.mark.parametrize("count", ["x", "", "007", "-3", "1.5", "9" * 19, "9" * 40, str(wire.FENCE_MAX + 1)])
async def test_what_is_no_count_of_leases_begins_anew_from_what_instances_have_seen(
    store: Store, client: Any, count: str
) -> None:
    await client.set(keys.LEADER_TOKEN, count)
    lease = await store.take_lease("one", 10, seen=41)
    assert lease is not None
    assert lease.token == 42


@pytest.mark.parametrize("owner", ["", "x", "[]", "{}", '{"gateway": 1}', "[" * 100_000, b"\xff"])
async def test_an_owner_that_cannot_be_read_is_none(store: Store, client: Any, owner: Any) -> None:
    await client.set(keys.owner("r"), owner)
    assert await store.owner("r") is None


async def test_counts_of_a_key_that_cannot_have_been_counted_go(store: Store, client: Any) -> None:
    for name in (keys.limit_requests("k"), keys.limit_tokens("k")):
        fields = {"x": "1", "1e3": "1", "9999999999": "x", "": "", "nan": "nan", "1700000000": "9" * 30}
        await client.hset(name, mapping=fields)
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=10)
    limiter = Limiter(store, BUDGET_S, Counters())
    place = await limiter.admit("k", limits, "r", 10)
    assert not isinstance(place, Refused)
    assert place.is_shared
    assert place.granted == Granted(place.granted.second, 0, 0)
    assert isinstance(await limiter.admit("k", limits, "s", 10), Refused)
    await limiter.close()


async def test_a_place_from_a_clock_that_has_been_set_back_is_not_held_for_ever(store: Store, client: Any) -> None:
    far_ahead_ms = 10**13
    await client.zadd(keys.limit_running("k"), {"gone": far_ahead_ms})
    limiter = Limiter(store, BUDGET_S, Counters())
    assert not isinstance(await limiter.admit("k", KeyLimits(concurrent_requests=1), "r", 1), Refused)
    await limiter.close()


async def test_a_gateway_from_a_clock_that_has_been_set_back_is_gone(store: Store, client: Any) -> None:
    await client.zadd(keys.GATEWAYS, {"gone": 10**13})
    assert (await store.beat("one", "epoch")).gateways == {"one"}


async def test_a_waiting_request_from_a_clock_that_has_been_set_is_told_again(store: Store, client: Any) -> None:
    order = SharedOrder(store, "one", BUDGET_S, Counters())
    await order.look([Ask(MODEL, [waits("r", 3.0)], [])])
    for step_us in (60_000_000, -60_000_000):
        await client.zincrby(keys.waiting_order(MODEL), step_us, "r")
        await client.zadd(keys.WAITING_GATEWAYS, {order.own_id: 9e14})
        lines = await order.look([Ask(MODEL, [waits("r", 3.0)], [])])
        assert lines is not None
        assert 2.9 < lines[0].entries[0].waited_s < 33


async def test_an_entry_that_cannot_be_read_is_in_nobodys_way(store: Store, client: Any) -> None:
    order = SharedOrder(store, "one", BUDGET_S, Counters())
    await order.look([Ask(MODEL, [waits("r")], [])])
    own = order.own_id
    hostile = [own, f"{own} x", f"{own} 10 more", f"{own} " + "9" * 400, "", own.encode() + b" \xff", f"{own} -1"]
    strange = [-5.0, 7e15, float("inf"), float("-inf")]
    for details, score in [*((one, 5.0) for one in hostile), *((f"{own} 10", one) for one in strange)]:
        for one in (f"{details!r} {score}".encode() + b"\xff", f"{details!r} {score}"):
            await client.zadd(keys.waiting_order(MODEL), {one: score})
            await client.hset(keys.waiting_details(MODEL), one, details)
    lines = await order.look([Ask(MODEL, [], [])])
    assert lines is not None
    assert [entry.request_id for entry in lines[0].entries] == ["r"]


async def test_who_waited_at_a_gateway_that_is_gone_counts_no_longer_than_that_lives(store: Store, client: Any) -> None:
    """Else a gateway that is killed with a full line would have the others turn everyone away."""
    gone, other, here = (SharedOrder(store, name, BUDGET_S, Counters()) for name in ("gone", "other", "here"))
    await gone.look([Ask(MODEL, [waits(f"r{number}") for number in range(600)], [])])
    assert await here.lengths([MODEL]) == {MODEL: 600}
    await other.look([Ask(MODEL, [waits("s")], [])])
    await client.zrem(keys.WAITING_GATEWAYS, gone.own_id)
    assert await here.lengths([MODEL]) == {MODEL: 1}
    await client.zrem(keys.WAITING_GATEWAYS, other.own_id)
    assert await here.lengths([MODEL]) == {MODEL: 0}


ORDERS = [
    *("file:///etc/passwd", "", "http://u:p@h:1", "gopher://x:1", "http://h:99999", "http://[::1", "http://h:1/"),
    *("x" * 100_000, b"\xff\xfe", "http://\x00:1", "http://a b:1", "HTTP://h:1", "http://@h:1"),
]


async def test_gateways_go_on_whatever_stands_in_redis(
    start_gateway: StartGateway, server: RedisServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        instances("a", "b") as (a, b),
        start_gateway(a, redis_url=server.url) as one,
        start_gateway(a, redis_url=server.url) as other,
    ):
        await knows_each_other(one, other)
        await put_wrong_types(client)
        async with client.pipeline(transaction=True) as pipeline:
            pipeline.delete(keys.TARGETS).hset(keys.TARGETS, mapping=dict.fromkeys(ORDERS, "added"))
            await pipeline.execute()
        await client.hset(keys.TARGETS, "http://127.0.0.1:1", "another version's")
        for words in (b"\xff", b"[" * 100_000, b"null", b"[]", b'{"id": 1}', b'{"id": "x", "kind": "y", "words": 3}'):
            await client.rpush(keys.calls(one.gateway.gateway_id), words)
        answer = await one.admin("POST", "/admin/instances", json={"url": b.url})
        assert answer.status_code == 200
        await until(lambda: all(len(running.gateway.members.all()) == 2 for running in (one, other)))
        await until(lambda: sum(running.gateway.leader.is_leading for running in (one, other)) == 1)
        listed = (await one.admin("GET", "/admin/instances")).json()
        assert {address["url"] for address in listed["addresses"]} == {a.url, b.url}
        assert (await other.chat()).status_code == 200
        await knows_each_other(one, other)
    assert [record for record in caplog.records if record.exc_info] == []


ANSWERS: list[Any] = [
    *(None, [], 5, {"shown": 5}, {"shown": {}}, {"shown": {"state": 1, "moves": 3}, "group": [1]}, {"shown": []}),
    *({"requests": 1, "recent": [], "running": 0}, {"requests": [1], "recent": [], "running": "x"}),
    {"cancelled": "yes"},
    *({"leading": 1, "in_flight": {}}, {"leading": True, "in_flight": {"a": -1}}, {"leading": True, "in_flight": [1]}),
]


async def test_another_gateways_answer_that_cannot_be_read_is_none(
    start_gateway: StartGateway, server: RedisServer, client: Any
) -> None:
    words: Any = None

    async def answers() -> None:
        """As a gateway of another version."""
        while True:
            await other.beat("other", "epoch")
            call: Any = await other.next_call("other")
            if call is not None:
                await told.rpush(keys.answers(call["id"]), b"\xff", "[1", '{"gateway": []}')
                await other.answer(call["id"], {"gateway": "other", "words": words})

    other, told = Store(server.url), client
    async with instances("a") as (a,), start_gateway(a, redis_url=server.url) as running:
        answering = asyncio.create_task(answers())
        await until(lambda: running.gateway.replicas.others)
        for words in ANSWERS:
            for method, path in (("GET", ""), ("GET", "/x"), ("DELETE", "/x")):
                answer = await running.admin(method, f"/admin/requests{path}")
                assert answer.status_code in (200, 404), (words, answer.text)
                assert answer.json().get("complete") is not True
            assert (await running.admin("GET", "/admin/instances")).json()["complete"] is False, words
        order = {"request": "x", "destination": "a"}
        assert (await running.admin("POST", "/admin/migrate", json=order)).status_code == 404
        answering.cancel()
        await asyncio.wait({answering})
    await other.close()
