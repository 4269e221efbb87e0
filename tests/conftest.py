"""A real Redis for the whole run, and a builder for gateways that listen on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import hypothesis
import pytest
import uvicorn

from gateway.app import Gateway
from gateway.cluster.health import HealthSettings
from gateway.cluster.resolver import resolve
from gateway.config import Budgets, Intervals, Settings
from gateway.server import server_config
from loadtest.redis_server import RedisServer
from tests.fake_instance import MODEL, SECRET, FakeInstance


def pytest_configure() -> None:
    """SIGTERM, as a time limit sends it, ends a run like Ctrl-C: fixtures end what they have started.

    ``HYPOTHESIS_PROFILE=thorough`` tries a hundred times as many random bodies and streams.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    hypothesis.settings.register_profile("quick", max_examples=30, deadline=None, database=None)
    hypothesis.settings.register_profile("thorough", max_examples=3_000, deadline=None, database=None)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


ADMIN_KEY = "admin-key"
LOOK_S = 0.005
INTERVALS = Intervals(
    probe_s=0.1, leader_tick_s=0.1, probe_timeout_s=10, pulse_s=0.1, watch_s=0.1, drain_look_s=0.05, beat_s=0.1
)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The one at KVFERRY_REDIS_URL, else one for this run."""
    with RedisServer(log=tmp_path_factory.mktemp("redis") / "redis.log") as server:
        yield server.url


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway under test, and a client of it."""

    gateway: Gateway
    url: str
    client: httpx.AsyncClient

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(**fields))

    async def stream(self, **fields: Any) -> bytes:
        """The whole body of a stream that is expected to start well."""
        response = await self.chat(stream=True, **fields)
        assert response.status_code == 200, response.text
        return response.content

    async def admin(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return await self.client.request(method, path, headers=headers, **arguments)


def http_client(url: str) -> httpx.AsyncClient:
    """Without the authorities' certificates, which take longer to read than a test takes."""
    return httpx.AsyncClient(base_url=url, timeout=60, verify=False, trust_env=False)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **fields}


StartGateway = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start_gateway(redis_url: str) -> StartGateway:
    """``async with start_gateway(a, b) as running``; keyword arguments are settings, or ``resolve``."""

    @contextlib.asynccontextmanager
    async def start(*instances: FakeInstance, **changes: Any) -> AsyncIterator[Running]:
        values: dict[str, Any] = {
            "secret": SECRET,
            "instance_urls": tuple(instance.url for instance in instances),
            "redis_url": redis_url,
            "admin_key": ADMIN_KEY,
            "budgets": Budgets(header_grace_s=0.05, instance_wait_s=0.2),
            # Scripts fail again and again: what that says about an instance is test_health.py's subject.
            "health": HealthSettings(failures_max=1_000),
            "intervals": INTERVALS,
        }
        resolver = changes.pop("resolve", resolve)
        gateway = Gateway(Settings(**(values | changes)), resolve=resolver)
        async with serve(gateway) as url, http_client(url) as client:
            yield Running(gateway, url, client)

    return start


class QuickServer(uvicorn.Server):
    """Ends when it is told to, and not three tenths of a second later. How a gateway ends is test_shutdown.py's."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(AssertionError):
            await until(lambda: not state.connections and not state.tasks, 1.0)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def serve(gateway: Gateway) -> AsyncIterator[str]:
    server = QuickServer(server_config(gateway, "127.0.0.1", 0))
    serving = asyncio.create_task(server._serve())
    try:
        while not server.started:
            assert not serving.done(), "the gateway did not start"
            await asyncio.sleep(0)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Waits for what has no event of its own; fails, rather than going on, when it does not come.

    Counted in looks and not by the clock: small machines stand still for seconds.
    """
    for _ in range(round(timeout_s / LOOK_S)):
        if condition():
            return
        await asyncio.sleep(LOOK_S)
    assert condition(), f"still not so after {timeout_s} s"


async def until_true(question: Callable[[], Awaitable[object]], timeout_s: float = 5.0) -> None:
    """The same for what has to be asked of a server."""
    for _ in range(round(timeout_s / LOOK_S)):
        if await question():
            return
        await asyncio.sleep(LOOK_S)
    assert await question(), f"still not so after {timeout_s} s"
