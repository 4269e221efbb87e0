"""The leader moves requests by itself from a full instance to a free one, and the streams stay as they would be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.app import Gateway
from gateway.config import Intervals, Settings
from gateway.policy.migration import MigrationSettings
from loadtest.client import ATTEMPTS_MAX, Client
from loadtest.stack import Stack
from tests.conftest import serve

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
REQUESTS = 4


async def test_the_leader_moves_requests_from_a_full_instance_to_a_free_one(client: Client, stack: Stack) -> None:
    total = (await client.status("a"))["report"]["freeness_steps"]  # Of an empty instance.
    bodies: list[dict[str, Any]] = [
        {"prompt": f"Load number {index}", "temperature": 0, "ignore_eos": True, "max_tokens": 400}
        for index in range(REQUESTS)
    ]
    alone = [await client.run(COMPLETIONS, **body) for body in bodies]
    gateway = Gateway(
        Settings(
            secret=stack.secret,
            instance_urls=tuple(instance.url for instance in stack.instances),
            redis_url=stack.redis_url + "?db=3",  # A cluster of its own, so that this gateway leads.
            admin_key=stack.admin_key,
            api_keys=(stack.api_key,),
            intervals=Intervals(leader_tick_s=0.1),
            # With all requests on one instance it is below a half, and the other one is free.
            migration=MigrationSettings(low_freeness_steps=total * 0.5, high_freeness_steps=total * 0.9),
        )
    )
    async with serve(gateway) as url:
        here = Client(stack, url)
        try:
            for _ in range(ATTEMPTS_MAX):  # On a busy machine they may have ended before they were seen together.
                async with here.only("a"):
                    streams = [asyncio.create_task(here.run(COMPLETIONS, **body)) for body in bodies]
                    while running := not all(stream.done() for stream in streams):
                        if len((await here.status("a"))["requests"]) == REQUESTS:
                            break
                        await asyncio.sleep(0.02)
                replies = await asyncio.gather(*streams)
                if running:
                    break
            arrived = {arrival["request_id"] for arrival in (await here.status("b"))["arrivals"]}
        finally:
            await here.close()
    assert arrived & {reply.request_id for reply in replies}, "nothing was moved"
    for reply, expected in zip(replies, alone, strict=True):
        assert reply.tokens == expected.tokens
        assert reply.text == expected.text
        assert reply.finish == expected.finish
