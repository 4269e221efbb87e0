"""A side of a move hangs at one step of the handshake, as a whole process, and comes back after that (SIGSTOP)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from loadtest.stack import Stack
from tests.vllm.client import ATTEMPTS_MAX, Client, Reply
from tests.vllm.fault_proxy import Fault, HandshakeProxy, refuse
from tests.vllm.test_failures import BODY, COMPLETIONS, Moving
from vllm_plugin.settings import FREEZE_LIMIT_S, RESERVATION_LEASE_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

HANG_S = FREEZE_LIMIT_S + 1.0
"""Long enough that the source gives a commit up, and that its engine goes on by itself."""


class Stopper:
    """Stops an instance's API server for a while; its engine and its workers run on."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._going_on: list[asyncio.Task[None]] = []

    def stop(self, instance_id: str, for_s: float) -> None:
        process_id = self._stack.instance(instance_id).pid
        os.kill(process_id, signal.SIGSTOP)
        self._going_on.append(asyncio.create_task(self._go_on(process_id, for_s)))

    async def close(self) -> None:
        await asyncio.gather(*self._going_on)

    async def _go_on(self, process_id: int, for_s: float) -> None:
        try:
            await asyncio.sleep(for_s)
        finally:
            os.kill(process_id, signal.SIGCONT)


@pytest_asyncio.fixture(loop_scope="session")
async def stopper(stack: Stack) -> AsyncIterator[Stopper]:
    stopper = Stopper(stack)
    yield stopper
    await stopper.close()


@pytest_asyncio.fixture(loop_scope="session")
async def proxy(stack: Stack) -> AsyncIterator[HandshakeProxy]:
    """In front of instance b's handshake."""
    async with HandshakeProxy(stack.instance("b").url).running() as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    """What a stopped side has not heard of ends with its lease."""
    client = Client(stack)
    try:
        yield client
        await client.wait_until_empty(RESERVATION_LEASE_S + 3.0)
    finally:
        await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(stack: Stack) -> Reply:
    """The stream that never moves."""
    client = Client(stack)
    try:
        return await client.run(COMPLETIONS, **BODY)
    finally:
        await client.close()


def stopping(stopper: Stopper, instance_id: str, for_s: float, *, answered: bool) -> Fault:
    """Stops the instance the first time that the step comes by: on its way, or when it is done and answered."""

    async def fault(proxy: HandshakeProxy, request: web.Request, body: bytes) -> web.StreamResponse:
        del proxy.faults[request.path.rsplit("/", 1)[-1]]
        if not answered:
            stopper.stop(instance_id, for_s)
            return await proxy.forward(request, body)
        answer = await proxy.forward(request, body)
        stopper.stop(instance_id, for_s)
        return answer

    return fault


async def move(client: Client, proxy: HandshakeProxy, alone: Reply, faults: dict[str, Fault]) -> dict[str, Any]:
    """A stream on a, ordered to b, equal to the one that never moved; the record of its move."""
    for _ in range(ATTEMPTS_MAX):  # On a busy machine the stream may have ended before the step.
        proxy.faults = dict(faults)
        moving = Moving(client, proxy)
        record: dict[str, Any]
        stream, record = await asyncio.gather(moving.stream(), moving.order())
        assert stream.tokens == alone.tokens
        assert stream.text == alone.text
        assert stream.finish == alone.finish
        assert stream.done == 1
        if all(step not in proxy.faults for step in faults if faults[step] is not refuse):
            return record
    raise AssertionError(f"the step was never reached: {record}")


@pytest.mark.parametrize("step", ["reserve", "stage"])
async def test_a_destination_that_hangs_while_the_source_decodes_on_delays_nothing(
    client: Client, proxy: HandshakeProxy, stopper: Stopper, alone: Reply, step: str
) -> None:
    """The move is made late, or not at all if the stream has ended meanwhile."""
    record = await move(client, proxy, alone, {step: stopping(stopper, "b", HANG_S, answered=False)})
    assert record["outcome"] == "committed" or record["reason"]


async def test_a_destination_that_hangs_before_the_commit_is_given_up_and_cleans_up_when_it_is_back(
    client: Client, proxy: HandshakeProxy, stopper: Stopper, alone: Reply
) -> None:
    record = await move(client, proxy, alone, {"commit": stopping(stopper, "b", HANG_S, answered=False)})
    assert record["outcome"] == "aborted"
    assert "commit" in record["reason"]


async def test_a_destination_that_hangs_after_its_commit_goes_on_where_it_was(
    client: Client, proxy: HandshakeProxy, stopper: Stopper, alone: Reply
) -> None:
    """For less than what makes the gateway lose patience: the stream stalls, and is whole."""
    record = await move(client, proxy, alone, {"commit": stopping(stopper, "b", 1.5, answered=True)})
    assert record["outcome"] == "committed", record


async def test_a_destination_that_does_not_hear_of_the_abort_frees_what_it_held(
    client: Client, proxy: HandshakeProxy, stopper: Stopper, alone: Reply
) -> None:
    faults = {"stage": refuse, "abort": stopping(stopper, "b", HANG_S, answered=False)}
    record = await move(client, proxy, alone, faults)
    assert (record["outcome"], record["reason"]) == ("aborted", "refused by the test")


@pytest.mark.parametrize("step", ["reserve", "stage"])
async def test_a_source_that_hangs_between_two_steps_loses_nothing(
    client: Client, proxy: HandshakeProxy, stopper: Stopper, alone: Reply, step: str
) -> None:
    record = await move(client, proxy, alone, {step: stopping(stopper, "a", HANG_S, answered=True)})
    assert record["outcome"] == "committed" or record["reason"]


async def test_a_source_that_hangs_when_its_commit_is_done_goes_on_by_itself_and_no_token_is_shown_twice(
    client: Client, proxy: HandshakeProxy, stopper: Stopper, alone: Reply
) -> None:
    """Both sides decode for a while. The source has not let go, so what the client sees is the source's."""
    record = await move(client, proxy, alone, {"commit": stopping(stopper, "a", HANG_S, answered=True)})
    assert record["outcome"] == "aborted", record
