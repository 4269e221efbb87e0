"""Last, because it leaves one server dead: an instance is killed under its requests, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from loadtest.client import Client, Reply, events
from loadtest.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "Man overboard",
    "temperature": 0.8,
    "seed": 21,
    "presence_penalty": 0.5,
    "ignore_eos": True,
    "max_tokens": 800,
}


@pytest_asyncio.fixture(loop_scope="session")
async def lone_client(stack: Stack) -> AsyncIterator[Client]:
    client = Client(stack)
    try:
        yield client
    finally:
        await client.close()


async def test_a_killed_destination_costs_neither_a_token_nor_a_reply(lone_client: Client) -> None:
    """A stream and a whole reply, both on b, when b gets SIGKILL; both end as they would have without it."""
    client = lone_client
    whole_body = {"model": client.stack.model, **BODY, "prompt": "All hands"}

    async def post() -> dict[str, Any]:
        response = await client.http.post(client.url + COMPLETIONS, json=whole_body, headers=client.headers())
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    alone = await client.run(COMPLETIONS, **BODY)
    whole_alone = await post()
    await client.wait_until_empty(3.0)

    reply = Reply()
    whole: asyncio.Task[dict[str, Any]] | None = None
    move: dict[str, Any] = {}
    async with client.stream(COMPLETIONS, "a", **BODY) as response:
        async for _ in events(response, reply):
            if whole is None and len(reply.tokens) >= 40:
                move = await client.move(response.headers["x-request-id"], "b")
                assert move["outcome"] == "committed", move
                whole = asyncio.create_task(post())  # To a or b: it is killed on one, or not touched at all.
                await asyncio.sleep(0)
            elif (
                whole is not None
                and client.stack.instance("b").process.exit_status is None
                and len(reply.tokens) >= move["output_tokens"] + 20
            ):
                os.killpg(client.stack.instance("b").pid, signal.SIGKILL)
    assert whole is not None
    assert client.stack.instance("b").process.exit_status is not None
    assert reply.tokens == alone.tokens
    assert reply.text == alone.text
    assert reply.finish == alone.finish
    assert reply.done == 1
    assert len(reply.identity()) == 1
    answer = await whole
    assert answer["choices"] == whole_alone["choices"]
    assert answer["usage"] == whole_alone["usage"]


async def test_with_one_instance_dead_new_requests_go_to_the_other(lone_client: Client) -> None:
    replies = await asyncio.gather(*(lone_client.run(COMPLETIONS, **BODY) for _ in range(3)))
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    assert all(reply.done == 1 for reply in replies)


async def test_a_server_that_is_told_to_end_does_so_although_a_gateway_reads_its_reports(lone_client: Client) -> None:
    process = lone_client.stack.instance("a").process
    os.kill(process.pid, signal.SIGTERM)
    async with asyncio.timeout(20):
        while process.exit_status is None:
            await asyncio.sleep(0.1)
    assert process.exit_status is not None
