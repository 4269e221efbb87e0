"""A resume from tokens alone: any instance goes on exactly where the tokens end, wherever that is."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest

from gateway.wire import RESUME_HEADER, RESUMED_HEADER, SECRET_HEADER
from loadtest.client import Client, Reply
from loadtest.kinds import JSON_SCHEMA, LINES, LONG
from tests.vllm.fault_proxy import HandshakeProxy
from tests.vllm.test_equal_output import CHAT, MESSAGES
from tests.vllm.test_kinds import STRICT_TOOLS

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
TOKENS = 48


async def resume(
    client: Client, tokens: list[int], body: dict[str, Any], stream: bool = True, path: str = COMPLETIONS
) -> tuple[Reply, Any]:
    """Give instance b the tokens and open the request there; what follows, and the whole answer if not streamed."""
    url = client.stack.instance("b").url
    request_id, resume_id = uuid.uuid4().hex, uuid.uuid4().hex
    secret = {SECRET_HEADER: client.stack.secret}
    put = await client.http.put(
        f"{url}/llumlet/resumes/{resume_id}",
        json={"request_id": request_id, "output_token_ids": tokens},
        headers=secret,
    )
    assert put.status_code == 200, put.text
    request = {"model": client.stack.model, "stream": stream, "return_token_ids": True, **body}
    headers = {**secret, RESUME_HEADER: resume_id, "x-request-id": request_id}
    response = await client.http.post(url + path, json=request, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers[RESUMED_HEADER] == f"{resume_id} {len(tokens)}"
    if not stream:
        return Reply(), response.json()
    reply = Reply()
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            reply.events.append(json.loads(line.removeprefix("data: ")))
    for choice in reply.choices():
        reply.tokens.extend(choice.get("token_ids") or [])
    return reply, None


SAMPLING: dict[str, Any] = {
    "prompt": "Resume me",
    "temperature": 0.7,
    "seed": 99,
    "repetition_penalty": 1.2,
    "ignore_eos": True,
    "max_tokens": TOKENS,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize("so_far", [0, 1, 31, 32, 33, TOKENS - 1, TOKENS])
async def test_a_resume_says_only_what_follows_and_ends_as_the_whole_would(client: Client, so_far: int) -> None:
    alone = await client.run(COMPLETIONS, **SAMPLING)
    reply, _ = await resume(client, alone.tokens[:so_far], SAMPLING)
    assert reply.tokens == alone.tokens[so_far:]
    assert alone.text.endswith(reply.text)
    before = "".join(choice["text"] for choice in alone.choices()[:-1])
    assert so_far == TOKENS or len(reply.text) > 0 or before == alone.text
    assert reply.finish == alone.finish == [("length", None)]
    assert reply.usage == alone.usage


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, **{name: SAMPLING[name] for name in SAMPLING if name != "prompt"}}),
    "text held back for a stop string": (COMPLETIONS, {**SAMPLING, "stop": ["x" * 64], "max_tokens": 120}),
    "a grammar": (COMPLETIONS, {"prompt": "Lines", **LONG, "structured_outputs": {"regex": LINES}}),
    "json_schema": (CHAT, {"messages": MESSAGES, **LONG, "response_format": JSON_SCHEMA}),
    "a tool call": (CHAT, {"messages": MESSAGES, **LONG, "tools": STRICT_TOOLS, "tool_choice": "required"}),
}


@pytest.mark.parametrize("kind", RESUMED)
async def test_what_a_lost_stream_had_said_and_what_its_resume_says_are_the_whole(client: Client, kind: str) -> None:
    """F08, F10, F11: no grammar begins anew, no second turn is opened, and what was held back is said after all."""
    path, body = RESUMED[kind]
    alone = await client.run(path, **body)
    for share in (0.3, 0.8):
        said = Reply()
        for event in alone.events:
            if len(said.tokens) >= share * len(alone.tokens):
                break
            said.events.append(event)
            said.tokens.extend(token for choice in event["choices"] for token in choice.get("token_ids") or [])
        rest, _ = await resume(client, said.tokens, body, path=path)
        whole = Reply(said.events + rest.events, said.tokens + rest.tokens)
        assert (whole.tokens, whole.text) == (alone.tokens, alone.text)
        assert (whole.tool_calls, whole.roles, whole.finish) == (alone.tool_calls, alone.roles, alone.finish)


async def test_tokens_that_end_in_a_stop_string_are_complete(client: Client) -> None:
    """The instance died with the last token sent but not the finish: nothing may follow."""
    body = {**SAMPLING, "max_tokens": 200}
    plain = await client.run(COMPLETIONS, **body)
    text = "".join(choice["text"] for choice in plain.choices()[:60])
    stop = next(text[-length:] for length in range(4, 40) if plain.text.count(text[-length:]) == 1)
    alone = await client.run(COMPLETIONS, stop=[stop], **body)
    assert alone.finish == [("stop", stop)]
    reply, _ = await resume(client, alone.tokens, {**body, "stop": [stop]})
    assert reply.tokens == []
    assert reply.finish == alone.finish
    assert alone.text.endswith(reply.text)
    assert stop not in reply.text


async def test_a_resume_that_is_not_streamed_gives_the_whole_reply(client: Client) -> None:
    body = {key: value for key, value in SAMPLING.items() if key != "stream_options"}
    alone = await client.run(COMPLETIONS, **body)
    _, answer = await resume(client, alone.tokens[:20], body, stream=False)
    (choice,) = answer["choices"]
    assert choice["text"] == alone.text
    assert choice["token_ids"] == alone.tokens
    assert answer["usage"]["completion_tokens"] == TOKENS


async def test_a_move_between_unequal_kv_formats_recomputes_and_is_exact(client: Client) -> None:
    async def other_format(proxy: HandshakeProxy, request: Any, body: bytes) -> Any:
        message = json.loads(body) | {"kv_format": "of another model"}
        return await proxy.forward(request, json.dumps(message).encode())

    body: dict[str, Any] = {"prompt": "Other format " * 30, "temperature": 0, "ignore_eos": True, "max_tokens": 800}
    alone = await client.run(COMPLETIONS, **body)
    async with HandshakeProxy(client.stack.instance("b").url).running() as proxy:
        proxy.faults["reserve"] = other_format
        results: list[dict[str, Any]] = []

        class ByProxy(Client):
            async def move(self, request_id: str, destination: str | None = None) -> dict[str, Any]:
                order = {"request_id": request_id, "destination_id": "b", "destination_url": proxy.url}
                url = f"{self.stack.instance('a').url}/llumlet/migrate"
                answer = await self.http.post(url, json=order, headers={SECRET_HEADER: self.stack.secret})
                results.append(answer.json())
                return results[-1]

        by_proxy = ByProxy(client.stack)
        try:
            moved = await by_proxy.run(COMPLETIONS, move_at=[40], start_on="a", **body)
        finally:
            await by_proxy.close()
    (result,) = results
    assert result["outcome"] == "committed", result
    assert result["bytes_sent"] == 0
    assert result["blocks_sent"] == 0
    assert moved.tokens == alone.tokens
    assert moved.text == alone.text


async def test_a_reservation_whose_source_falls_silent_is_freed(client: Client) -> None:
    """As if the source had died after its first step; the lease frees the blocks without anyone's help."""
    url = client.stack.instance("b").url
    status = await client.status("a")
    reserve = {
        "request_id": "r",
        "source_id": "a",
        "kv_format": status["report"]["kv_format"],
        "agents": [["127.0.0.1", 9]],
        "read_token": "t",
        "prompt_token_ids": list(range(10, 200)),
        "output_token_ids": [],
        "cache_salt": None,
        "blocks": 5,
    }
    secret = {SECRET_HEADER: client.stack.secret}
    answer = await client.http.post(f"{url}/llumlet/migrations/silent/reserve", json=reserve, headers=secret)
    assert answer.status_code == 200, answer.text
    async with asyncio.timeout(5):
        while (await client.status("b"))["report"]["blocks_reserved"] < 5:
            await asyncio.sleep(0.05)
    await client.wait_until_empty(20.0)
