"""Two servers of two ranks each: both ranks copy their part of a request. Last, when the shared servers have ended."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from loadtest.client import Client
from loadtest.stack import BLOCK_SIZE, Stack
from loadtest.test_model import TEST_SHAPE
from tests.vllm.conftest import SHARED_STACK

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
            await client.wait_until_empty(3.0)
        finally:
            await client.close()


async def test_both_ranks_copy_their_part_and_the_stream_stays_what_it_was(pair: Client) -> None:
    alone = await pair.run(COMPLETIONS, **BODY)
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
