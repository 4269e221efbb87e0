"""What is read from a request body, and how it goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.openai.body import GenerateBody, read_body


def body(**fields: Any) -> GenerateBody:
    return read_body(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("fields", "one"),
    [
        ({}, True),
        ({"n": 1}, True),
        ({"n": None}, True),
        ({"n": 2}, False),
        ({"best_of": 3}, False),
        ({"use_beam_search": True}, False),
        ({"prompt": "x"}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["x"]}, True),
        ({"prompt": ["x", "y"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": None, "messages": None}, True),
    ],
)
def test_only_one_sequence_can_be_resumed(fields: dict[str, Any], one: bool) -> None:
    assert body(**fields).resumable == one


def test_streams_alone_are_asked_for_their_tokens() -> None:
    assert body(stream=True).upstream == b'{"stream": true,"return_token_ids":true}'
    assert body(stream=False, return_token_ids=False).upstream == b'{"stream": false,"return_token_ids": false}'
    assert body().upstream == b"{}"
    assert not body(stream=True, return_token_ids=False).wants_token_ids
    assert body(stream=True, return_token_ids=True).wants_token_ids
    assert body(stream=True, return_token_ids="odd").upstream == b'{"stream": true,"return_token_ids": "odd"}'


def test_hidden_reasoning_is_known() -> None:
    assert body(include_reasoning=False).hides_reasoning
    assert not body(include_reasoning=True).hides_reasoning
    assert not body().hides_reasoning


def test_a_clients_priority_is_dropped_wherever_it_stands() -> None:
    assert json.loads(read_body(b'{"priority":1,"a":2,"priority":-9}').upstream) == {"a": 2}


def test_repeated_keys_reach_the_instance_as_they_are() -> None:
    assert read_body(b'{"model":"x","model":"y"}').upstream == b'{"model":"x","model":"y"}'
    assert read_body(b'{"model":"x","model":"y"}').model == "y"


@pytest.mark.parametrize("key", ["kv_transfer_params", "kv_transf\\u0065r_params"])
def test_a_forbidden_key_is_refused_however_it_is_spelt(key: str) -> None:
    with pytest.raises(BadRequest):
        read_body(b'{"%s":null}' % key.encode())


def test_an_own_key_among_the_arguments_is_refused_even_when_it_is_repeated_away() -> None:
    with pytest.raises(BadRequest):
        read_body(b'{"vllm_xargs":{"kvferry_x":1},"vllm_xargs":{}}')
    assert body(vllm_xargs={"other": 1}).upstream == b'{"vllm_xargs": {"other": 1}}'


def test_usage_is_owed_when_it_was_asked_for() -> None:
    assert body(stream_options={"include_usage": True}).wants_usage
    not_asked: list[Any] = [None, {}, {"include_usage": False}, [], "x"]
    for options in not_asked:
        assert not body(stream_options=options).wants_usage
