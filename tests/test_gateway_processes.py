"""Gateways as processes: one that is killed or stopped, and clocks that are set."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cluster import keys
from gateway.cluster.store import Store
from loadtest.redis_server import RedisServer
from tests.conftest import chat_body, until, until_true
from tests.fake_instance import instances
from tests.gateway_processes import TAKES_OVER_IN_S, gateways, leader_of
from tests.scripts import gone, starts_and_waits

pytestmark = [pytest.mark.slow]


@pytest.fixture
def own_redis(tmp_path: Path) -> Any:
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        yield server


async def test_another_leads_soon_after_a_kill_or_a_stop_and_a_thawed_leader_changes_nothing(
    own_redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F55, F56: with a pairing to keep up, a stream at the one that is killed, and wall clocks a minute apart."""
    async with instances("a", "b") as (a, b):
        a.freeness_steps, a.report_changes = 10, {"requests_running": 4}
        b.script = starts_and_waits
        async with gateways(3, own_redis.url, tmp_path, [a.url, b.url]) as processes:
            for index, step in enumerate((-60, 60, 0)):
                (tmp_path / f"clock-{index}").write_text(str(step))
            first = await leader_of(processes)
            await until(lambda: len(a.pairings) > 2, TAKES_OVER_IN_S)
            told = a.fence

            first.stop()
            stopped_at = time.monotonic()
            second = await leader_of([one for one in processes if one is not first])
            stop_s = time.monotonic() - stopped_at
            await until(lambda: a.fence > told, TAKES_OVER_IN_S)
            obeyed = a.fence
            seen = len(a.fences)
            first.thaw()
            await until(lambda: len(a.fences) > seen + 5, TAKES_OVER_IN_S)
            assert a.fence == obeyed
            assert not await first.leads()

            async with second.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as stream:
                request_id = stream.headers["x-kvferry-request-id"]
                store = Store(own_redis.url)

                async def owned() -> bool:
                    return await store.owner(request_id) is not None

                await until_true(owned)
                second.kill()
                killed_at = time.monotonic()
                with pytest.raises(httpx.TransportError):
                    await stream.aread()
            await leader_of([one for one in processes if one is not second])
            kill_s = time.monotonic() - killed_at
            await until(lambda: a.fence > obeyed, TAKES_OVER_IN_S)
            await gone(*b.exchanges)
            living = [one for one in processes if one is not second]
            for index in range(3):
                (tmp_path / f"clock-{index}").write_text("3600")
            for one in living:
                assert (await one.client.get("/health")).status_code == 200
                shown = (await one.admin("GET", "/admin/instances"))["instances"]
                assert [(each["healthy"], each["in_flight"]) for each in shown] == [(True, 0), (True, 0)]

            async def only_the_living() -> bool:
                listed = await living[0].admin("GET", "/admin/requests")
                return len(listed["gateways"]) == 2 and listed["complete"] is True and not listed["requests"]

            await until_true(only_the_living, TAKES_OVER_IN_S)
            assert 0 < await store._redis.ttl(keys.owner(request_id)) <= keys.OWNER_TTL_S
            await store.close()
            with capsys.disabled():
                print(f"\nanother leads {stop_s:.1f} s after SIGSTOP and {kill_s:.1f} s after SIGKILL of the leader")


def test_no_wall_clock_is_read_where_it_could_decide_anything() -> None:
    """F56. What people set is good for people alone."""
    allowed = {"serving/session.py", "dashboard/journal.py"}  # When something happened, for people to read.
    package = Path(sys.modules["gateway"].__file__ or "").parent
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("time.time()", "datetime.now", "datetime.utcnow"))
    }
    assert users == allowed
