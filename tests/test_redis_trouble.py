"""Redis slow, frozen, emptied, failed over, refusing writes, gone: streams and requests go on, and all is well soon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import redis.asyncio as redis

from loadtest.redis_server import RedisServer
from tests.conftest import Running, StartGateway, chat_body, until, until_true
from tests.cutting_proxy import CuttingProxy
from tests.fake_instance import Exchange, FakeInstance, Generation, generate, instances
from tests.test_replicas import knows_each_other
from tests.test_stored_responses import stores

TOKENS = 40
REQUESTS = 15
LINES_MAX = 15
"""Of one gateway, however long the trouble lasts and however many requests come meanwhile."""
RECOVERY_S = 60.0
"""Counted in looks: a machine that stands still recovers nothing. What it took is printed."""


@pytest.fixture
def own_redis(tmp_path: Any) -> Iterator[RedisServer]:
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        yield server


def port_of(server: RedisServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


@contextlib.asynccontextmanager
async def frozen(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    """As under ``docker pause``: connections stay open, and nothing answers."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def gone(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    proxy.refusing = True
    proxy.cut()
    yield
    proxy.refusing = False


@contextlib.asynccontextmanager
async def swallowed(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    """Packets are dropped, and nobody is told."""
    proxy.passes.clear()
    yield
    proxy.cut()
    proxy.passes.set()


@contextlib.asynccontextmanager
async def deaf(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    """It hears the gateways and does what they say, and they do not hear it."""
    proxy.answers_pass.clear()
    yield
    proxy.cut()
    proxy.answers_pass.set()


@contextlib.asynccontextmanager
async def slow(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    """Every answer comes, later than a request may wait for it."""
    proxy.answers_late_s = 0.4
    yield
    proxy.answers_late_s = 0.0


@contextlib.asynccontextmanager
async def emptied(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    """Restarted without its data, faster than anybody looks."""
    async with redis.Redis.from_url(server.url) as client:
        await client.flushall()
    proxy.cut()
    yield


@contextlib.asynccontextmanager
async def full(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    async with redis.Redis.from_url(server.url) as client:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", "1")
        yield
        await client.config_set("maxmemory", "0")


@contextlib.asynccontextmanager
async def failed_over(server: RedisServer, proxy: CuttingProxy) -> AsyncIterator[None]:
    """The old one is a replica now, and keeps its connections; its name leads to another one, which is empty."""
    with RedisServer(environment={"PATH": os.environ["PATH"]}) as successor:
        proxy.target_port = port_of(successor)
        async with redis.Redis.from_url(server.url) as client:
            await cast(Awaitable[Any], client.replicaof("127.0.0.1", port_of(successor)))
        yield
        await until_true(lambda: found_at(successor), RECOVERY_S)
        proxy.target_port = port_of(server)
        async with redis.Redis.from_url(server.url) as client:
            await cast(Awaitable[Any], client.replicaof("NO", "ONE"))
    proxy.cut()


async def found_at(server: RedisServer) -> bool:
    async with redis.Redis.from_url(server.url) as client:
        return bool(await client.exists("kvferry:leader"))


class Slowly:
    """A stream that sends a token whenever it is told to."""

    def __init__(self, instance: FakeInstance) -> None:
        self.tokens: asyncio.Queue[None] = asyncio.Queue()
        instance.script = self.script

    async def script(self, exchange: Exchange) -> None:
        if exchange.request.json.get("max_tokens") != TOKENS:
            await (stores if exchange.request.path == "/v1/responses" else generate)(exchange)
            return
        generation = Generation(exchange.request)
        await exchange.start()
        await exchange.send(generation.role())
        for index in range(TOKENS):
            await self.tokens.get()
            await exchange.send(generation.token(index))
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.finish()

    def say(self, tokens: int) -> None:
        for _ in range(tokens):
            self.tokens.put_nowait(None)


def is_said(record: logging.LogRecord) -> bool:
    """Not the line that every request gets."""
    return not record.getMessage().startswith("access ")


async def is_whole(one: Running, other: Running, request_id: str, instance_ids: set[str]) -> bool:
    """What a fresh start would build is in Redis, and each gateway follows it."""
    store = one.gateway.store
    leaders = [running.gateway.leader for running in (one, other)]
    if sum(leader.is_leading for leader in leaders) != 1 or not one.gateway.limiter.is_shared:
        return False
    listed = (await other.admin("GET", "/admin/requests")).json()
    snapshot, registered, owner = await store.snapshot(), await store.registered(), await store.owner(request_id)
    return (
        listed["complete"] is True
        and [request["id"] for request in listed["requests"]] == [request_id]
        and snapshot is not None
        and {report["instance_id"] for report in snapshot["reports"]} == set(registered) == instance_ids
        and owner is not None
        and owner.gateway_id == one.gateway.gateway_id
        and all({one.instance.instance_id for one in r.gateway.members.all()} == instance_ids for r in (one, other))
    )


@pytest.mark.parametrize("trouble", [frozen, gone, swallowed, deaf, slow, emptied, full, failed_over])
@pytest.mark.slow
async def test_streams_and_requests_go_on_and_everything_is_back_soon_after(
    trouble: Any,
    start_gateway: StartGateway,
    own_redis: RedisServer,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F22: with stored responses and a stream under way; limits of keys are in test_limits.py."""
    caplog.set_level(logging.INFO)
    async with (
        CuttingProxy(port_of(own_redis)).running() as proxy,
        instances("a", "b") as (a, b),
        start_gateway(a, redis_url=f"redis://127.0.0.1:{proxy.port}/0") as one,
        start_gateway(a, redis_url=f"redis://127.0.0.1:{proxy.port}/0") as other,
    ):
        stream = Slowly(a)
        await one.admin("POST", "/admin/instances", json={"url": b.url})
        await knows_each_other(one, other)
        streaming = asyncio.create_task(one.stream(max_tokens=TOKENS))
        request_id = (await a.exchange()).request.headers["x-request-id"]
        stream.say(5)
        await until_true(lambda: is_whole(one, other, request_id, {"a", "b"}), RECOVERY_S)
        caplog.clear()
        async with trouble(own_redis, proxy):
            began_at, waits_s = time.monotonic(), []
            for number in range(REQUESTS):
                stream.say(1)
                asked_at = time.monotonic()
                path = "/v1/responses" if number % 3 == 2 else "/v1/chat/completions"
                body = {"model": "kvferry-test", "input": "x"} if number % 3 == 2 else chat_body()
                assert (await (one, other)[number % 2].client.post(path, json=body)).status_code == 200
                waits_s.append(time.monotonic() - asked_at)
                await asyncio.sleep(0.1)
        ended_at = time.monotonic()
        await until_true(lambda: is_whole(one, other, request_id, {"a", "b"}), RECOVERY_S)
        lines = [record.getMessage() for record in caplog.records if record.name == "kvferry" and is_said(record)]
        with capsys.disabled():
            print(
                f"\n{trouble.__name__}: {ended_at - began_at:.1f} s, longest requests "
                f"{[round(wait_s * 1000) for wait_s in sorted(waits_s)[-3:]]} ms, median "
                f"{sorted(waits_s)[REQUESTS // 2] * 1000:.0f} ms, whole after {time.monotonic() - ended_at:.1f} s, "
                f"{len(lines)} log lines of two gateways"
            )
        assert len(lines) <= 2 * LINES_MAX, "\n".join(lines)
        stream.say(TOKENS)
        whole = await streaming
        assert whole.count(b'"content":" w') == TOKENS
        assert whole.endswith(b"data: [DONE]\n\n")
        await until(lambda: not one.gateway.sessions.live())


async def test_a_response_costs_one_budget_when_redis_stops_and_then_none(
    start_gateway: StartGateway, own_redis: RedisServer
) -> None:
    """Counted by who waits: after the first one nobody does, until Redis answers again."""
    async with instances("a") as (a,), start_gateway(a, redis_url=own_redis.url) as running:
        a.script = stores
        breaker = running.gateway.stored._breaker
        assert own_redis.process is not None
        async with frozen(own_redis, CuttingProxy(0)):
            response = await running.client.post("/v1/responses", json={"model": "kvferry-test", "input": "x"})
            assert response.status_code == 200
            assert breaker.is_open
            never = asyncio.get_running_loop().create_future()
            assert await breaker.answered(never) is False  # Without a turn of the loop.
            assert (await running.client.get("/v1/responses/resp_0")).status_code == 503
        await until(lambda: not breaker.is_open, RECOVERY_S)
        await until(lambda: not running.gateway.stored._writing, RECOVERY_S)
        assert (await running.client.get("/v1/responses/resp_0")).status_code == 404


async def test_no_command_looks_through_the_keys_and_none_waits_for_a_request(
    start_gateway: StartGateway, own_redis: RedisServer
) -> None:
    """All that Redis is asked while requests of every kind run, as it tells it itself."""
    seen: list[str] = []

    async def watch(client: redis.Redis) -> None:
        async with client.monitor() as monitor:
            while True:
                seen.append((await monitor.next_command())["command"])

    async with instances("a") as (a,), redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        async with start_gateway(a, redis_url=own_redis.url) as running:
            watching = asyncio.create_task(watch(client))
            await until(lambda: any("BLPOP" in command for command in seen))
            for _ in range(10):
                await running.chat()
            await running.admin("GET", "/admin/requests")
            await running.admin("GET", "/admin/requests/unknown")
            a.script = stores
            await running.client.post("/v1/responses", json={"model": "kvferry-test", "input": "x"})
            await until(lambda: any("responses" in command for command in seen))
        watching.cancel()
        await asyncio.wait({watching})
        words = {command.split(" ", 1)[0].upper() for command in seen}
        allowed = {"EVAL", "BLPOP", "GET", "SET", "DEL", "HGET", "HGETALL", "MULTI", "EXEC", "LPUSH", "LTRIM", "EXPIRE"}
        inside = {"TIME", "INCR", "PEXPIRE", "HMGET", "HSET", "ZADD", "ZREMRANGEBYSCORE", "ZREVRANGE", "ZCARD", "RPUSH"}
        quiet = {"HELLO", "CLIENT", "SELECT", "MONITOR", "ZREM", "OK", "TYPE", "PTTL"}
        assert words <= allowed | inside | quiet, words - allowed - inside - quiet


async def test_nothing_stays_in_redis_of_requests_that_are_over(
    start_gateway: StartGateway, own_redis: RedisServer
) -> None:
    async with instances("a") as (a,), redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        async with start_gateway(a, redis_url=own_redis.url) as one, start_gateway(a, redis_url=own_redis.url) as other:
            await knows_each_other(one, other)

            async def names() -> set[str]:
                return {key async for key in client.scan_iter()}

            await until_true(lambda: holds(names, "kvferry:instances"))
            before = await names()
            for _ in range(20):
                await one.chat()
                await other.admin("GET", "/admin/requests/unknown")

            async def as_before() -> bool:
                return await names() == before

            await until_true(as_before)
        lasting = {key for key in await names() if await client.ttl(key) == -1}
        assert lasting == {"kvferry:leader:token"}


async def holds(names: Any, name: str) -> bool:
    return name in await names()
