"""Two gateways as processes over one Redis, before real servers: one of them is killed, and Redis stops and dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.client import Client, Reply, events
from loadtest.redis_server import RedisServer
from loadtest.stack import Stack
from tests.conftest import until, until_true
from tests.gateway_processes import TAKES_OVER_IN_S, Process, gateways, leader_of
from tests.vllm.twins import twin

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Two helms", "temperature": 0.8, "seed": 5, "ignore_eos": True, "max_tokens": 2000}


@asynccontextmanager
async def streaming(client: Client) -> AsyncIterator[tuple[Reply, asyncio.Task[None]]]:
    """A stream that is read in the background."""
    reply = Reply()

    async def read() -> None:
        async with client.stream(COMPLETIONS, **BODY) as response:
            reply.request_id = response.headers["x-request-id"]
            async for _ in events(response, reply):
                pass

    reading = asyncio.create_task(read())
    try:
        await until(lambda: len(reply.tokens) >= 40 or reading.done(), TAKES_OVER_IN_S)
        yield reply, reading
    finally:
        reading.cancel()
        await asyncio.wait({reading})


async def moved(through: Process, request_id: str) -> dict[str, Any]:
    """Moved to where it is not, as any gateway may order."""
    (shown,) = [one for one in (await through.admin("GET", "/admin/requests"))["requests"] if one["id"] == request_id]
    destination = "b" if shown["instance"] == "a" else "a"
    order = {"request": request_id, "destination": destination}
    answer: dict[str, Any] = await through.admin("POST", "/admin/migrate", json=order)
    return answer


def client_of(stack: Stack, gateway: Process) -> Client:
    return Client(stack, str(gateway.client.base_url).rstrip("/"))


async def seconds(what: Awaitable[object]) -> float:
    began_at = time.monotonic()
    await what
    return time.monotonic() - began_at


async def test_a_stream_is_whole_whatever_becomes_of_the_other_gateway_and_of_redis(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = client.stack
    alone = await twin(client, COMPLETIONS, **BODY)
    variables = {"KVFERRY_SECRET": stack.secret, "KVFERRY_API_KEYS": stack.api_key, "KVFERRY_POLICY": "none"}
    urls = [instance.url for instance in stack.instances]
    with RedisServer(log=tmp_path / "redis.log", environment={"PATH": os.environ["PATH"]}) as redis:
        assert redis.process is not None
        async with gateways(2, redis.url, tmp_path, urls, **variables) as both:
            leader = await leader_of(both)
            (other,) = [one for one in both if one is not leader]
            through_leader, through_other = (
                Client(stack, str(one.client.base_url).rstrip("/")) for one in (leader, other)
            )
            try:
                async with streaming(through_other) as (kept, keeping), streaming(through_leader) as (lost, losing):
                    answer = await moved(leader, kept.request_id)
                    assert answer.get("outcome") == "committed", answer
                    leader.kill()
                    await asyncio.wait({losing})
                    assert isinstance(losing.exception(), httpx.TransportError)
                    freed_s = await seconds(until_true(gone(client, lost.request_id), TAKES_OVER_IN_S))
                    led_s = await seconds(leader_of([other]))

                    await go_on(kept, keeping, 20)
                    os.kill(redis.process.pid, signal.SIGSTOP)
                    try:
                        await go_on(kept, keeping, 100)
                    finally:
                        os.kill(redis.process.pid, signal.SIGCONT)
                    redis.process.end()
                    await keeping
            finally:
                await through_leader.close()
                await through_other.close()
    assert kept.tokens == alone.tokens
    assert kept.text == alone.text
    assert kept.finish == alone.finish
    assert kept.done == 1
    with capsys.disabled():
        print(
            f"\nkilled leader: its request was off the servers after {freed_s:.1f} s, another led after {led_s:.1f} s"
        )


def gone(client: Client, request_id: str) -> Callable[[], Awaitable[bool]]:
    async def is_gone() -> bool:
        held = [request for name in "ab" for request in (await client.status(name))["requests"]]
        return all(request["request_id"] != request_id for request in held)

    return is_gone


async def go_on(reply: Reply, reading: asyncio.Task[None], tokens: int) -> None:
    goal = len(reply.tokens) + tokens
    assert not reading.done(), "it was over before the fault"
    await until(lambda: len(reply.tokens) >= goal or reading.done(), TAKES_OVER_IN_S)
