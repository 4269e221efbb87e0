"""Redis, a gateway and fake instances, processes of their own, and streams of this process that never end for long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtest.processes import ManagedProcess, free_port
from loadtest.redis_server import RedisServer

LOG_DIRECTORY = Path(".cache/logs/dashboard")
FIRST_PORT = 22_000
"""Below the ports that the kernel gives to clients."""
MODEL = "demo"
STARTS_IN_S = 60.0
LOOK_S = 0.1
REPLY_S = 600.0
PRIORITIES = ("high", "normal", "normal", "low")


@dataclass(frozen=True, slots=True)
class Plan:
    instances: int
    streams: int
    fake_arguments: tuple[str, ...] = ()
    gateway_environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    url: str
    admin_key: str
    gateway: ManagedProcess
    client: httpx.AsyncClient

    async def admin(self, method: str, path: str, **arguments: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        return await self.client.request(method, path, headers=headers, **arguments)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running_stage(plan: Plan) -> AsyncIterator[Stage]:
    secret, admin_key, port = secrets.token_urlsafe(16), secrets.token_urlsafe(16), free_port()
    environment = {**os.environ, "KVFERRY_SECRET": secret}
    with contextlib.ExitStack() as processes:
        redis = processes.enter_context(RedisServer(log=LOG_DIRECTORY / "redis.log"))
        counted = ["--count", str(plan.instances), "--first-port", str(FIRST_PORT), "--instance-ids", "vllm-"]
        fakes = ManagedProcess(
            "fake servers",
            [sys.executable, "-m", "loadtest.fake_vllm", *counted, "--model", MODEL, *plan.fake_arguments],
            log=LOG_DIRECTORY / "fakes.log",
            environment=environment,
        )
        processes.callback(fakes.end)
        urls = [f"http://127.0.0.1:{FIRST_PORT + number}" for number in range(plan.instances)]
        gateway = ManagedProcess(
            "gateway",
            [sys.executable, "-m", "gateway", "serve", "--port", str(port), "--instances", ",".join(urls)],
            log=LOG_DIRECTORY / "gateway.log",
            environment={
                **environment,
                "KVFERRY_REDIS_URL": redis.url,
                "KVFERRY_ADMIN_KEY": admin_key,
                "KVFERRY_SHUTDOWN_GRACE_S": "0",
                "KVFERRY_SHUTDOWN_ACCEPT_S": "0",
                **dict(plan.gateway_environment),
            },
        )
        processes.callback(gateway.end)
        url = f"http://127.0.0.1:{port}"
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=REPLY_S, trust_env=False, limits=limits) as client:
            stage = Stage(url, admin_key, gateway, client)
            await _ready(stage, plan.instances, (fakes, gateway))
            streams = [asyncio.create_task(_stream(client, random.Random(seed))) for seed in range(plan.streams)]
            try:
                yield stage
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)


async def _ready(stage: Stage, instances: int, processes: tuple[ManagedProcess, ...]) -> None:
    async with asyncio.timeout(STARTS_IN_S):
        while True:
            for process in processes:
                process.require_running()
            with contextlib.suppress(httpx.TransportError):
                answer = await stage.admin("GET", "/admin/instances")
                shown = answer.json()["instances"]
                if len(shown) == instances and all(one["report"] is not None for one in shown):
                    return
            await asyncio.sleep(LOOK_S)


async def _stream(client: httpx.AsyncClient, dice: random.Random) -> None:
    """One after the other, without end."""
    await asyncio.sleep(dice.uniform(0, 3))
    while True:
        long = dice.random() < 0.3
        body = {
            "model": MODEL,
            "prompt": "".join(dice.choices("abcdefgh ", k=dice.randint(200, 8_000 if long else 1_500))),
            "max_tokens": dice.randint(200, 1_500 if long else 500),
            "stream": True,
        }
        headers = {"x-kvferry-priority": dice.choice(PRIORITIES)}
        with contextlib.suppress(httpx.TransportError):
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                async for _ in response.aiter_raw():
                    pass
