"""A server whose blocks are taken: what does not fit waits at the gateway, and not in vLLM's queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway import wire
from gateway.app import Gateway
from gateway.config import Settings
from gateway.policy.decide import Policy
from loadtest.client import Client, Reply, events
from tests.conftest import serve, until
from tests.vllm.test_equal_output import COMPLETIONS, GREEDY, assert_same
from tests.vllm.test_waiting import LONG_PROMPT

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

FILLING: dict[str, Any] = {"prompt": LONG_PROMPT, "ignore_eos": True, "max_tokens": 1000}
"""219 of the server's 320 blocks for its prompt."""
NEXT: dict[str, Any] = {"prompt": [300 + index % 1200 for index in range(3600)], **GREEDY, "max_tokens": 60}
"""113 blocks."""


@contextlib.asynccontextmanager
async def late_gateway(client: Client) -> AsyncIterator[tuple[Gateway, Client]]:
    """One that binds late and knows instance a alone; the shared one fills queues, for tests that empty them."""
    stack = client.stack
    settings = Settings(
        stack.secret,
        (stack.instance("a").url,),
        stack.redis_url,
        admin_key=stack.admin_key,
        api_keys=(stack.api_key,),
        policy=Policy.NONE,
    )
    gateway = Gateway(settings)
    async with serve(gateway) as url:
        late = Client(stack, url)
        try:
            yield gateway, late
        finally:
            await late.close()


async def read(response: httpx.Response, reply: Reply) -> None:
    async for _ in events(response, reply):
        pass


async def run(client: Client, **body: Any) -> Reply:
    reply = Reply()
    async with client.stream(COMPLETIONS, **body) as response:
        await read(response, reply)
    return reply


@contextlib.asynccontextmanager
async def filled(client: Client) -> AsyncIterator[None]:
    """A stream that runs on meanwhile, and is left at the end."""
    filling = Reply()
    async with client.stream(COMPLETIONS, **FILLING) as response:
        reading = asyncio.create_task(read(response, filling))
        try:
            await until(lambda: len(filling.tokens) >= 2, 60)
            yield
            assert not reading.done()
        finally:
            reading.cancel()
            await asyncio.wait({reading})


async def queued(client: Client) -> float:
    """In vLLM's own queue, by its own count."""
    page = (await client.http.get(client.stack.instance("a").url + "/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:num_requests_waiting{"))


async def test_what_does_not_fit_waits_at_the_gateway_and_starts_when_there_is_room(client: Client) -> None:
    alone = await client.run(COMPLETIONS, **NEXT, cache_salt="alone")
    async with late_gateway(client) as (gateway, late):
        async with filled(late):
            running = asyncio.create_task(run(late, **NEXT, cache_salt="waits"))
            await until(lambda: sum(gateway.waiting.waiting_by_class().values()) == 1, 30)
            for _ in range(10):
                assert await queued(client) == 0
                assert len((await client.status("a"))["requests"]) == 1
                await asyncio.sleep(0.05)
            await assert_refused_at_once(client)
            assert await queued(client) == 0
            assert sum(gateway.waiting.waiting_by_class().values()) == 1
        assert_same(await running, alone)


async def assert_refused_at_once(client: Client) -> None:
    """Asked past the gateway, the server says itself that it cannot, whatever kind of reply was asked for."""
    for stream in (True, False):
        headers = {
            wire.SECRET_HEADER: client.stack.secret,
            wire.REQUEST_ID_HEADER: f"refused-{stream}",
            wire.ADMIT_HEADER: wire.ADMIT_NOW,
        }
        body = {"model": client.stack.model, **NEXT, "stream": stream}
        url = client.stack.instance("a").url + COMPLETIONS
        answer = await client.http.post(url, headers=headers, json=body)
        assert answer.status_code == wire.BUSY_STATUS, answer.text
        busy = wire.decode_busy_header(answer.headers[wire.BUSY_HEADER])
        assert busy is not None
        assert busy.blocks_needed == 113
        assert 0 < busy.room_blocks < 113
