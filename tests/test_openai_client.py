"""The official client, against the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import openai
import pydantic
import pytest
import pytest_asyncio

from tests.conftest import Running, StartGateway
from tests.fake_instance import MODEL, FakeInstance, error_body, instances, text
from tests.openai_replies import (
    EMBEDDINGS,
    TOOL_CALLS,
    breaks_in_its_stream,
    calls_tools,
    embeds,
    follows_a_schema,
    responds,
)
from tests.scripts import gone, in_turn, moves_after, silent, starts_and_waits

KEY = "client-key"
WHOLE = "".join(text(index) for index in range(8))
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
WEATHER: openai.types.chat.ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest_asyncio.fixture
async def cluster(start_gateway: StartGateway) -> AsyncIterator[tuple[Running, FakeInstance, FakeInstance]]:
    async with instances("a", "b") as (a, b), start_gateway(a, b, api_keys=(KEY,)) as running:
        yield running, a, b


def async_client(running: Running, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


Cluster = tuple[Running, FakeInstance, FakeInstance]


async def test_chat_in_one_piece(cluster: Cluster) -> None:
    async with async_client(cluster[0]) as client:
        reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    assert reply.choices[0].message.content == WHOLE
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 8)


async def test_a_chat_stream_that_moves(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = moves_after(3, b)
    async with async_client(running) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == WHOLE
    assert [choice.delta.role for choice in choices].count("assistant") == 1
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == [8]


async def test_completions_in_both_ways(cluster: Cluster) -> None:
    running, a, b = cluster
    async with async_client(running) as client:
        whole = await client.completions.create(model=MODEL, prompt="hello", max_tokens=8)
        a.script = moves_after(5, b)
        stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=8, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == streamed == WHOLE


async def test_models(cluster: Cluster) -> None:
    async with async_client(cluster[0]) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_errors_are_the_clients_own_kinds(cluster: Cluster) -> None:
    running, a, _ = cluster
    async with async_client(running) as client:
        with pytest.raises(openai.NotFoundError, match="The model `x` does not exist"):
            await client.chat.completions.create(model="x", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"kv_transfer_params": {}})

        async def refuse(exchange: object) -> None:
            await a.exchanges[-1].json(400, error_body("too long", "BadRequestError", 400))

        a.script = refuse
        with pytest.raises(openai.BadRequestError, match="too long"):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        a.script = breaks_in_its_stream
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="queue full"):
            [chunk async for chunk in stream]
    async with async_client(running, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_tool_calls_that_come_in_pieces_are_put_together(cluster: Cluster) -> None:
    running, a, _ = cluster
    a.script = calls_tools
    async with (
        async_client(running) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[WEATHER]) as stream,
    ):
        choice = (await stream.get_final_completion()).choices[0]
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    assert (calls, choice.finish_reason) == (TOOL_CALLS, "tool_calls")
    assert a.received[0].json["tools"][0]["function"]["name"] == "weather"


class Answer(pydantic.BaseModel):
    n: int


async def test_a_schema_reaches_the_instance_as_it_was_given(cluster: Cluster) -> None:
    running, a, _ = cluster
    a.script = follows_a_schema
    async with async_client(running) as client:
        reply = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
    assert reply.choices[0].message.parsed == Answer(n=7)
    asked = a.received[0].json["response_format"]["json_schema"]
    assert (asked["strict"], asked["schema"]["required"]) == (True, ["n"])


async def test_responses_and_what_follows_on_them(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = b.script = responds
    async with async_client(running) as client:
        kept = await client.responses.create(model=MODEL, input="hello")
        stream = await client.responses.create(model=MODEL, input="hello", stream=True)
        assert [event.type async for event in stream] == ["response.created", "response.completed"]
        assert (await client.responses.retrieve(kept.id)).output_text == kept.output_text == "hi"
        await client.responses.create(model=MODEL, input="and then?", previous_response_id=kept.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve("resp_unknown")
    homes = [fake for fake in (a, b) for received in fake.received if kept.id in received.path + str(received.body)]
    assert len(homes) == 2
    assert homes[0] is homes[1]


async def test_embeddings_come_in_the_clients_own_encoding(cluster: Cluster) -> None:
    running, a, _ = cluster
    a.script = embeds
    async with async_client(running) as client:
        reply = await client.embeddings.create(model=MODEL, input=["a", "b"])
    assert [one.embedding for one in reply.data] == EMBEDDINGS
    assert a.received[0].json["encoding_format"] == "base64"


async def test_an_abort_reaches_the_instance_before_the_reply_and_within_it(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = in_turn(silent, starts_and_waits)
    async with async_client(running) as client:
        create = client.chat.completions.create
        asking = asyncio.ensure_future(create(model=MODEL, messages=MESSAGES))
        exchange = await a.exchange()
        asking.cancel()
        await gone(exchange)
        async with await create(model=MODEL, messages=MESSAGES, stream=True) as stream:
            await anext(stream)
        await gone(a.exchanges[-1])
    assert (len(a.received), len(b.received)) == (2, 0)


async def test_the_synchronous_client(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = moves_after(3, b)

    def talk() -> Iterator[str]:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as client:
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, stream=True)
            yield from (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="x", prompt="hello")

    assert "".join(await asyncio.to_thread(lambda: list(talk()))) == WHOLE
