"""A gateway, Redis and an instance are lost in turn under streams that move about: all other streams are whole."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from gateway.cluster import keys
from gateway.cluster.store import Store
from loadtest.fake_vllm.application import Site
from loadtest.fake_vllm.server import FakeServers, Options
from loadtest.processes import ManagedProcess
from loadtest.redis_server import RedisServer
from loadtest.sim.engine import EngineSettings
from loadtest.sim.profile import FAST
from tests.conftest import until, until_true
from tests.fake_instance import MODEL, SECRET
from tests.fake_streams import FakeStream
from tests.gateway_processes import TAKES_OVER_IN_S, Process, gateways, leader_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACE = FAST.faster(0.02)
"""100 ms a token."""
QUICK = FAST.faster(20)
STREAMS = 14
"""On four instances three or four on each: what one of four gives away makes another one the fuller."""
TOKENS = 600
ENGINE = EngineSettings(blocks_total=8_000, batch_max=64)
BETWEEN_THREE_AND_FOUR_STEPS = "36000"


class Cluster:
    """What the faults happen to."""

    def __init__(self, servers: FakeServers, living: list[Process]) -> None:
        self.servers = servers
        self.living = living
        self.streams: list[FakeStream] = []
        self._numbers = iter(range(1 << 20))
        self.times: list[str] = []

    @property
    def going(self) -> list[FakeStream]:
        return [stream for stream in self.streams if not stream.reading.done()]

    def moved(self) -> int:
        return sum(site.llumlet.migrations_ended.committed for site in self.servers.sites)

    async def fill(self, through: Sequence[Process], tokens: int = 3) -> None:
        """As many streams as are meant to be under way, each at work."""
        for index in range(STREAMS - len(self.going)):
            client = through[index % len(through)].client
            self.streams.append(FakeStream(client, next(self._numbers), TOKENS))
        await until(lambda: all(stream.tokens >= tokens for stream in self.going), TAKES_OVER_IN_S)

    async def go_on(self, streams: Sequence[FakeStream], tokens: int = 3) -> None:
        before = [(stream, stream.tokens) for stream in streams]
        await until(
            lambda: all(stream.tokens >= count + tokens or stream.reading.done() for stream, count in before),
            TAKES_OVER_IN_S,
        )

    async def moves_go_on(self) -> None:
        before = self.moved()
        await until(lambda: self.moved() > before, TAKES_OVER_IN_S)

    def timer(self) -> Callable[[str], None]:
        begun = time.monotonic()
        return lambda what: self.times.append(f"{what} {time.monotonic() - begun:.1f} s")


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        yield server


def held(site: Site) -> set[str]:
    return {reply.request_id for reply in site.instance.replies()}


def is_empty(site: Site) -> bool:
    """A copy may still be on its way for a request that has ended; and then it is given up."""
    engine, arrivals = site.instance.engine, site.llumlet.arrivals
    return engine.is_empty and engine.transfers == 0 and arrivals.copying() == 0


async def lose_the_leader(cluster: Cluster) -> None:
    leader = await leader_of(cluster.living)
    cluster.living.remove(leader)
    lost = [stream for stream in cluster.going if stream.client is leader.client]
    assert lost
    say = cluster.timer()
    leader.kill()
    ended = await asyncio.gather(*(stream.reading for stream in lost), return_exceptions=True)
    assert all(isinstance(error, httpx.TransportError) for error in ended), ended
    cluster.streams = [stream for stream in cluster.streams if stream not in lost]
    lost_ids = {stream.request_id for stream in lost}
    await until(lambda: not any(held(site) & lost_ids for site in cluster.servers.sites), TAKES_OVER_IN_S)
    say("killed leader: its requests are off the instances after")
    await leader_of(cluster.living)
    say("another leads after")
    await cluster.fill(cluster.living)
    await cluster.moves_go_on()
    say("and moves, with new streams, after")


async def stop_one(cluster: Cluster) -> None:
    await cluster.fill(cluster.living)
    leader = await leader_of(cluster.living)
    (stopped,) = [one for one in cluster.living if one is not leader]
    mine = [stream for stream in cluster.going if stream.client is stopped.client]
    others = [stream for stream in cluster.going if stream not in mine]
    assert mine
    stopped.stop()
    try:
        await cluster.go_on(others, 20)
    finally:
        stopped.thaw()
    say = cluster.timer()
    await cluster.go_on(mine)
    say("stopped gateway: its streams go on after")
    await cluster.moves_go_on()
    say("and requests move after")


async def lose_redis(cluster: Cluster, server: RedisServer, log: Path) -> None:
    await cluster.fill(cluster.living)
    lost = server.process
    assert lost is not None
    os.kill(lost.pid, signal.SIGKILL)
    lost.end()
    await cluster.go_on(cluster.going, 10)
    for number, one in enumerate(cluster.living):
        assert await FakeStream(one.client, 10_000 + number, 2).equals_its_twin()
    server.process = ManagedProcess("redis", lost.command, log=log)
    say = cluster.timer()
    await leader_of(cluster.living)
    say("killed Redis, back and empty: one leads after")
    await cluster.moves_go_on()
    say("and requests move after")


async def lose_an_instance(cluster: Cluster) -> Site:
    await cluster.fill(cluster.living)
    site = max(cluster.servers.sites, key=lambda one: len(held(one)))
    theirs = [stream for stream in cluster.going if stream.request_id in held(site)]
    assert theirs
    say = cluster.timer()
    site.instance.set_faults({"die_at_step": 0})
    await cluster.go_on(theirs)
    say(f"killed instance: its {len(theirs)} streams go on after")
    return site


async def is_clean(one: Process) -> bool:
    listed = await one.admin("GET", "/admin/requests")
    shown = (await one.admin("GET", "/admin/instances"))["instances"]
    return listed["complete"] is True and not listed["requests"] and not any(each["in_flight"] for each in shown)


async def test_whatever_is_lost_or_stops_the_streams_of_the_other_gateways_are_whole_and_nothing_stays_behind(
    own_redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(models=(MODEL,), secret=SECRET, instance_ids="f", engine=ENGINE, profile=PACE)
    thresholds = {
        "KVFERRY_POLICY": "llumnix",  # Requests are to move on and on, and to make the next one full.
        "KVFERRY_LOW_FREENESS_STEPS": BETWEEN_THREE_AND_FOUR_STEPS,
        "KVFERRY_HIGH_FREENESS_STEPS": BETWEEN_THREE_AND_FOUR_STEPS,
    }
    async with (
        FakeServers(options, [0] * 4) as servers,
        gateways(3, own_redis.url, tmp_path, servers.urls, **thresholds) as processes,
    ):
        cluster = Cluster(servers, list(processes))
        await cluster.fill(processes)
        await cluster.moves_go_on()
        await lose_the_leader(cluster)
        await stop_one(cluster)
        await lose_redis(cluster, own_redis, tmp_path / "redis.log")
        dead = await lose_an_instance(cluster)
        for site in servers.sites:
            site.instance.engine.profile = QUICK
        assert [stream for stream in cluster.streams if not await stream.equals_its_twin()] == []
        others = [site for site in servers.sites if site is not dead]
        await until(lambda: all(is_empty(site) for site in others), TAKES_OVER_IN_S)
        for site in others:
            site.instance.engine.check()
        for one in cluster.living:
            await until_true(lambda one=one: is_clean(one), TAKES_OVER_IN_S)  # type: ignore[misc]
        store = Store(own_redis.url)
        assert await store._redis.zcard(keys.waiting_order(MODEL)) == 0
        await store.close()
        with capsys.disabled():
            print(f"\n{len(cluster.streams)} streams whole, {cluster.moved()} moves; " + "; ".join(cluster.times))
