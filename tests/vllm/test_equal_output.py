"""A request that moves in mid-stream gives what it would have given without moving, token by token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loadtest.client import Client, Reply
from tests.vllm.twins import twin

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me about ferries, please."}]
STOPS_AFTER_A_MOVE = 3
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 240}
USAGE = {"stream_options": {"include_usage": True}}


def assert_same(moved: Reply, alone: Reply) -> None:
    assert moved.tokens == alone.tokens
    assert moved.text == alone.text
    assert moved.finish == alone.finish
    assert len(moved.finish) == 1
    assert moved.usage[-1:] == alone.usage[-1:]
    running = [usage["completion_tokens"] for usage in moved.usage]
    assert running == sorted(running), "usage never goes back"
    assert moved.logprobs == alone.logprobs
    assert moved.roles == alone.roles
    assert moved.done == alone.done == 1
    assert moved.fingerprints == alone.fingerprints
    assert len(moved.identity()) == 1, "one id, one created, one model over the whole stream"


KINDS = {
    "chat, greedy": (CHAT, {"messages": MESSAGES, **GREEDY, **USAGE}),
    "completion, greedy": (COMPLETIONS, {"prompt": "The ferry", **GREEDY, **USAGE}),
    "token ids as prompt": (COMPLETIONS, {"prompt": list(range(20, 90)), **GREEDY}),
    "all penalties and min_tokens": (
        COMPLETIONS,
        {
            "prompt": "Over the river",
            **GREEDY,
            "presence_penalty": 0.6,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.3,
            "min_tokens": 120,
        },
    ),
    "chat, seeded sampling": (CHAT, {"messages": MESSAGES, **GREEDY, "temperature": 0.9, "seed": 7}),
    "completion, seeded, top_p and top_k": (
        COMPLETIONS,
        {"prompt": "Dice", **GREEDY, "temperature": 1.2, "seed": 1234567, "top_p": 0.95, "top_k": 50},
    ),
    "chat, logprobs": (CHAT, {"messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": 3}),
    "completion, logprobs": (COMPLETIONS, {"prompt": "Numbers", **GREEDY, "logprobs": 2}),
    "usage in every event": (
        CHAT,
        {"messages": MESSAGES, **GREEDY, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "logit_bias, bad_words, allowed_token_ids": (
        COMPLETIONS,
        {"prompt": "Some", **GREEDY, "bad_words": ["the"], "allowed_token_ids": list(range(100, 900))},
    ),
    "a prompt of 60 blocks": (COMPLETIONS, {"prompt": "river " * 1900, **GREEDY, **USAGE}),
    "cache_salt": (CHAT, {"messages": MESSAGES, **GREEDY, "cache_salt": "tenant-1"}),
}


@pytest.mark.parametrize("kind", list(KINDS))
async def test_output_equals_the_unmoved_run(client: Client, kind: str) -> None:
    path, body = KINDS[kind]
    alone = await client.run(path, **body)
    moved = await client.moved(path, alone, **body)
    assert_same(moved, alone)


async def test_there_and_back_equals_the_unmoved_run(client: Client) -> None:
    body = {"messages": MESSAGES, **GREEDY, **USAGE, "max_tokens": 300, "logprobs": True, "top_logprobs": 1}
    alone = await client.run(CHAT, **body)
    moved = await client.moved(CHAT, alone, move_at=[30, 120], **body)
    first, second = moved.committed()
    assert (first["source_id"], first["destination_id"]) == (second["destination_id"], second["source_id"])
    assert_same(moved, alone)


async def test_a_stop_string_across_the_move_is_found(client: Client) -> None:
    """Texts of eight tokens after the order to move are stop strings by their middles: none is lost, none is early."""
    alone = await twin(client, COMPLETIONS, prompt="Stop signs", **GREEDY)
    pieces = [choice["text"] for choice in alone.choices()]
    moved_at: list[int] = []
    for position in range(60, 220, 8):
        stop = "".join(pieces[position : position + 8])
        if len(pieces) < position + 8 or alone.text.count(stop) != 1 or len(stop) < 8:
            continue
        stop = stop[1:-1]
        expected = await twin(client, COMPLETIONS, prompt="Stop signs", stop=[stop], **GREEDY)
        moved = await client.run(COMPLETIONS, move_at=[30], prompt="Stop signs", stop=[stop], **GREEDY)
        assert expected.finish == [("stop", stop)]
        assert_same(moved, expected)
        moved_at.extend(move["output_tokens"] for move in moved.committed())
        if len(moved_at) == STOPS_AFTER_A_MOVE:
            break
    assert moved_at, "no run moved before its stop string"


async def test_text_held_back_for_a_stop_string_is_not_lost_at_the_seam(client: Client) -> None:
    """A stop string that never comes holds back its length in text at every moment, also at the move."""
    stop = ["x" * 64]
    alone = await client.run(COMPLETIONS, prompt="Held back", stop=stop, **GREEDY)
    moved = await client.moved(COMPLETIONS, alone, prompt="Held back", stop=stop, **GREEDY)
    plain = await client.run(COMPLETIONS, prompt="Held back", **GREEDY)
    assert_same(moved, alone)
    assert moved.text == plain.text


@pytest.mark.parametrize("tokens_before_the_end", [24, 8, 4, 2, 1])
async def test_max_tokens_reached_around_the_move_is_exact(client: Client, tokens_before_the_end: int) -> None:
    """The move takes a few tokens' time, so some of these commit, some meet a request that has just finished."""
    body = {"prompt": "The end", **GREEDY, "max_tokens": 64, **USAGE}
    alone = await client.run(COMPLETIONS, **body)
    moved = await client.run(COMPLETIONS, move_at=[64 - tokens_before_the_end], **body)
    assert len(moved.moves) == 1
    assert_same(moved, alone)
    assert len(moved.tokens) == 64
    assert moved.finish == [("length", None)]


async def test_fields_that_the_client_did_not_ask_for_do_not_appear(client: Client) -> None:
    """Without return_token_ids, the moved stream's events have the unmoved stream's fields, and so does its text."""
    body = {"messages": MESSAGES, **GREEDY, "max_tokens": 300, "return_token_ids": False}
    alone = await client.run(CHAT, **body)
    reply = Reply()
    moving = None
    request = {"model": client.stack.model, "stream": True, **body}
    async with client.http.stream("POST", client.url + CHAT, json=request, headers=client.headers()) as response:
        raw = b""
        async for chunk in response.aiter_bytes():
            raw += chunk
            if moving is None and raw.count(b"data: ") > 30:
                moving = await client.move(response.headers["x-request-id"])
    assert moving is not None
    assert moving["outcome"] == "committed"
    assert b": kvferry" not in raw
    assert b'"token_ids":[' not in raw
    lines = [line for line in raw.decode().splitlines() if line.startswith("data: {")]
    reply.events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert reply.text == alone.text
    assert reply.roles == alone.roles
    assert reply.finish == alone.finish
    assert {tuple(event) for event in reply.events} == {tuple(event) for event in alone.events}
    fields = {(tuple(choice), tuple(choice["delta"])) for choice in reply.choices()}
    assert fields == {(tuple(choice), tuple(choice["delta"])) for choice in alone.choices()}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "temperature": 0.8, "seed": 3}),
        (COMPLETIONS, {"prompt": "Whole", "logprobs": 3, "temperature": 0, "stop": ["never said"]}),
    ],
    ids=["chat", "completion"],
)
async def test_a_reply_that_is_not_streamed_moves_too(client: Client, path: str, body: dict[str, Any]) -> None:
    body = {"ignore_eos": True, "max_tokens": 400, **body}
    alone = await client.whole(path, **body)
    moved = await client.whole_moved(path, **body)
    assert moved["choices"] == alone["choices"]
    assert moved["usage"] == alone["usage"]
    assert moved.keys() == alone.keys()


async def test_several_requests_move_at_once_and_stay_equal(client: Client) -> None:
    bodies = [{"prompt": f"Boat number {index}", **GREEDY, "max_tokens": 300} for index in range(4)]
    alone = [await client.run(COMPLETIONS, **body) for body in bodies]
    streams = (client.moved(COMPLETIONS, expected, **body) for expected, body in zip(alone, bodies, strict=True))
    moved = await asyncio.gather(*streams)
    for reply, expected in zip(moved, alone, strict=True):
        assert_same(reply, expected)
