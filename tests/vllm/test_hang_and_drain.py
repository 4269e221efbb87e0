"""A real server that is stopped, and one that is drained, under its requests."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from tests.vllm.client import Client, Reply, events

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "Man overboard",
    "temperature": 0.8,
    "seed": 21,
    "ignore_eos": True,
    "max_tokens": 1200,
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


async def test_a_drain_moves_what_runs_and_says_when_the_server_is_empty(client: Client) -> None:
    alone = await client.run(COMPLETIONS, **BODY)
    reply = Reply()
    drain = f"{client.url}/admin/instances/b/drain"
    draining: asyncio.Task[Any] | None = None
    async with client.stream(COMPLETIONS, "b", **BODY) as response:
        async for _ in events(response, reply):
            if draining is None and len(reply.tokens) >= 40:
                draining = asyncio.create_task(client.http.post(drain, headers=client.admin_headers()))
    assert draining is not None
    try:
        answer = (await draining).json()
        assert (answer["empty"], answer["moved"], answer["remaining"]) == (True, 1, []), answer
        assert (await client.status("b"))["requests"] == []
        assert (reply.tokens, reply.text, reply.done) == (alone.tokens, alone.text, 1)
    finally:
        assert (await client.http.delete(drain, headers=client.admin_headers())).status_code == 200
