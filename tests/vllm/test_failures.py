"""What goes wrong during a move never reaches the client: before the commit the request goes on where it was."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio

from gateway.app import Gateway
from gateway.config import Settings
from gateway.policy.decide import Policy
from gateway.wire import SECRET_HEADER
from loadtest.client import ATTEMPTS_MAX, Client, Reply, events
from loadtest.stack import Stack
from tests.conftest import serve, until
from tests.cutting_proxy import CuttingProxy
from tests.vllm.fault_proxy import Fault, HandshakeProxy, cut, dead_agents, hang, lose_reply, refuse
from tests.vllm.twins import twin
from vllm_plugin.settings import RESERVATION_LEASE_S

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS = "/v1/completions"
FREED_WITHIN_S = 2.0
BODY: dict[str, Any] = {"prompt": "When it fails", "temperature": 0, "ignore_eos": True, "max_tokens": 600}


@pytest_asyncio.fixture(loop_scope="session")
async def proxy(stack: Stack) -> AsyncIterator[HandshakeProxy]:
    """In front of instance b's handshake."""
    async with HandshakeProxy(stack.instance("b").url).running() as proxy:
        yield proxy


class Moving:
    """A stream on instance a, and moves to b by way of the proxy, ordered at a's llumlet itself."""

    def __init__(self, client: Client, proxy: HandshakeProxy, body: dict[str, Any] = BODY) -> None:
        self.client = client
        self.proxy = proxy
        self.body = body
        self.reply = Reply()
        self.started = asyncio.Event()
        self.tokens_wanted = 40

    async def stream(self, **fields: Any) -> Reply:
        async with self.client.stream(COMPLETIONS, "a", **{**self.body, **fields}) as response:
            self.reply.request_id = response.headers["x-request-id"]
            async for _ in events(response, self.reply):
                if len(self.reply.tokens) >= self.tokens_wanted:
                    self.started.set()
        return self.reply

    async def order(self) -> dict[str, Any]:
        await self.started.wait()
        source = self.client.stack.instance("a").url
        order = {"request_id": self.reply.request_id, "destination_id": "b", "destination_url": self.proxy.url}
        response = await self.client.http.post(
            f"{source}/llumlet/migrate", json=order, headers={SECRET_HEADER: self.client.stack.secret}
        )
        if response.status_code == 404:  # On a busy machine, the stream may have ended before the order came.
            return {"outcome": "aborted", "reason": response.text}
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("reserve", refuse),
        ("reserve", dead_agents),
        ("stage", cut),
        ("commit", refuse),
        ("commit", cut),
        ("commit", lose_reply),
    ],
)
async def test_a_move_that_fails_before_its_commit_is_known_leaves_the_request_running(
    client: Client, proxy: HandshakeProxy, step: str, fault: Fault
) -> None:
    alone = await twin(client, COMPLETIONS, **BODY)
    proxy.faults[step] = fault
    for _ in range(ATTEMPTS_MAX):  # On a busy machine the stream may have ended before the step.
        moving = Moving(client, proxy)
        stream, result = await asyncio.gather(moving.stream(), moving.order())
        assert result["outcome"] == "aborted"
        assert result["reason"]
        assert stream.tokens == alone.tokens
        assert stream.text == alone.text
        assert stream.finish == alone.finish
        assert stream.done == 1
        if proxy.reached.is_set():
            return
    raise AssertionError(f"the step was never reached: {result}")


async def test_a_request_moves_after_an_earlier_move_of_it_failed(client: Client, proxy: HandshakeProxy) -> None:
    alone = await twin(client, COMPLETIONS, **BODY)
    proxy.faults["commit"] = lose_reply
    moving = Moving(client, proxy)

    async def twice() -> list[dict[str, Any]]:
        first = await moving.order()
        proxy.faults.clear()
        return [first, await moving.order()]

    stream, (first, second) = await asyncio.gather(moving.stream(), twice())
    assert (first["outcome"], second["outcome"]) == ("aborted", "committed"), second
    assert stream.tokens == alone.tokens
    assert stream.text == alone.text


async def test_a_request_that_finishes_during_its_move_ends_as_if_it_had_stayed(
    client: Client, proxy: HandshakeProxy
) -> None:
    alone = await twin(client, COMPLETIONS, **BODY)
    proxy.faults["stage"] = hang
    moving = Moving(client, proxy)
    stream, result = await asyncio.gather(moving.stream(), moving.order())
    assert result["outcome"] == "aborted"
    assert stream.tokens == alone.tokens
    assert stream.finish == alone.finish
    assert stream.done == 1


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_client_that_leaves_frees_both_instances_within_two_seconds(
    client: Client, proxy: HandshakeProxy, when: str
) -> None:
    moving = Moving(client, proxy)
    stream = asyncio.create_task(moving.stream(max_tokens=2000))
    order: asyncio.Task[dict[str, Any]] | None = None
    if when == "during":
        proxy.faults["stage"] = hang
        order = asyncio.create_task(moving.order())
        await proxy.reached.wait()
    elif when == "after":
        assert (await moving.order())["outcome"] == "committed"
        tokens = len(moving.reply.tokens)
        async with asyncio.timeout(10):
            while len(moving.reply.tokens) < tokens + 20:  # It goes on at b.
                await asyncio.sleep(0.01)
    else:
        await moving.started.wait()
    stream.cancel()
    await asyncio.wait([stream])
    await client.wait_until_empty(FREED_WITHIN_S)
    if order is not None:
        assert (await order)["outcome"] == "aborted"


async def on_a(client: Client, output_tokens: int) -> str:
    """The id of the only request on instance a, once it has that many output tokens."""
    async with asyncio.timeout(30):
        while True:
            for request in (await client.status("a"))["requests"]:
                if request["output_tokens"] >= output_tokens:
                    return str(request["request_id"])
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("move", [False, True])
async def test_a_client_of_a_whole_reply_that_leaves_frees_both_instances_within_two_seconds(
    client: Client, move: bool
) -> None:
    body = {"model": client.stack.model, **BODY, "max_tokens": 2000}
    async with client.only("a"):
        post = asyncio.create_task(client.http.post(client.url + COMPLETIONS, json=body, headers=client.headers()))
        request_id = await on_a(client, output_tokens=20)
    if move:
        ordered = await client.move(request_id, "b")
        assert (ordered["status"], ordered.get("outcome")) == (200, "committed"), ordered
    post.cancel()
    await asyncio.wait([post])
    await client.wait_until_empty(FREED_WITHIN_S)


@pytest_asyncio.fixture(loop_scope="session")
async def cutting(stack: Stack) -> AsyncIterator[CuttingProxy]:
    """In front of all of instance b, as a second gateway sees it."""
    port = urlsplit(stack.instance("b").url).port
    assert port is not None
    async with CuttingProxy(port).running() as proxy:
        yield proxy


def has_heard_of_both(gateway: Gateway) -> bool:
    members = gateway.members.all()
    return len(members) == 2 and all(member.usable and member.report is not None for member in members)


@pytest_asyncio.fixture(loop_scope="session")
async def behind_cutting(stack: Stack, cutting: CuttingProxy) -> AsyncIterator[Client]:
    """A client of a second gateway, which reaches b only through the cutting proxy."""
    gateway = Gateway(
        Settings(
            secret=stack.secret,
            instance_urls=(stack.instance("a").url, cutting.url),
            redis_url=stack.redis_url,
            admin_key=stack.admin_key,
            api_keys=(stack.api_key,),
            policy=Policy.NONE,
        )
    )
    async with serve(gateway) as url:
        client = Client(stack, url)
        await until(lambda: has_heard_of_both(gateway))
        try:
            yield client
            # What the gateway cannot reach to give up ends with its lease.
            await client.wait_until_empty(RESERVATION_LEASE_S + 3.0)
        finally:
            await client.close()


async def test_a_stream_whose_destination_is_lost_after_the_commit_is_resumed_exactly(
    behind_cutting: Client, cutting: CuttingProxy
) -> None:
    client = behind_cutting
    body = {**BODY, "temperature": 0.9, "seed": 11, "frequency_penalty": 0.4}
    alone = await client.run(COMPLETIONS, **body)
    for _ in range(ATTEMPTS_MAX):  # On a busy machine the stream may have ended before the order came.
        reply = Reply()
        move: dict[str, Any] = {}
        async with client.stream(COMPLETIONS, "a", **body) as response:
            async for _ in events(response, reply):
                if not move and len(reply.tokens) >= 40:
                    move = await client.move(response.headers["x-request-id"], "b")
                is_due = len(reply.tokens) >= move.get("output_tokens", math.inf) + 20
                if is_due and not cutting.refusing:
                    cutting.lose()
        assert reply.tokens == alone.tokens
        assert reply.text == alone.text
        assert reply.finish == alone.finish
        assert reply.done == 1
        assert len(reply.identity()) == 1, reply.identity()
        if move["status"] != 404:
            break
    assert move.get("outcome") == "committed", move
    assert cutting.refusing


async def test_a_destination_that_the_gateway_cannot_reach_at_the_move_is_replaced_by_a_resume(
    behind_cutting: Client, cutting: CuttingProxy
) -> None:
    """The llumlets agree on the move, but the gateway's own way to b is gone before it can bind there."""
    client = behind_cutting
    body = {**BODY, "max_tokens": 1500}  # The source waits some seconds for the gateway to come.
    alone = await client.run(COMPLETIONS, **body)
    reply = Reply()
    move: asyncio.Task[dict[str, Any]] | None = None
    async with client.stream(COMPLETIONS, "a", **body) as response:
        async for _ in events(response, reply):
            if move is None and len(reply.tokens) >= 40:
                cutting.lose()
                move = asyncio.create_task(order_at_a(client, response.headers["x-request-id"]))
    assert move is not None
    moved = await move
    assert moved["outcome"] == "committed", moved
    assert reply.tokens == alone.tokens
    assert reply.text == alone.text
    assert reply.finish == alone.finish
    assert reply.done == 1


async def order_at_a(client: Client, request_id: str) -> dict[str, Any]:
    """Order a move at a's llumlet itself, with b's own address: the gateway would give the proxy's."""
    order = {
        "request_id": request_id,
        "destination_id": "b",
        "destination_url": client.stack.instance("b").url,
    }
    url = f"{client.stack.instance('a').url}/llumlet/migrate"
    response = await client.http.post(url, json=order, headers={SECRET_HEADER: client.stack.secret})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def test_a_reply_that_is_not_streamed_survives_the_loss_of_its_destination(
    behind_cutting: Client, cutting: CuttingProxy
) -> None:
    client = behind_cutting
    request = {"model": client.stack.model, **BODY}

    async def post() -> httpx.Response:
        return await client.http.post(client.url + COMPLETIONS, json=request, headers=client.headers())

    alone = (await post()).json()
    for _ in range(ATTEMPTS_MAX):  # On a busy machine the reply may be complete before the order came.
        async with client.only("a"):
            running = asyncio.create_task(post())
            request_id = await on_a(client, output_tokens=10)
        move = await client.move(request_id, "b")
        if move["status"] != 404:
            break
        await running
    assert move.get("outcome") == "committed", move
    cutting.lose()
    response = await running
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == alone["choices"]
    assert response.json()["usage"] == alone["usage"]
