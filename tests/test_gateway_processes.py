"""Gateways as processes: one that is killed or stopped, and clocks that are set."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cluster import keys
from gateway.cluster.store import Store
from loadtest.processes import ManagedProcess, free_port
from loadtest.redis_server import RedisServer
from tests.conftest import ADMIN_KEY, chat_body, http_client, until, until_true
from tests.fake_instance import SECRET, FakeInstance, instances
from tests.scripts import gone, starts_and_waits

pytestmark = [pytest.mark.slow]

STARTS_IN_S = 120.0
TAKES_OVER_IN_S = 60.0
"""Counted in looks; what it took is printed. The lease's length says how long it takes on a machine that keeps up."""

# Python runs this at its start. The wall clock is what the file says it is, from one moment to the next.
STEPPED_CLOCK = """
import os, time
_real, _file = time.time, os.environ["TEST_CLOCK"]
def _stepped():
    try:
        with open(_file) as step:
            return _real() + float(step.read() or 0)
    except (OSError, ValueError):
        return _real()
time.time = _stepped
"""


@dataclass(frozen=True, slots=True)
class Process:
    process: ManagedProcess
    client: httpx.AsyncClient

    async def admin(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return (await self.client.request(method, path, headers=headers, **arguments)).json()

    async def leads(self) -> bool:
        return (await self.admin("GET", "/admin/instances"))["leading"] is True

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def gateways(count: int, redis_url: str, directory: Path, *fakes: FakeInstance) -> AsyncIterator[list[Process]]:
    """The wall clock of each is stepped by what stands in ``clock-<number>``, in seconds."""
    (directory / "site").mkdir(exist_ok=True)
    (directory / "site" / "sitecustomize.py").write_text(STEPPED_CLOCK)
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for index in range(count):
            port = free_port()
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(directory / "site"), str(Path.cwd())]),
                "TEST_CLOCK": str(directory / f"clock-{index}"),
                "KVFERRY_SECRET": SECRET,
                "KVFERRY_INSTANCES": ",".join(fake.url for fake in fakes),
                "KVFERRY_REDIS_URL": redis_url,
                "KVFERRY_ADMIN_KEY": ADMIN_KEY,
                "KVFERRY_PORT": str(port),
                "KVFERRY_SHUTDOWN_ACCEPT_S": "0",
                "KVFERRY_SHUTDOWN_GRACE_S": "0",
            }
            command = [sys.executable, "-m", "gateway", "serve"]
            log = directory / f"gateway-{index}.log"
            process = ManagedProcess(f"gateway-{index}", command, log=log, environment=environment)
            stack.callback(process.end)
            client = await stack.enter_async_context(http_client(f"http://127.0.0.1:{port}"))
            found.append(Process(process, client))
        for one in found:

            async def is_up(one: Process = one) -> bool:
                one.process.require_running()
                with contextlib.suppress(httpx.TransportError):
                    return (await one.client.get("/health")).status_code == 200
                return False

            await until_true(is_up, STARTS_IN_S)
        yield found


@pytest.fixture
def own_redis(tmp_path: Path) -> Any:
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as server:
        yield server


async def leader_of(processes: list[Process]) -> Process:
    found: list[Process] = []

    async def one_leads() -> bool:
        found[:] = [one for one in processes if await one.leads()]
        return len(found) == 1

    await until_true(one_leads, TAKES_OVER_IN_S)
    return found[0]


async def test_another_leads_soon_after_a_kill_or_a_stop_and_a_thawed_leader_changes_nothing(
    own_redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F55, F56: with a pairing to keep up, a stream at the one that is killed, and wall clocks a minute apart."""
    async with instances("a", "b") as (a, b):
        a.freeness_steps, a.report_changes = 10, {"requests_running": 4}
        b.script = starts_and_waits
        async with gateways(3, own_redis.url, tmp_path, a, b) as processes:
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
    allowed = {"serving/session.py"}  # The time of day in a record of a move, for people to read.
    package = Path(sys.modules["gateway"].__file__ or "").parent
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("time.time()", "datetime.now", "datetime.utcnow"))
    }
    assert users == allowed
