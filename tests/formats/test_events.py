"""What is read from an event, and the bytes that are changed in it."""

from __future__ import annotations

from gateway import wire
from gateway.openai import events
from gateway.openai.events import Chunk, Done, Other

# As vLLM 0.32.0 writes them, with and without return_token_ids.
PAIRS = [
    (
        b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":%s,'
        b'"prompt_text":null}\n\n'
    ),
    (
        b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"content":"hi"},"logprobs":null,"finish_reason":null,"token_ids":%s}]}\n\n'
    ),
    (
        b'data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"hi",'
        b'"logprobs":null,"finish_reason":"stop","stop_reason":null,"prompt_token_ids":%s,"token_ids":%s}]}\n\n'
    ),
]


def chunk(block: bytes) -> Chunk:
    (item,) = events.read_block(block)
    assert isinstance(item, Chunk)
    return item


def test_an_event_with_its_ids_hidden_is_what_vllm_sends_without_them() -> None:
    for pattern in PAIRS:
        count = pattern.count(b"%s")
        assert events.hide_token_ids(pattern % ((b"[5,6]",) * count)) == pattern % ((b"null",) * count)


def test_text_that_looks_like_a_field_is_left_alone() -> None:
    content = b'\\"token_ids\\":[1,2],\\"finish_reason\\":\\"stop\\"'
    text = b'data: {"choices":[{"index":0,"delta":{"content":"' + content + b'"}}]}\n\n'
    assert events.hide_token_ids(text) == text
    item = chunk(text)
    assert item.token_ids is None
    assert not item.finished


def test_a_chunk_is_read() -> None:
    role, token, last = (pattern % ((b"[5,6]",) * pattern.count(b"%s")) for pattern in PAIRS)
    assert chunk(role).role
    assert chunk(role).token_ids is None
    assert (chunk(token).token_ids, chunk(token).finished, chunk(token).role) == ([5, 6], False, False)
    assert (chunk(last).token_ids, chunk(last).finished) == ([5, 6], True)
    spaced = b'data: {"choices": [ {"index": 0, "finish_reason": "stop", "token_ids": [1, 2]} ], "usage": {"a": 1}}\n\n'
    assert (chunk(spaced).token_ids, chunk(spaced).finished, chunk(spaced).usage) == ([1, 2], True, True)
    usage = chunk(b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n')
    assert (usage.has_choice, usage.usage) == (False, True)
    assert chunk(b'data: {"error":{"message":"x"}}\n\n').error
    assert not chunk(b'data: {"choices":[{"delta":{"content":"{\\"error\\":{}"}}]}\n\n').error


def test_done_and_comments_are_told_apart() -> None:
    assert events.read_block(b"data: [DONE]\n\n") == [Done(b"data: [DONE]\n\n")]
    assert events.read_block(b"data:[DONE]\r\n\r\n") == [Done(b"data:[DONE]\r\n\r\n")]
    assert events.read_block(b": ping\n\n") == [Other(b": ping\n\n")]
    for comment in (wire.Prebind("m", "b"), wire.Unbind("m"), wire.Moved("m", "b", 7)):
        assert events.read_block(wire.encode_comment(comment)) == [comment]


def test_our_comments_are_taken_out_of_what_is_passed_on() -> None:
    assert events.read_block(b": kvferry later x\n\n") == []
    assert events.read_block(b": kvferry unbind m\ndata: [DONE]\n\n") == [wire.Unbind("m"), Done(b"data: [DONE]\n\n")]
    told = b'data: {"choices":[{"delta":{"content":": kvferry unbind m"}}]}\n\n'
    assert chunk(told).block == told


def test_created_is_rewritten_once_and_only_in_its_own_place() -> None:
    block = b'data: {"id":"x","created":12,"choices":[{"delta":{"content":"\\"created\\":5"}}]}\n\n'
    assert events.created(block) == b"12"
    assert events.with_created(block, b"1700") == block.replace(b"12", b"1700")
    assert events.with_created(block, b"12") is block
    assert events.with_created(b"data: x\n\n", b"1") == b"data: x\n\n"


def test_a_last_event_without_its_blank_line_counts_only_if_it_is_whole() -> None:
    assert events.completed(b"data: [DONE]") == b"data: [DONE]\n\n"
    assert events.completed(b'data: {"a":1}\n') == b'data: {"a":1}\n\n'
    assert events.completed(b'data: {"a":') is None
    assert events.completed(b"") is None


def test_what_is_nested_too_deeply_to_be_read_says_nothing() -> None:
    deep = b"[" * 50_000 + b"]" * 50_000
    assert events.failure(b'{"error":{"a":' + deep + b"}}") is None
    assert events.completed(b'data: {"a":' + deep + b"}") is None
