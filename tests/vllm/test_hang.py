"""A real server that is stopped under its requests, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from loadtest.client import Client, Reply, events

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "Man overboard",
    "temperature": 0.8,
    "seed": 21,
    "ignore_eos": True,
    "max_tokens": 800,
}
BACK_S = 60.0


async def instance_of(client: Client, instance_id: str) -> dict[str, Any]:
    answer = await client.http.get(f"{client.url}/admin/instances", headers=client.admin_headers())
    return next(one for one in answer.json()["instances"] if one["id"] == instance_id)


async def test_a_stream_of_a_stopped_server_goes_on_elsewhere_and_the_server_comes_back(client: Client) -> None:
    alone = await client.run(COMPLETIONS, **BODY)
    pid = client.stack.instance("b").pid
    reply = Reply()
    stopped = False
    try:
        async with client.stream(COMPLETIONS, "b", **BODY) as response:
            async for _ in events(response, reply):
                if not stopped and len(reply.tokens) >= 40:
                    os.killpg(pid, signal.SIGSTOP)
                    stopped = True
    finally:
        os.killpg(pid, signal.SIGCONT)
    assert stopped
    assert (reply.tokens, reply.text, reply.done) == (alone.tokens, alone.text, 1)
    assert len(reply.identity()) == 1
    async with asyncio.timeout(BACK_S):
        while not (one := await instance_of(client, "b"))["healthy"] or one["stale"]:
            await asyncio.sleep(0.1)
    assert (await client.run(COMPLETIONS, start_on="b", **BODY)).tokens == alone.tokens
    await client.wait_until_empty(10.0)
