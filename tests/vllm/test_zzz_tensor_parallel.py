"""Two servers of two ranks each: both ranks copy their part of a request. Last, when the shared servers have ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from loadtest.client import Client, Reply, events
from loadtest.stack import BLOCK_SIZE, Stack
from loadtest.test_model import TEST_SHAPE
from tests.vllm.conftest import SHARED_STACK
from tests.vllm.twins import twin

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "Two ranks, one ship. " * 12,
    "temperature": 0.8,
    "seed": 5,
    "frequency_penalty": 0.3,
    "ignore_eos": True,
    "max_tokens": 400,
}
RANKS = 2
BLOCK_BYTES = TEST_SHAPE.kv_bytes_per_token * BLOCK_SIZE
"""Keys and values in float32, of all ranks together: each holds its share of the heads."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """Four workers on what two servers need elsewhere: the shared pair must have ended."""
    if (shared := request.session.stash.get(SHARED_STACK, None)) is not None:
        shared.stop()
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    async with Stack(
        instances=2,
        vllm_arguments=["--tensor-parallel-size", str(RANKS)],
        vllm_environment={"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores[rank % len(cores)] for rank in range(RANKS))},
    ) as stack:
        client = Client(stack)
        try:
            yield client
        finally:
            await client.close()


async def test_both_ranks_copy_their_part_and_the_stream_stays_what_it_was(pair: Client) -> None:
    alone = await twin(pair, COMPLETIONS, **BODY)
    salted = {**BODY, "cache_salt": "moved"}  # Nothing of the first run is found in a prefix cache.
    reply = await pair.moved(COMPLETIONS, alone, **salted)
    (move,) = reply.committed()
    assert reply.tokens == alone.tokens
    assert reply.text == alone.text
    assert reply.finish == alone.finish
    assert reply.done == 1
    assert move["blocks_sent"] > 0
    assert move["bytes_sent"] == move["blocks_sent"] * BLOCK_BYTES
    assert (await pair.arrival(reply.request_id))["computed_tokens"] <= BLOCK_SIZE
    await pair.wait_until_empty(5.0)


async def test_a_server_that_is_told_to_end_lets_its_requests_move_first(pair: Client) -> None:
    """The last of all, since it costs a server."""
    alone = await twin(pair, COMPLETIONS, **BODY)
    leaving = pair.stack.instance("a").process
    reply = Reply()
    told_at: int | None = None
    moved = False
    body = {**BODY, "max_tokens": 4000}  # However slow the machine is, the move comes before the end.
    async with pair.stream(COMPLETIONS, "a", **body) as response:
        request_id = response.headers["x-request-id"]
        async for _ in events(response, reply):
            if told_at is None and len(reply.tokens) >= 40:
                os.kill(leaving.pid, signal.SIGTERM)
                told_at = len(reply.tokens)
            if told_at is not None and not moved and len(reply.tokens) % 20 == 0:
                moved = await pair.instance_of(request_id) == "b"
            if moved and len(reply.tokens) >= len(alone.tokens):
                break
    async with asyncio.timeout(60):
        while leaving.exit_status is None:
            await asyncio.sleep(0.1)
    assert moved
    assert reply.tokens[: len(alone.tokens)] == alone.tokens
    requests = (await pair.http.get(f"{pair.url}/admin/requests", headers=pair.admin_headers())).json()
    ended = next(one for one in requests["recent"] if one["id"] == request_id)
    assert [move["kind"] for move in ended["moves"]] == ["migrated"], "live, and not a resume after a loss"
