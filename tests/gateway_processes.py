"""Gateways as processes, for tests that kill, stop or starve them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.processes import ManagedProcess, free_port
from tests.conftest import ADMIN_KEY, http_client, until_true
from tests.fake_instance import SECRET

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
async def gateways(
    count: int, redis_url: str, directory: Path, urls: Iterable[str], **variables: str
) -> AsyncIterator[list[Process]]:
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
                "KVFERRY_INSTANCES": ",".join(urls),
                "KVFERRY_REDIS_URL": redis_url,
                "KVFERRY_ADMIN_KEY": ADMIN_KEY,
                "KVFERRY_PORT": str(port),
                "KVFERRY_SHUTDOWN_ACCEPT_S": "0",
                "KVFERRY_SHUTDOWN_GRACE_S": "0",
                **variables,
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


async def leader_of(processes: list[Process]) -> Process:
    found: list[Process] = []

    async def one_leads() -> bool:
        found[:] = [one for one in processes if await one.leads()]
        return len(found) == 1

    await until_true(one_leads, TAKES_OVER_IN_S)
    return found[0]
