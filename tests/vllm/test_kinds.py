"""Requests whose state is more than their tokens: grammars, tool calls, reasoning. All of them move."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from loadtest.client import Client, Reply
from loadtest.kinds import CALL, GRAMMAR, JSON_SCHEMA, LINES, LONG, NUMBERS_TOTAL, SCHEMA, THINKING, TOOLS
from tests.vllm.test_equal_output import CHAT, COMPLETIONS, GREEDY, MESSAGES, USAGE, assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

STRICT_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Sails.", "parameters": SCHEMA, "strict": True}}
    for name in ("sail", "row")
]
"""Their arguments follow the schema, so that they are long enough to be moved in their middle."""

GRAMMARS: dict[str, tuple[str, dict[str, Any]]] = {
    "json_schema": (CHAT, {"messages": MESSAGES, **LONG, "response_format": JSON_SCHEMA}),
    "json_object": (CHAT, {"messages": MESSAGES, **LONG, "response_format": {"type": "json_object"}}),
    "json": (COMPLETIONS, {"prompt": "Numbers", **LONG, "structured_outputs": {"json": SCHEMA}}),
    "regex": (COMPLETIONS, {"prompt": "Lines", **LONG, "structured_outputs": {"regex": LINES}}),
    "regex, seeded": (
        CHAT,
        {"messages": MESSAGES, **LONG, "temperature": 1.0, "seed": 5, "structured_outputs": {"regex": LINES}},
    ),
    "choice": (
        COMPLETIONS,
        {"prompt": "Choose", **LONG, "structured_outputs": {"choice": ["a ferry " * 40, "one boat " * 40]}},
    ),
    "grammar": (
        COMPLETIONS,
        {"prompt": "Grammar", **LONG, "min_tokens": 150, "structured_outputs": {"grammar": GRAMMAR}},
    ),
}
TOOL_CALLS: dict[str, dict[str, Any]] = {
    "auto": {"tool_choice": "auto", "structured_outputs": {"regex": f"Aye, captain. {CALL}"}},
    "parallel": {"tool_choice": "auto", "structured_outputs": {"regex": f"{CALL}\n{CALL}"}},
    "required": {"tool_choice": "required", "tools": STRICT_TOOLS},
    "named": {"tool_choice": {"type": "function", "function": {"name": "row"}}, "tools": STRICT_TOOLS},
    "none": {"tool_choice": "none"},
}


def assert_same_message(moved: Reply, alone: Reply) -> None:
    assert_same(moved, alone)
    assert moved.reasoning == alone.reasoning
    assert moved.tool_calls == alone.tool_calls


@pytest.mark.parametrize("kind", list(GRAMMARS))
async def test_a_grammar_goes_on_where_it_was(client: Client, kind: str) -> None:
    """One that began again at its root would open a second object inside the first (dynamo#7634)."""
    path, body = GRAMMARS[kind]
    body = {**body, **USAGE}
    if kind == "json_object":  # The shortest is {}: without braces that close, it is a long one.
        body["logit_bias"] = await bias(client, "}", -100)
    alone = await client.run(path, **body)
    assert len(alone.tokens) > 60, "long enough to be moved in its middle"
    moved = await client.moved(path, alone, **body)
    assert_same_message(moved, alone)
    if kind in ("json_schema", "json"):
        assert len(json.loads(moved.text)["numbers"]) == NUMBERS_TOTAL
    if kind.startswith("regex"):
        assert re.fullmatch(LINES, moved.text)


@pytest.mark.parametrize("kind", list(TOOL_CALLS))
async def test_tool_calls_go_on_where_they_were(client: Client, kind: str) -> None:
    body = {"messages": MESSAGES, **LONG, "tools": TOOLS, **TOOL_CALLS[kind], **USAGE}
    alone = await client.run(CHAT, **body)
    moved = await client.moved(CHAT, alone, **body)
    assert_same_message(moved, alone)
    assert len(moved.tool_calls) == {"parallel": 2, "none": 0}.get(kind, len(moved.tool_calls) or 1)
    if kind in ("required", "named") and alone.finish[0][0] != "length":
        assert [len(json.loads(arguments)["numbers"]) for _, arguments in moved.tool_calls] == [NUMBERS_TOTAL]


async def test_a_tool_call_there_and_back(client: Client) -> None:
    body = {"messages": MESSAGES, **LONG, "tools": TOOLS, **TOOL_CALLS["parallel"]}
    alone = await client.run(CHAT, **body)
    moved = await client.moved(CHAT, alone, move_at=[30, 130], **body)
    assert_same_message(moved, alone)


@pytest.mark.parametrize("move_at", [20, 150])
async def test_reasoning_moves_before_and_after_its_end(client: Client, move_at: int) -> None:
    body = {"messages": MESSAGES, **GREEDY, "max_tokens": 400, **THINKING, **await thinking_ends(client), **USAGE}
    alone = await client.run(CHAT, **body)
    assert len(alone.reasoning) > 100
    assert len(alone.text) > 100
    moved = await client.moved(CHAT, alone, move_at=[move_at], **body)
    assert_same_message(moved, alone)


async def test_hidden_reasoning_moves_though_the_gateway_sees_no_token_ids(client: Client) -> None:
    body = {"messages": MESSAGES, **GREEDY, "max_tokens": 400, **THINKING, **await thinking_ends(client), **USAGE}
    body["include_reasoning"] = False
    alone = await client.run(CHAT, **body)
    assert alone.reasoning == ""
    assert alone.tokens == []
    assert len(alone.text) > 100
    moved = await client.moved_after_events(CHAT, alone, events=60, **body)
    assert_same_message(moved, alone)
    moved = await client.moved_after_events(CHAT, alone, events=1, **body)  # The role: the reasoning is not shown.
    assert_same_message(moved, alone)


async def test_a_grammar_that_begins_after_the_reasoning(client: Client) -> None:
    thinking = {**THINKING, **await thinking_ends(client)}
    body = {"messages": MESSAGES, **LONG, **thinking, "structured_outputs": {"regex": LINES}}
    alone = await client.run(CHAT, **body)
    assert alone.reasoning
    assert re.fullmatch(LINES, alone.text)
    for move_at in (20, len(alone.tokens) - 120):
        moved = await client.moved(CHAT, alone, move_at=[move_at], **body)
        assert_same_message(moved, alone)


async def thinking_ends(client: Client) -> dict[str, Any]:
    """Fields with which the model ends its reasoning after some sixty tokens."""
    return {"temperature": 1.0, "seed": 3, "logit_bias": await bias(client, "</think>", 6.0)}


async def bias(client: Client, token: str, value: float) -> dict[str, float]:
    url = f"{client.stack.instance('a').url}/tokenize"
    response = await client.http.post(url, json={"prompt": token, "add_special_tokens": False})
    (token_id,) = response.json()["tokens"]
    return {str(token_id): value}


@pytest.mark.parametrize("kind", ["json_schema", "auto", "required"])
async def test_a_whole_reply_with_a_grammar_or_tool_calls_moves(client: Client, kind: str) -> None:
    tools = {"messages": MESSAGES, **LONG, "tools": TOOLS}
    body = GRAMMARS[kind][1] if kind in GRAMMARS else {**tools, **TOOL_CALLS[kind]}
    alone = await client.whole(CHAT, **body)
    moved = await client.whole_moved(CHAT, **body)
    for reply in (alone, moved):
        for call in reply["choices"][0]["message"].get("tool_calls") or []:
            call.pop("id")
    assert moved["choices"] == alone["choices"]
    assert moved["usage"] == alone["usage"]
