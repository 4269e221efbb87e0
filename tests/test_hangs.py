"""An instance hangs with its connections open: its replies go on elsewhere, and it is used again when it is back."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from gateway.config import Budgets
from gateway.serving.watch import TOLD_S
from gateway.wire import MOVED_HEADER
from tests.conftest import INTERVALS, StartGateway, until
from tests.fake_instance import Exchange, FakeInstance, Generation, Script, generate, instances, token_ids
from tests.scripts import gone, in_turn, moved, normal, prebind, silent, starts_and_waits

BUDGETS = Budgets(hang_s=0.6, header_grace_s=0.05)
QUICK = dataclasses.replace(INTERVALS, report_stale_s=0.6)


def stops_after(tokens: int) -> Script:
    """Under SIGSTOP after so many tokens, in the middle of everything."""

    async def script(exchange: Exchange) -> None:
        if exchange.request.json.get("stream"):
            await exchange.start()
            await exchange.send(*Generation(exchange.request).upto(tokens))
        exchange.instance.runs.clear()
        await exchange.client_gone.wait()

    return script


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_of_a_stopped_process_goes_on_elsewhere(stream: bool, start_gateway: StartGateway) -> None:
    async with (
        instances("a", "b") as (a, b),
        start_gateway(a, b, budgets=BUDGETS, intervals=QUICK) as running,
    ):
        unmoved = normal((await running.chat(stream=stream)).content)
        a.script = stops_after(3)
        async with asyncio.timeout(60):
            assert normal((await running.chat(stream=stream)).content) == unmoved
        assert [resume.output_token_ids for resume in b.resumes.values()] == ([token_ids(0, 3)] if stream else [])
        await gone(a.exchanges[-1])

        # Silent, it gets nothing new; and it comes back by itself.
        await until(lambda: running.gateway.members.view(asyncio.get_running_loop().time()).instances[0].stale)
        received = len(a.received)
        assert (await running.chat()).status_code == 200
        assert len(a.received) == received
        a.script = generate
        a.runs.set()
        await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "a")
        assert (await running.chat()).status_code == 200
        assert len(a.received) == received + 1


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_step_is_no_hang(stream: bool, start_gateway: StartGateway) -> None:
    """No report and no status while it lasts, but the API server answers."""

    async def long_prefill(exchange: Exchange) -> None:
        exchange.instance.engine_busy = True
        await asyncio.sleep(5)  # Far longer than a hang, which is far longer than a machine stands still.
        exchange.instance.engine_busy = False
        await generate(exchange)

    async with (
        instances("a", "b") as (a, b),
        start_gateway(a, b, budgets=dataclasses.replace(BUDGETS, hang_s=3), intervals=QUICK) as running,
    ):
        a.script = long_prefill
        assert (await running.chat(stream=stream)).status_code == 200
        assert (len(a.received), len(b.received)) == (1, 0)


async def test_a_gateway_that_stood_still_itself_blames_nobody(start_gateway: StartGateway) -> None:
    """What the instances have said meanwhile is there, and has not been read."""
    ready = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await ready.wait()
        await generate(exchange)

    async with instances("a", "b") as (a, b), start_gateway(a, b, budgets=BUDGETS) as running:
        a.script = slow
        asking = asyncio.create_task(running.chat())
        await a.exchange()
        await asyncio.sleep(0.2)
        time.sleep(1)  # noqa: ASYNC251
        await asyncio.sleep(0.3)
        ready.set()
        assert (await asking).status_code == 200
        assert not b.received


async def test_an_engine_that_hangs_behind_a_live_server_is_given_up_after_a_far_longer_time(
    start_gateway: StartGateway,
) -> None:
    budgets = dataclasses.replace(BUDGETS, event_gap_s=1.5)

    async def hangs(exchange: Exchange) -> None:
        exchange.instance.engine_busy = True
        await exchange.client_gone.wait()

    async with (
        instances("a", "b") as (a, b),
        start_gateway(a, b, budgets=budgets, intervals=QUICK) as running,
    ):
        a.script = hangs
        started = asyncio.get_running_loop().time()
        assert (await running.chat()).status_code == 200
        assert asyncio.get_running_loop().time() - started >= 1.5
        assert len(b.received) == 1


async def test_a_stream_of_a_dead_engine_goes_on_elsewhere_at_once(start_gateway: StartGateway) -> None:
    """Behind a live HTTP server that says so, and never ends its streams."""
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())

        async def dies(exchange: Exchange) -> None:
            exchange.instance.health_status, exchange.instance.engine_busy = 503, True
            await starts_and_waits(exchange)

        a.script = dies
        async with asyncio.timeout(60):
            assert normal(await running.stream()) == unmoved
        assert running.gateway.members.healthy_count() == 1


async def test_an_instance_that_was_restarted_without_a_word_is_no_longer_waited_for(
    start_gateway: StartGateway,
) -> None:
    """F46: a machine that has lost its power closes no connection, and another life answers at its address."""
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        unmoved = normal(await running.stream())

        async def reborn(exchange: Exchange) -> None:
            exchange.instance.boot_id, exchange.instance._sequence = "boot-2", 0
            await starts_and_waits(exchange)

        a.script = reborn
        async with asyncio.timeout(60):
            assert normal(await running.stream()) == unmoved


async def test_what_a_restarted_instance_does_before_anybody_knows_it_goes_on(start_gateway: StartGateway) -> None:
    """F46: the new life answers at once, to a request that was opened at the old one. When it is discovered, with
    connections of its own, the reply is its own, and may be as silent as any."""
    known = asyncio.Event()

    async def new_life(exchange: Exchange) -> None:
        exchange.instance.boot_id = exchange.boot_id = "boot-2"
        exchange.instance._sequence = 0
        generation = Generation(exchange.request)
        await exchange.start()
        await exchange.send(*generation.upto(3))
        await known.wait()
        await asyncio.sleep(2 * TOLD_S)
        await exchange.send(*generation.rest(3))
        await exchange.finish()

    async with instances("a") as (a,), start_gateway(a) as running:
        unmoved = normal(await running.stream())
        a.script = in_turn(new_life, generate)
        streaming = asyncio.create_task(running.stream())
        await until(lambda: running.gateway.members.all()[0].instance.boot_id == "boot-2")
        assert (await running.chat()).status_code == 200
        known.set()
        assert normal(await streaming) == unmoved
        assert len(a.received) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_destination_that_is_stopped_after_the_commit_is_given_up(
    stream: bool, start_gateway: StartGateway
) -> None:
    async with (
        instances("a", "b") as (a, b),
        start_gateway(a, b, budgets=BUDGETS, intervals=QUICK) as running,
    ):
        unmoved = normal((await running.chat(stream=stream)).content)

        async def source(exchange: Exchange) -> None:
            exchange.instance.script = generate
            if not stream:
                b.runs.clear()
                await exchange.json(409, {}, {MOVED_HEADER: "m1 b 3"})
                return
            await exchange.start()
            await exchange.send(*Generation(exchange.request).upto(3), prebind(b))
            await b.exchange()
            b.runs.clear()
            await exchange.send(moved(b, 3))
            await exchange.client_gone.wait()

        a.script, b.script = source, silent
        async with asyncio.timeout(60):
            assert normal((await running.chat(stream=stream)).content) == unmoved


async def test_a_source_that_is_stopped_while_a_destination_waits_is_given_up(start_gateway: StartGateway) -> None:
    async with (
        instances("a", "b", "c") as (a, b, c),
        start_gateway(a, b, c, budgets=BUDGETS, intervals=QUICK) as running,
    ):
        unmoved = normal(await running.stream())

        async def source(exchange: Exchange) -> None:
            await exchange.start()
            await exchange.send(*Generation(exchange.request).upto(3), prebind(c))
            waiting.append(await c.exchange())
            exchange.instance.runs.clear()
            await exchange.client_gone.wait()

        waiting: list[Exchange] = []
        a.script, c.script = source, silent_then_generate
        async with asyncio.timeout(60):
            assert normal(await running.stream()) == unmoved
        await gone(*waiting)


async def silent_then_generate(exchange: Exchange) -> None:
    instance: FakeInstance = exchange.instance
    instance.script = generate
    await silent(exchange)
