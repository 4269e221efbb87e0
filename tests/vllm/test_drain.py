"""Draining on real servers: every request leaves by migration, and no stream breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.client import Client
from tests.vllm.test_equal_output import CHAT, COMPLETIONS, MESSAGES, assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 800}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Cast off", "temperature": 0, **LONG}),
    (COMPLETIONS, {"prompt": "All ashore", "temperature": 0.9, "seed": 4, **LONG}),
    (CHAT, {"messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 2, **LONG}),
]


async def test_a_drained_instance_is_empty_and_no_stream_broke(client: Client) -> None:
    alone = [await client.run(path, **body) for path, body in STREAMS]
    async with client.only("a"):
        streams = [asyncio.create_task(client.run(path, **body)) for path, body in STREAMS]
        async with asyncio.timeout(20):
            while len([one for one in (await client.status("a"))["requests"] if one["output_tokens"] > 20]) < 3:
                await asyncio.sleep(0.01)
    try:
        answer = await drain(client, "POST", "a")
        left = (await client.status("a"))["requests"]
        late = await client.run(COMPLETIONS, prompt="Too late for a", max_tokens=4)
        moved = await asyncio.gather(*streams)
    finally:
        await drain(client, "DELETE", "a")
    assert answer["empty"], answer
    assert answer["moved"] == len(STREAMS), answer
    assert left == []
    assert late.done == 1
    for reply, expected in zip(moved, alone, strict=True):
        assert_same(reply, expected)
    again = await client.run(COMPLETIONS, start_on="a", prompt="Back to work", max_tokens=4)
    assert again.done == 1


async def drain(client: Client, method: str, instance_id: str) -> dict[str, Any]:
    url = f"{client.url}/admin/instances/{instance_id}/drain"
    response = await client.http.request(method, url, headers=client.admin_headers())
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
