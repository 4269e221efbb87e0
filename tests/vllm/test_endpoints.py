"""Endpoints whose requests do not move, against real vLLM servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator
from typing import Any

import openai
import pytest

from loadtest.client import Client
from loadtest.stack import Stack
from tests import node_client

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture
def api(client: Client, stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key=stack.api_key, max_retries=0) as api:
        yield api


async def post(client: Client, path: str, **fields: Any) -> Any:
    body = {"model": client.stack.model, **fields}
    response = await client.http.post(client.url + path, json=body, headers=client.headers())
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: Client, path: str, **fields: Any) -> list[tuple[str, Any]]:
    """Names and data of a stream, to its end."""
    body = {"model": client.stack.model, "stream": True, **fields}
    found: list[tuple[str, Any]] = []
    async with client.http.stream("POST", client.url + path, json=body, headers=client.headers()) as response:
        assert response.status_code == 200
        name = ""
        async for line in response.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                found.append((name, json.loads(value)))
    return found


async def test_what_is_tokenized_comes_back_as_text(client: Client) -> None:
    text = "Across the water, a ferry: naïve 水"
    tokens = (await post(client, "/tokenize", prompt=text, add_special_tokens=False))["tokens"]
    assert len(tokens) > 5
    assert (await post(client, "/detokenize", tokens=tokens))["prompt"] == text


async def test_anthropics_messages_in_one_piece_and_as_a_stream(client: Client) -> None:
    fields = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
    whole = await post(client, "/v1/messages", **fields)
    assert (whole["type"], whole["role"]) == ("message", "assistant")
    assert whole["usage"]["output_tokens"] <= 12
    text = "".join(part.get("text", "") for part in whole["content"])
    streamed = await events(client, "/v1/messages", **fields)
    assert (streamed[0][0], streamed[-1][0]) == ("message_start", "message_stop")
    deltas = [data["delta"] for name, data in streamed if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == text
    counted = await post(client, "/v1/messages/count_tokens", messages=fields["messages"])
    assert counted["input_tokens"] == whole["usage"]["input_tokens"]


async def test_an_error_of_messages_has_anthropics_shape(client: Client) -> None:
    body = {"model": "no-such-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    response = await client.http.post(f"{client.url}/v1/messages", json=body, headers=client.headers())
    assert response.status_code == 404
    assert response.json()["type"] == "error"
    assert set(response.json()["error"]) >= {"type", "message"}


async def test_a_response_and_its_stream_under_the_openai_client(api: openai.OpenAI, stack: Stack) -> None:
    arguments: dict[str, Any] = {"model": stack.model, "input": "Hello", "max_output_tokens": 12, "temperature": 0}
    whole = api.responses.create(**arguments)
    streamed = list(api.responses.create(**arguments, stream=True))
    assert (streamed[0].type, streamed[-1].type) in [
        ("response.created", "response.completed"),
        ("response.created", "response.incomplete"),
    ]
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    deltas = [event.delta for event in streamed if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


async def test_a_stored_response_stays_on_its_instance_and_is_found_there(
    api: openai.OpenAI, client: Client, stack: Stack
) -> None:
    arguments: dict[str, Any] = {"model": stack.model, "max_output_tokens": 8, "temperature": 0}
    for turn in range(4):  # Wherever dispatch puts them.
        kept = api.responses.create(**arguments, input=f"Remember {turn}")
        asked = [await client.http.get(f"{one.url}/v1/responses/{kept.id}") for one in stack.instances]
        assert sorted(answer.status_code for answer in asked) == [200, 404]
        for _ in range(3):
            assert api.responses.retrieve(kept.id).output_text == kept.output_text
        following = api.responses.create(**arguments, input="And then?", previous_response_id=kept.id)
        assert following.previous_response_id == kept.id
        assert following.usage is not None
        assert kept.usage is not None
        assert following.usage.input_tokens > kept.usage.input_tokens + kept.usage.output_tokens
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve("resp_unknown")


@pytest.mark.skipif(node_client.MISSING is not None, reason=node_client.MISSING or "")
async def test_the_official_client_for_node(client: Client, stack: Stack) -> None:
    async def node(scenario: str, until: Awaitable[object] | None = None) -> Any:
        return await node_client.run(scenario, stack.gateway_url, stack.api_key, stack.model, until)

    async def one_runs() -> None:
        while not any([(await client.status(one.id))["requests"] for one in stack.instances]):
            await asyncio.sleep(0.05)

    chat, stream = await node("chat"), await node("stream")
    assert chat["models"] == [stack.model]
    assert stream == {"content": chat["content"], "finish": stream["finish"], "usage": chat["usage"], "ids": 1}
    assert (await node("structured"))["n"] in (7, 8)
    responses = await node("responses")
    assert responses["events"][0] == "response.created"
    assert responses["kept"].startswith("resp_")
    assert responses["unknown"]["status"] == 404
    assert {error["status"] for error in (await node("errors")).values()} == {400, 401, 404}
    # What these two leave behind, the fixture would find on an instance.
    assert (await node("abort_before_the_reply", one_runs()))["kind"] == "APIUserAbortError"
    assert (await node("abort_a_stream"))["chunks"] >= 2
