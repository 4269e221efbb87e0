"""The limits of keys in a real Redis, as several gateways see them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.cluster import keys
from gateway.cluster.limits import Limiter, Place
from gateway.cluster.store import Store
from gateway.counters import Counters
from gateway.policy.limits import KeyLimits, Refused
from loadtest.processes import free_port
from loadtest.redis_server import RedisServer
from tests.conftest import until_true

PATIENCE_S = 20.0
"""The budget where Redis is to decide, however slow the machine is."""


@contextlib.asynccontextmanager
async def gateways(redis_url: str, count: int, budget_s: float = PATIENCE_S) -> AsyncIterator[list[Limiter]]:
    stores = [Store(redis_url) for _ in range(count)]
    limiters = [Limiter(store, budget_s, Counters()) for store in stores]
    try:
        yield limiters
    finally:
        for limiter, store in zip(limiters, stores, strict=True):
            await limiter.close()
            await store.close()


def new_id() -> str:
    return uuid.uuid4().hex


async def all_at_once(limiters: list[Limiter], limits: KeyLimits, tokens: int = 0, count: int = 100) -> list[Place]:
    name = new_id()
    asked = (limiters[n % len(limiters)].admit(name, limits, new_id(), tokens) for n in range(count))
    return [place for place in await asyncio.gather(*asked) if isinstance(place, Place)]


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may stop: never the one that others use."""
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        yield server


@contextlib.contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        (KeyLimits(requests_per_minute=10), 0),
        (KeyLimits(concurrent_requests=10), 0),
        (KeyLimits(tokens_per_minute=109), 10),
        (KeyLimits(requests_per_minute=50, tokens_per_minute=1000, concurrent_requests=10), 10),
    ],
)
async def test_several_gateways_let_in_exactly_what_a_key_may(limits: KeyLimits, tokens: int, redis_url: str) -> None:
    async with gateways(redis_url, 4) as limiters:
        assert len(await all_at_once(limiters, limits, tokens)) == 10
        assert all(limiter.is_shared for limiter in limiters)


async def test_who_is_refused_for_one_limit_uses_nothing_of_another(redis_url: str) -> None:
    async with gateways(redis_url, 2) as (one, two):
        name, limits = new_id(), KeyLimits(requests_per_minute=2, tokens_per_minute=100, concurrent_requests=1)
        first = await one.admit(name, limits, new_id(), 10)
        assert isinstance(first, Place)
        for _ in range(5):
            assert await two.admit(name, limits, new_id(), 10) == Refused("concurrent_requests", 1)
        await one.release_and_wait(first, 10)
        refused = await two.admit(name, limits, new_id(), 95)
        assert isinstance(refused, Refused)
        assert refused.limit == "tokens_per_minute"
        third = await two.admit(name, limits, new_id(), 90)
        assert isinstance(third, Place)
        assert (third.granted.requests_left, third.granted.tokens_left) == (0, 0)


async def test_a_place_that_was_given_back_is_free_at_the_next_gateway_at_once(redis_url: str) -> None:
    async with gateways(redis_url, 2) as (one, two):
        name, limits = new_id(), KeyLimits(concurrent_requests=1)
        for number in range(50):
            here = one if number % 2 else two
            place = await here.admit(name, limits, new_id(), 0)
            assert isinstance(place, Place), number
            await here.release_and_wait(place, 0)
            assert here.release(place, 0) is None


async def test_what_was_not_used_comes_back_once(redis_url: str) -> None:
    async with gateways(redis_url, 2) as (one, two):
        name, limits = new_id(), KeyLimits(tokens_per_minute=100)
        place = await one.admit(name, limits, new_id(), 100)
        assert isinstance(place, Place)
        assert isinstance(await two.admit(name, limits, new_id(), 50), Refused)
        await one.release_and_wait(place, 40)
        await one.release_and_wait(place, 40)
        another = await two.admit(name, limits, new_id(), 50)
        assert isinstance(another, Place)
        assert another.granted.tokens_left == 10
        await two.release_and_wait(another, 400)  # More than was thought: it counts as well.
        assert isinstance(await one.admit(name, limits, new_id(), 1), Refused)


async def test_a_call_that_is_sent_twice_counts_once(redis_url: str) -> None:
    async with gateways(redis_url, 1) as (one,):
        name, limits = new_id(), KeyLimits(requests_per_minute=2, tokens_per_minute=100)
        twice = new_id()
        for _ in range(2):
            place = await one.admit(name, limits, twice, 30)
            assert isinstance(place, Place)
            assert (place.granted.requests_left, place.granted.tokens_left) == (1, 70)


async def test_a_release_that_is_sent_twice_corrects_once(redis_url: str) -> None:
    async with gateways(redis_url, 1) as (one,):
        name, limits = new_id(), KeyLimits(tokens_per_minute=100)
        place = await one.admit(name, limits, new_id(), 60)
        assert isinstance(place, Place)
        for _ in range(2):
            await one._put_release(name, place.request_id, place.granted.second, -40)
        another = await one.admit(name, limits, new_id(), 0)
        assert isinstance(another, Place)
        assert another.granted.tokens_left == 80


async def test_the_places_of_a_gateway_that_has_died_lapse_and_those_of_a_living_one_do_not(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cluster.limits.PLACE_MS", "1500")
    monkeypatch.setattr(keys, "LIMIT_PLACE_RENEWAL_S", 0.0)
    limits = KeyLimits(concurrent_requests=1)
    async with gateways(redis_url, 3) as (dead, living, other):
        lost, held = new_id(), new_id()
        assert isinstance(await dead.admit(lost, limits, new_id(), 0), Place)
        place = await living.admit(held, limits, new_id(), 0)
        assert isinstance(place, Place)

        async def lapsed() -> bool:
            await living.tick()
            assert isinstance(await other.admit(held, limits, new_id(), 0), Refused)
            return isinstance(await other.admit(lost, limits, new_id(), 0), Place)

        await until_true(lapsed, 20)
        await living.release_and_wait(place, 0)
        assert isinstance(await other.admit(held, limits, new_id(), 0), Place)


async def test_a_count_that_redis_loses_while_requests_run_is_right_again_and_never_negative(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F52: one that only went up and down would be below nothing from then on, and let everything in."""
    monkeypatch.setattr(keys, "LIMIT_PLACE_RENEWAL_S", 0.0)
    limits, name = KeyLimits(concurrent_requests=5), new_id()
    async with gateways(redis_url, 2) as (one, other):
        places = [place for _ in range(5) if isinstance(place := await one.admit(name, limits, new_id(), 0), Place)]
        await other._store._redis.delete(keys.limit_running(name))
        await one.release_and_wait(places.pop(), 0)

        async def right_again() -> bool:
            await one.tick()
            return bool(await other._store._redis.zcard(keys.limit_running(name)) == 4)

        await until_true(right_again, 20)
        assert isinstance(await other.admit(name, limits, new_id(), 0), Place)
        assert isinstance(await other.admit(name, limits, new_id(), 0), Refused)
        for place in places:
            await one.release_and_wait(place, 0)
        assert await other._store._redis.zcard(keys.limit_running(name)) == 1


async def test_a_client_that_leaves_while_redis_is_asked_leaves_no_place_behind(redis_url: str) -> None:
    async with gateways(redis_url, 2) as (one, two):
        name, limits = new_id(), KeyLimits(concurrent_requests=1)
        asking = asyncio.create_task(one.admit(name, limits, new_id(), 0))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

        async def is_free() -> bool:
            return isinstance(await two.admit(name, limits, new_id(), 0), Place)

        await until_true(is_free)


async def test_a_clock_that_is_set_back_locks_no_key_out(redis_url: str) -> None:
    async with gateways(redis_url, 1) as (one,):
        name, limits = new_id(), KeyLimits(requests_per_minute=1)
        await one._store._redis.hset(keys.limit_requests(name), str(int(time.time()) + 3600), "5")
        assert isinstance(await one.admit(name, limits, new_id(), 0), Place)
        assert await one._store._redis.hlen(keys.limit_requests(name)) == 1


async def test_everything_about_a_key_expires(redis_url: str) -> None:
    async with gateways(redis_url, 1) as (one,):
        limits = KeyLimits(requests_per_minute=5, tokens_per_minute=5, concurrent_requests=5)
        name = new_id()
        place = await one.admit(name, limits, new_id(), 1)
        for key in (keys.limit_requests(name), keys.limit_tokens(name), keys.limit_running(name)):
            assert 0 < await one._store._redis.ttl(key) <= keys.LIMIT_WINDOW_TTL_S, key
        assert isinstance(place, Place)


async def test_with_redis_frozen_no_request_fails_and_one_budget_is_waited_at_most(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvferry")
    limits = KeyLimits(requests_per_minute=10)
    async with gateways(own_redis.url, 1, budget_s=1.0) as (one,):
        name = new_id()
        for _ in range(4):
            assert isinstance(await one.admit(name, limits, new_id(), 0), Place)
        assert await back(one)
        with frozen(own_redis):
            admitted = 4
            for _ in range(200):  # Were each to wait for the budget, this would take minutes.
                admitted += isinstance(await one.admit(name, limits, new_id(), 0), Place)
            assert admitted == 10  # By itself it knows what it has let in before.
            assert not one.is_shared
            await one.tick()
        await until_true(lambda: back(one), 20)
        states = [record.getMessage().split()[0] for record in caplog.records]
        assert states == ["limits_alone", "limits_shared"]


async def back(limiter: Limiter) -> bool:
    await limiter.tick()
    return limiter.is_shared


def stand_still() -> None:
    time.sleep(0.03)


async def test_a_gateway_that_is_busy_itself_does_not_take_redis_for_slow(redis_url: str) -> None:
    async def be_busy() -> None:
        while True:
            stand_still()
            await asyncio.sleep(0)

    async with gateways(redis_url, 1, budget_s=0.05) as (one,):
        busy = asyncio.create_task(be_busy())
        place = await one.admit(new_id(), KeyLimits(requests_per_minute=1), new_id(), 0)
        busy.cancel()
        assert isinstance(place, Place)
        assert place.is_shared


async def test_what_ran_while_redis_was_away_counts_when_it_is_back(own_redis: RedisServer) -> None:
    limits = KeyLimits(concurrent_requests=3)
    async with gateways(own_redis.url, 2, budget_s=1.0) as (one, two):
        name = new_id()
        before = await one.admit(name, limits, new_id(), 0)
        assert isinstance(before, Place)
        with frozen(own_redis):
            during = [await one.admit(name, limits, new_id(), 0) for _ in range(3)]
            assert [isinstance(place, Place) for place in during] == [True, True, False]
            one.release(before, 0)
        await until_true(lambda: back(one), 20)
        await until_true(lambda: back(two), 20)
        places = [await two.admit(name, limits, new_id(), 0) for _ in range(2)]
        assert [isinstance(place, Place) for place in places] == [True, False]
        for place in during[:2]:
            assert isinstance(place, Place)
            await one.release_and_wait(place, 0)
        assert isinstance(await two.admit(name, limits, new_id(), 0), Place)


async def test_without_redis_each_gateway_applies_the_limits_by_itself() -> None:
    async with gateways(f"redis://127.0.0.1:{free_port()}/0", 2) as limiters:
        places = await all_at_once(limiters, KeyLimits(requests_per_minute=10))
        assert len(places) == 20
        assert not any(limiter.is_shared for limiter in limiters)


async def test_a_redis_that_refuses_writes_is_as_good_as_none(own_redis: RedisServer) -> None:
    async with gateways(own_redis.url, 1) as (one,):
        name, limits = new_id(), KeyLimits(requests_per_minute=1)
        await one._store._redis.replicaof("127.0.0.1", str(free_port()))
        assert isinstance(await one.admit(name, limits, new_id(), 0), Place)
        assert isinstance(await one.admit(name, limits, new_id(), 0), Refused)
        assert not await back(one)
        await one._store._redis.replicaof("NO", "ONE")
        await until_true(lambda: back(one), 20)


async def test_releases_that_redis_cannot_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cluster.limits.RELEASES_MAX", 5)
    async with gateways(f"redis://127.0.0.1:{free_port()}/0", 1) as (one,):
        for _ in range(20):
            place = await one.admit("k", KeyLimits(concurrent_requests=1), new_id(), 0)
            assert isinstance(place, Place)
            one.release(place, 0)
            assert len(one._queue) <= 5 + 1
        assert not one._places
        await one.tick()
        assert len(one._queue) <= 5
