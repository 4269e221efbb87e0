"""Runs of token events: read together, they are what they are one by one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai import events, sse
from gateway.openai.events import Chunk, Done, Other
from gateway.openai.tokens import RunItem, Tokens, read_run

ROLE = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def event(choice: dict[str, Any], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if "delta" in choice else "text_completion"
    value = {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def chat(text: str, ids: list[int] | None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, "token_ids": ids}
    return event(choice | more)


def completion(text: str, ids: list[int]) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    return event(choice | {"prompt_token_ids": None, "token_ids": ids})


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=3)
PLAIN = st.one_of(st.builds(chat, TEXTS, IDS), st.builds(completion, TEXTS, IDS))
OTHERS = st.sampled_from(
    [
        event(ROLE),
        chat("a", None),
        chat("a", []),
        chat("a", [1], finish_reason="length", stop_reason=None),
        chat("a", [1], logprobs={"content": []}),
        event({"index": 1, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None, "token_ids": [1]}),
        event({"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [7]}),
        chat("a", [1])[:-3] + b',"usage":{"total_tokens":1}}\n\n',
        b'data: {"error":{"message":"m","code":500}}\n\n',
        b": keep-alive\n\n",
        b": kvferry prebind m1 b\n\n",
        b"event: x\n" + chat("a", [1]),
        b": comment " + chat("a", [1]),
        b"data: one\ndata: two\n\n",
        b"\n",
        b"\n\n",
        b"data: [DONE]\n\n",
    ]
)
STREAMS = st.lists(st.one_of(PLAIN, PLAIN, OTHERS), max_size=12)


def shown(items: list[RunItem], hide: bool) -> bytes:
    """What a client would get, but for what only a session knows."""
    out = b""
    for item in items:
        match item:
            case Tokens(data):
                out += data
            case Chunk(block):
                out += events.hide_token_ids(block) if hide else block
            case Other(block) | Done(block):
                out += block
    return out


def token_ids(items: list[RunItem]) -> list[int]:
    return [one for item in items if isinstance(item, Tokens | Chunk) for one in item.token_ids or ()]


def stripped(chunk: Chunk) -> Chunk:
    """An empty line too many may stand before a block or after the one before: no reader sees the difference."""
    return dataclasses.replace(chunk, block=chunk.block.strip(b"\n"))


def one_by_one(blocks: list[bytes]) -> list[RunItem]:
    return [item for block in blocks for item in events.read_block(block)]


@given(STREAMS, st.booleans())
def test_a_run_is_what_its_events_are_one_by_one(blocks: list[bytes], hide: bool) -> None:
    splitter = sse.BlockSplitter()
    apart = one_by_one([*splitter.feed(b"".join(blocks)), splitter.rest()])
    together = read_run(b"".join(blocks), hide_token_ids=hide)
    assert shown(together, hide) == shown(apart, hide)
    assert token_ids(together) == token_ids(apart)
    says_more = [stripped(item) for item in together if isinstance(item, Chunk)]
    plain = [item for item in together if isinstance(item, Tokens)]
    chunks = [stripped(item) for item in apart if isinstance(item, Chunk)]
    assert [chunk for chunk in chunks if chunk in says_more] == says_more
    assert len(chunks) == len(says_more) + sum(tokens.events for tokens in plain)


@given(st.lists(PLAIN, min_size=1, max_size=6))
def test_token_events_are_read_in_one_piece(blocks: list[bytes]) -> None:
    (item,) = read_run(b"".join(blocks), hide_token_ids=False)
    assert isinstance(item, Tokens)
    assert (item.events, item.data) == (len(blocks), b"".join(blocks))


@pytest.mark.parametrize("text", ['"token_ids":[1]', '"created":5,', "\\", '\\"', "[]", "}]}\n\ndata: {"])
def test_no_text_is_taken_for_a_field(text: str) -> None:
    (item,) = read_run(chat(text, [1, 2]), hide_token_ids=True)
    assert isinstance(item, Tokens)
    assert (item.data, item.token_ids) == (chat(text, None), [1, 2])
    assert (
        events.with_created_everywhere(item.data * 2, b"9") == item.data.replace(b'"created":1,', b'"created":9,') * 2
    )


@given(STREAMS, st.lists(st.integers(0, 3000), max_size=8))
def test_runs_are_whole_blocks_wherever_the_stream_was_cut(blocks: list[bytes], cuts: list[int]) -> None:
    data = b"".join(blocks)
    splitter = sse.BlockSplitter()
    out = b""
    begin = 0
    for end in [*sorted(cuts), len(data)]:
        piece, begin = data[begin:end], max(begin, end)
        if not piece:
            continue
        run = splitter.run(piece)
        assert run is not None
        assert run == b"" or run.endswith(b"\n\n")
        out += run
    assert out + splitter.rest() == data


def test_a_stream_with_other_line_ends_is_read_block_by_block() -> None:
    splitter = sse.BlockSplitter()
    assert splitter.run(b"data: a\n\nda") == b"data: a\n\n"
    assert splitter.run(b"ta: b\r\n\r\n") is None
    assert splitter.feed(b"ta: b\r\n\r\n") == [b"data: b\r\n\r\n"]
    assert splitter.run(b"data: c\n\n") is None
