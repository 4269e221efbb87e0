"""The official client, against the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio

from tests.conftest import Running, StartGateway
from tests.fake_instance import MODEL, FakeInstance, error_body, instances, text
from tests.scripts import answers, moves_after

KEY = "client-key"
WHOLE = "".join(text(index) for index in range(8))
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


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
        a.script = answers(
            b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n',
            b'data: {"error":{"message":"queue full","type":"Busy","param":null,"code":503}}\n\n',
        )
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="queue full"):
            [chunk async for chunk in stream]
    async with async_client(running, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


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
