"""The leader moves requests by itself from a full instance to a free one, and the streams stay as they would be."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.config import Intervals, Settings
from gateway.policy.migration import MigrationSettings
from gateway.wire import SECRET_HEADER
from loadtest.stack import Stack
from tests.conftest import serve
from tests.vllm.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
REQUESTS = 4


async def drain(stack: Stack, instance_id: str, draining: bool) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        url = stack.instance(instance_id).url
        headers = {SECRET_HEADER: stack.secret}
        response = await http.post(f"{url}/llumlet/drain", json={"draining": draining}, headers=headers)
        assert response.status_code == 200, response.text


async def test_the_leader_moves_requests_from_a_full_instance_to_a_free_one(client: Client, stack: Stack) -> None:
    total = (await client.status("a"))["report"]["freeness_steps"]  # Of an empty instance.
    bodies: list[dict[str, Any]] = [
        {"prompt": f"Load number {index}", "temperature": 0, "ignore_eos": True, "max_tokens": 400} for index in range(REQUESTS)
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
            await drain(stack, "b", True)
            await until_reported(here, "b", draining=True)
            streams = [asyncio.create_task(here.run(COMPLETIONS, **body)) for body in bodies]
            async with asyncio.timeout(30):
                while len((await here.status("a"))["requests"]) < REQUESTS:
                    await asyncio.sleep(0.02)
            await drain(stack, "b", False)
            replies = await asyncio.gather(*streams)
            arrived = {arrival["request_id"] for arrival in (await here.status("b"))["arrivals"]}
        finally:
            await drain(stack, "b", False)
            await here.close()
    assert arrived & {reply.request_id for reply in replies}, "nothing was moved"
    for reply, expected in zip(replies, alone, strict=True):
        assert reply.tokens == expected.tokens and reply.text == expected.text and reply.finish == expected.finish


async def until_reported(client: Client, instance_id: str, *, draining: bool) -> None:
    headers = {"authorization": f"Bearer {client.stack.admin_key}"}
    async with asyncio.timeout(10):
        while True:
            answer = (await client.http.get(f"{client.url}/admin/instances", headers=headers)).json()
            reports = {entry["id"]: entry["report"] for entry in answer["instances"]}
            if (reports.get(instance_id) or {}).get("draining") is draining:
                return
            await asyncio.sleep(0.02)
