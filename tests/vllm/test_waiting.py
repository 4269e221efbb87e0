"""Requests that move before their first token: queued, in the middle of their prompt, or preempted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from loadtest.client import Client, Reply, events
from tests.vllm.test_equal_output import CHAT, COMPLETIONS, GREEDY, MESSAGES, USAGE, assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

BATCH_MAX = 8
LONG_PROMPT = [100 + index % 1500 for index in range(7000)]
"""Fifty-five pieces of 128 tokens, which is seconds on one core."""
DETAILS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@contextlib.asynccontextmanager
async def full_batch(client: Client, instance_id: str) -> AsyncIterator[None]:
    """As many endless streams on an instance as it runs at a time."""
    async with client.only(instance_id), contextlib.AsyncExitStack() as stack:
        for index in range(BATCH_MAX):
            body: dict[str, Any] = {"prompt": f"Busy {index}", "ignore_eos": True, "max_tokens": 4000}
            await stack.enter_async_context(client.stream(COMPLETIONS, **body))
        yield


async def state_of(client: Client, instance_id: str, request_id: str) -> dict[str, Any] | None:
    requests = (await client.status(instance_id))["requests"]
    return next((request for request in requests if request["request_id"] == request_id), None)


async def when(client: Client, instance_id: str, request_id: str, state: str) -> None:
    async with asyncio.timeout(20):
        while (found := await state_of(client, instance_id, request_id)) is None or found["state"] != state:
            await asyncio.sleep(0.005)


async def read(response: httpx.Response) -> Reply:
    reply = Reply(request_id=response.headers["x-request-id"])
    async for _ in events(response, reply):
        pass
    return reply


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, **GREEDY, **USAGE}),
        (COMPLETIONS, {"prompt": "Wait here", **GREEDY, "temperature": 0.8, "seed": 11}),
        (COMPLETIONS, {"prompt": "Echo", "echo": True, **GREEDY}),
    ],
    ids=["chat", "seeded", "echo"],
)
async def test_a_queued_request_starts_elsewhere(client: Client, path: str, body: dict[str, Any]) -> None:
    alone = await client.run(path, **body)
    async with full_batch(client, "a"), client.stream(path, **body) as response:
        request_id = response.headers["x-request-id"]
        await when(client, "a", request_id, "waiting")
        await client.undrain("b")
        move = await client.move(request_id, "b")
        moved = await read(response)
    assert move["outcome"] == "committed", move
    assert move["output_tokens"] == 0
    assert_same(moved, alone)


async def test_a_queued_whole_reply_starts_elsewhere(client: Client) -> None:
    body = {"prompt": "Wait whole", **GREEDY}
    alone = await client.whole(COMPLETIONS, **body)
    async with full_batch(client, "a"):
        running = asyncio.create_task(client.whole(COMPLETIONS, **body))
        async with asyncio.timeout(20):
            while not (queued := [one for one in (await client.status("a"))["requests"] if one["state"] == "waiting"]):
                await asyncio.sleep(0.005)
        await client.undrain("b")
        move = await client.move(queued[0]["request_id"], "b")
        moved = await running
    assert move["outcome"] == "committed", move
    assert moved["choices"] == alone["choices"]
    assert moved["usage"] == alone["usage"]


@pytest.mark.parametrize("seed", [None, 17], ids=["greedy", "seeded"])
async def test_a_request_in_the_middle_of_its_prompt_takes_along_what_is_computed(
    client: Client, seed: int | None
) -> None:
    sampling: dict[str, Any] = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    body: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60, **sampling, **DETAILS}
    alone = await client.run(COMPLETIONS, prompt=LONG_PROMPT, **body, cache_salt=f"alone-{seed}")
    for attempt in range(5):
        moved, move = await moved_amid_prompt(client, **body, cache_salt=f"moved-{seed}-{attempt}")
        assert_same(moved, alone)
        assert moved.usage[-1]["prompt_tokens"] == len(LONG_PROMPT)
        if move.get("outcome") == "committed" and move["output_tokens"] == 0:
            assert 10 <= move["blocks_sent"] < 218, "what was computed of its 218 blocks came along, and only that"
            return
    raise AssertionError(f"no move came before the first token: {move}")


async def moved_amid_prompt(client: Client, **body: Any) -> tuple[Reply, dict[str, Any]]:
    async with client.stream(COMPLETIONS, start_on="a", prompt=LONG_PROMPT, **body) as response:
        request_id = response.headers["x-request-id"]
        async with asyncio.timeout(20):
            while (found := await state_of(client, "a", request_id)) is None or found["blocks"] < 20:
                await asyncio.sleep(0.005)
        move = await client.move(request_id, "b")
        return await read(response), move


async def test_a_preempted_request_goes_on_elsewhere(client: Client) -> None:
    """Three sequences that fill the cache to the last block: when they grow, one has to give its blocks up."""
    bodies: list[dict[str, Any]] = [
        {"prompt": [200 + (index * 7 + row * 131) % 1500 for index in range(3340)], **GREEDY, "max_tokens": 500}
        for row in range(3)
    ]
    alone = [await client.run(COMPLETIONS, **body) for body in bodies]
    async with contextlib.AsyncExitStack() as stack:
        async with client.only("a"):
            responses = [await stack.enter_async_context(client.stream(COMPLETIONS, **body)) for body in bodies]
        reading = [asyncio.create_task(read(response)) for response in responses]
        async with asyncio.timeout(60):
            while not (preempted := await preempted_on(client, "a")):
                await asyncio.sleep(0.005)
        move = await client.move(preempted, "b")
        replies = await asyncio.gather(*reading)
    assert move["outcome"] == "committed", move
    assert move["blocks_sent"] == 0, "its blocks were given up"
    assert move["output_tokens"] > 0
    for reply, expected in zip(replies, alone, strict=True):
        assert_same(reply, expected)


async def preempted_on(client: Client, instance_id: str) -> str | None:
    requests = (await client.status(instance_id))["requests"]
    return next((one["request_id"] for one in requests if one["state"] == "waiting" and one["output_tokens"]), None)
