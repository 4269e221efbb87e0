"""The copied KV is what the destination goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.client import ATTEMPTS_MAX, Client
from loadtest.stack import BLOCK_SIZE

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 400} | fields


@pytest.mark.parametrize("prompt_words", [5, 700])
async def test_the_destination_computes_at_most_one_block_of_tokens(client: Client, prompt_words: int) -> None:
    request = body("count " * prompt_words)
    moved = await client.moved(COMPLETIONS, await client.run(COMPLETIONS, **request), **request)
    (move,) = moved.committed()
    arrival = await client.arrival(moved.request_id)
    assert arrival["output_tokens"] == move["output_tokens"]
    assert 1 <= arrival["computed_tokens"] <= BLOCK_SIZE
    assert move["blocks_sent"] + move["blocks_reused"] > 0


async def test_zeros_instead_of_the_copied_blocks_change_the_output(client: Client, corruption_flag: Path) -> None:
    """If the destination recomputed, or ignored what was copied, this would not notice the zeros."""
    request = body("a prompt that no other test has had " * 20, max_tokens=800)
    alone = await client.run(COMPLETIONS, **request, cache_salt="alone")
    corruption_flag.touch()  # noqa: ASYNC240  an empty file
    try:
        for attempt in range(ATTEMPTS_MAX):
            corrupted = await client.run(COMPLETIONS, move_at=[40], **request, cache_salt=f"corrupted {attempt}")
            if corrupted.committed():
                break
    finally:
        corruption_flag.unlink()  # noqa: ASYNC240
    (move,) = corrupted.committed()
    at = move["output_tokens"]
    assert move["blocks_sent"] > 0
    assert corrupted.tokens[:at] == alone.tokens[:at]
    assert corrupted.tokens[at:] != alone.tokens[at:]


async def test_blocks_that_the_destination_has_are_not_sent_again(client: Client) -> None:
    request = body("shared history " * 200)
    first = await client.run(COMPLETIONS, **request)
    await client.moved(COMPLETIONS, first, **request)
    again = await client.moved(COMPLETIONS, first, **request)
    (move,) = again.committed()
    assert move["blocks_reused"] >= 400 // BLOCK_SIZE
    assert move["blocks_sent"] < move["blocks_reused"]
