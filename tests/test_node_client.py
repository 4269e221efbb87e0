"""The official client for Node, against the gateway. Node is optional: without it, these are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests import node_client
from tests.conftest import Running, StartGateway, until
from tests.fake_instance import MODEL, FakeInstance, instances
from tests.node_client import ANSWERS_IN_S, MISSING
from tests.openai_replies import (
    EMBEDDINGS,
    TOOL_CALLS,
    breaks_in_its_stream,
    calls_tools,
    embeds,
    follows_a_schema,
    responds,
)
from tests.scripts import gone, moves_after, silent, starts_and_waits
from tests.test_openai_client import KEY, WHOLE

USAGE = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}

pytestmark = [
    pytest.mark.slow,  # A Node a test.
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
]

Cluster = tuple[Running, FakeInstance, FakeInstance]


@pytest_asyncio.fixture
async def cluster(start_gateway: StartGateway) -> AsyncIterator[Cluster]:
    async with instances("a", "b") as (a, b), start_gateway(a, b, api_keys=(KEY,)) as running:
        yield running, a, b


async def node(running: Running, scenario: str) -> Any:
    return await node_client.run(scenario, running.url, KEY, MODEL)


async def test_replies_in_one_piece(cluster: Cluster) -> None:
    assert await node(cluster[0], "chat") == {"content": WHOLE, "usage": USAGE, "text": WHOLE, "models": [MODEL]}


async def test_a_stream_that_moves_is_one_reply(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = moves_after(3, b)
    assert await node(running, "stream") == {"content": WHOLE, "finish": "length", "usage": USAGE, "ids": 1}
    assert len(b.received) == 1


async def test_tool_calls_that_come_in_pieces_are_put_together(cluster: Cluster) -> None:
    running, a, _ = cluster
    a.script = calls_tools
    assert await node(running, "tools") == {"calls": TOOL_CALLS, "finish": "tool_calls"}
    assert a.received[0].json["tools"][0]["function"]["name"] == "weather"


async def test_a_schema_reaches_the_instance_as_it_was_given(cluster: Cluster) -> None:
    running, a, _ = cluster
    a.script = follows_a_schema
    assert await node(running, "structured") == {"n": 7}
    asked = a.received[0].json["response_format"]["json_schema"]
    assert (asked["strict"], asked["schema"]["required"]) == (True, ["n"])


async def test_responses_and_what_follows_on_them(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = b.script = responds
    told = await node(running, "responses")
    unknown = told.pop("unknown")
    assert told == {"text": "hi", "events": ["response.created", "response.completed"], "kept": "resp_1"}
    assert (unknown["kind"], unknown["status"]) == ("NotFoundError", 404)
    homes = [fake for fake in (a, b) for received in fake.received if "resp_1" in received.path + str(received.body)]
    assert len(homes) == 2
    assert homes[0] is homes[1]


async def test_embeddings_come_in_the_clients_own_encoding(cluster: Cluster) -> None:
    running, a, _ = cluster
    a.script = embeds
    assert await node(running, "embeddings") == EMBEDDINGS
    assert a.received[0].json["encoding_format"] == "base64"


async def test_errors_are_the_clients_own_kinds(cluster: Cluster) -> None:
    running, a, _ = cluster
    told = await node(running, "errors")
    assert {name: (error["kind"], error["status"]) for name, error in told.items()} == {
        "unknown": ("NotFoundError", 404),
        "refused": ("BadRequestError", 400),
        "key": ("AuthenticationError", 401),
    }
    assert "kv_transfer_params" in told["refused"]["message"]
    assert not a.received


async def test_an_error_within_a_stream_is_raised(cluster: Cluster) -> None:
    running, a, _ = cluster
    a.script = breaks_in_its_stream
    told = await node(running, "broken")
    assert told["kind"] == "APIError"
    assert "queue full" in told["message"]


async def test_an_abort_before_the_reply_reaches_the_instance(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = silent
    told = await node_client.run("abort_before_the_reply", running.url, KEY, MODEL, until=asked(a))
    assert told["kind"] == "APIUserAbortError"
    await gone(await a.exchange())
    assert not b.received


async def asked(fake: FakeInstance) -> None:
    await until(lambda: fake.exchanges, ANSWERS_IN_S)


async def test_an_abort_of_a_stream_reaches_the_instance(cluster: Cluster) -> None:
    running, a, b = cluster
    a.script = starts_and_waits
    assert (await node(running, "abort_a_stream"))["chunks"] >= 2
    await gone(await a.exchange())
    assert not b.received
