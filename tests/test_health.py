"""What an instance does to requests tells of its health as much as its answers to probes."""

from __future__ import annotations

import asyncio
import dataclasses

from gateway.cluster.health import HealthSettings
from gateway.config import Budgets
from tests.conftest import INTERVALS, StartGateway, until
from tests.fake_instance import Exchange, error_body, generate, instances, metrics_page
from tests.scripts import gone, in_turn, silent, starts_and_waits
from tests.test_plain import name, stock

HEALTH = HealthSettings(stall_s=0.5)
PATIENT = Budgets(connect_s=60, hang_s=600, header_grace_s=0.05)


async def fails(exchange: Exchange) -> None:
    await exchange.json(500, error_body("broken", "InternalServerError", 500))


async def test_an_instance_that_fails_requests_gets_no_more_and_comes_back_by_itself(
    start_gateway: StartGateway,
) -> None:
    """Its probes are good all the time."""
    async with instances("a", "b") as (a, b), start_gateway(a, b, health=HEALTH) as running:
        a.script = fails
        for _ in range(6):
            assert (await running.chat()).status_code == 200
        assert (len(a.received), len(b.received)) == (3, 6)
        shown = (await running.admin("GET", "/admin/instances")).json()["instances"][0]
        assert (shown["healthy"], shown["reason"]) == (False, "The instance answered with HTTP 500.")
        a.script = generate
        await until(lambda: running.gateway.members.healthy_count() == 2)
        assert (await running.chat()).status_code == 200
        assert len(a.received) == 4


async def test_when_all_fail_half_of_them_are_still_asked(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b, health=HEALTH) as running:
        a.script = b.script = fails
        for _ in range(6):
            assert (await running.chat()).status_code == 500
        assert running.gateway.members.healthy_count() == 1
        assert (await running.client.get("/health")).status_code == 200


async def test_a_refused_connection_takes_an_instance_out_before_its_next_probe(start_gateway: StartGateway) -> None:
    slow = dataclasses.replace(INTERVALS, probe_s=60.0)
    async with instances("a", "b") as (a, b), start_gateway(a, b, intervals=slow) as running:
        await until(lambda: all(one.health.good_probes >= 2 for one in running.gateway.members.all()))
        await a.stop()
        assert (await running.chat()).status_code == 200
        assert running.gateway.members.healthy_count() == 1
        await a.listen()


async def test_an_engine_that_hangs_behind_a_server_that_answers_is_ejected_and_its_requests_move(
    start_gateway: StartGateway,
) -> None:
    """F48: /health, /v1/models and /metrics are 200, completions hang, none runs and more and more wait."""
    async with (
        stock(metrics_page()) as bad,
        stock(metrics_page(running=20, kv_usage=0.5)) as good,
        start_gateway(bad, good, health=HEALTH) as running,
    ):
        await until(lambda: all(one.load for one in running.gateway.members.all()))
        bad.script = silent
        asking = asyncio.create_task(running.chat())
        exchange = await bad.exchange()
        bad.metrics = metrics_page(waiting=7)
        assert (await asking).status_code == 200
        await gone(exchange)
        assert len(good.received) == 1
        members = running.gateway.members
        assert [one.instance.instance_id for one in members.all() if one.usable] == [name(good)]


async def test_an_instance_whose_tokens_flow_is_heard_although_its_probes_are_not_answered(
    start_gateway: StartGateway,
) -> None:
    quick = dataclasses.replace(INTERVALS, unheard_s=0.6)
    flowing = asyncio.Event()

    async def flows(exchange: Exchange) -> None:
        await exchange.start()
        while not exchange.client_gone.is_set():
            if flowing.is_set():
                await exchange.send(b": token\n\n")
            await asyncio.sleep(0.05)

    async with stock() as plain, start_gateway(plain, intervals=quick) as running:
        flowing.set()
        plain.script = in_turn(flows, generate)
        streaming = asyncio.create_task(running.stream())
        await plain.exchange()
        plain.hangs = True
        (member,) = running.gateway.members.all()
        loop = asyncio.get_running_loop()
        await until(lambda: loop.time() - member.heard_at > 0.8)
        await until(lambda: not running.gateway.members.is_stale(member, loop.time()))
        assert (await running.chat()).status_code == 200
        flowing.clear()
        await until(lambda: running.gateway.members.is_stale(member, loop.time()))
        streaming.cancel()
        await asyncio.wait({streaming})


async def test_a_server_with_frozen_metrics_gets_a_request_now_and_then(start_gateway: StartGateway) -> None:
    """F50: it says that it is full until its next step, and there is no next step without a request."""
    quick = dataclasses.replace(INTERVALS, report_stale_s=1.5)
    frozen = metrics_page(waiting=500, kv_usage=0.99, tokens=7)
    async with (
        stock(frozen) as full,
        stock(metrics_page()) as other,
        start_gateway(full, other, intervals=quick) as running,
    ):
        members, dispatcher = running.gateway.members, running.gateway.dispatcher
        await until(lambda: all(one.load for one in members.all()))

        async def wakes(exchange: Exchange) -> None:
            full.metrics = metrics_page(tokens=8)
            await generate(exchange)

        full.script = wakes
        assert (await running.chat()).status_code == 200
        assert full.received == []
        (member,) = [one for one in members.all() if one.instance.instance_id == name(full)]
        await until(lambda: not members.knows_load(member, asyncio.get_running_loop().time()))
        await until(lambda: dispatcher.choose(None).instance_id == name(other))
        dispatcher._trickled_at[member.instance] -= 60
        assert (await running.chat()).status_code == 200
        assert len(full.received) == 1
        await until(lambda: members.knows_load(member, asyncio.get_running_loop().time()))


async def test_one_hung_instance_of_three_costs_no_request_and_comes_back(start_gateway: StartGateway) -> None:
    """F40: it accepts connections and answers nothing, under two hundred requests at once."""
    budgets = dataclasses.replace(PATIENT, hang_s=0.6)
    quick = dataclasses.replace(INTERVALS, unheard_s=3.0)
    async with instances("a", "b", "c") as (a, b, c):
        a.freeness_steps = b.freeness_steps = c.freeness_steps = 5000.0
        async with start_gateway(a, b, c, budgets=budgets, intervals=quick) as running:
            a.runs.clear()
            a.script = silent
            replies = await asyncio.gather(*(running.chat(stream=index % 2 == 0) for index in range(200)))
            assert {reply.status_code for reply in replies} == {200}
            members = running.gateway.members
            await until(lambda: members.is_stale(members.all()[0], asyncio.get_running_loop().time()))
            received = len(a.received)
            for _ in range(10):
                assert (await running.chat()).status_code == 200
            assert len(a.received) == received
            assert running.gateway.dispatcher.in_flight("a") == 0
            a.script = starts_and_waits
            a.runs.set()
            await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "a", 10)


async def test_requests_of_healthy_instances_do_not_wait_for_those_of_a_hung_one(start_gateway: StartGateway) -> None:
    """F40: all of them are answered while the others have waited for no answer yet. Nothing is shared but the loop."""
    quick = dataclasses.replace(INTERVALS, report_stale_s=600, unheard_s=600)
    async with instances("a", "b", "c") as (a, b, c):
        a.freeness_steps = b.freeness_steps = c.freeness_steps = 5000.0
        async with start_gateway(a, b, c, budgets=PATIENT, intervals=quick) as running:
            a.script, in_flight = silent, running.gateway.dispatcher.in_flight
            asking = [asyncio.create_task(running.chat(stream=index % 2 == 0)) for index in range(100)]
            try:
                await until(lambda: len(a.received) + sum(task.done() for task in asking) == 100, 60)
                done = [task for task in asking if task.done()]
                assert {task.result().status_code for task in done} == {200}
                assert (in_flight("a"), in_flight("b"), in_flight("c")) == (len(a.received), 0, 0)
                assert 20 <= len(a.received) <= 50
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.wait(asking)
