"""What a live migration is compared with differs from it in the copy alone, and gives the same output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.client import Client, Reply, events

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
BLOCKS = 40


async def run_moved(client: Client, body: dict[str, Any], method: str) -> tuple[Reply, dict[str, Any]]:
    reply = Reply()
    moving: asyncio.Task[Any] | None = None
    async with client.stream(COMPLETIONS, **body) as response:
        request_id = response.headers["x-request-id"]
        source = await client.instance_of(request_id)
        order = {"request": request_id, "destination": "b" if source == "a" else "a", "method": method}
        async for _ in events(response, reply):
            if moving is None and len(reply.tokens) >= 20:
                moving = asyncio.create_task(
                    client.http.post(f"{client.url}/admin/migrate", json=order, headers=client.admin_headers())
                )
    assert moving is not None
    result: dict[str, Any] = (await moving).json()
    assert result.get("outcome") == "committed", result
    return reply, result


@pytest.mark.parametrize("method", ["live", "blocking", "recompute"])
async def test_each_method_gives_the_output_of_the_unmoved_run(client: Client, method: str) -> None:
    body: dict[str, Any] = {"prompt": " river" * 32 * BLOCKS, "temperature": 0, "ignore_eos": True, "max_tokens": 400}
    alone = await client.run(COMPLETIONS, **body, cache_salt=f"{method}-alone")
    moved, result = await run_moved(client, {**body, "cache_salt": f"{method}-moved"}, method)
    assert (moved.tokens, moved.text, moved.done) == (alone.tokens, alone.text, 1)
    assert result["blocks_reused"] == 0
    arrival = await client.arrival(result["request_id"])
    if method == "recompute":
        assert result["bytes_sent"] == 0
        assert arrival["computed_tokens"] > 2 * 32, "the first piece of all"
    else:
        assert result["blocks_sent"] >= BLOCKS
        assert arrival["computed_tokens"] <= 33
