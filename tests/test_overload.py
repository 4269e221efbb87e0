"""How many requests an instance and the cluster take, and who waits for an instance that is not usable."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from gateway.config import Budgets, Limits
from tests.conftest import INTERVALS, StartGateway, chat_body, until
from tests.fake_instance import generate, instances
from tests.scripts import starts_and_waits

PATIENT = Budgets(header_grace_s=0.05, instance_wait_s=15)


async def test_an_instance_takes_so_many_requests_of_one_gateway_and_the_others_the_rest(
    start_gateway: StartGateway,
) -> None:
    async with (
        instances("a", "b") as (a, b),
        start_gateway(a, b, limits=Limits(requests_per_instance=2)) as running,
        contextlib.AsyncExitStack() as streams,
    ):
        a.script = b.script = starts_and_waits
        for _ in range(4):
            body = chat_body(stream=True)
            await streams.enter_async_context(running.client.stream("POST", "/v1/chat/completions", json=body))
        assert (len(a.received), len(b.received)) == (2, 2)
        refused = await running.chat(stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["content-type"] == "application/json"
    assert running.gateway.dispatcher.in_flight("a") == 0


@pytest.mark.parametrize("reported", [True, False])
async def test_a_full_clusters_queue_turns_new_requests_away_before_any_byte(
    reported: bool, start_gateway: StartGateway
) -> None:
    async with (
        instances("a", "b") as (a, b),
        start_gateway(a, b, limits=Limits(queue_per_instance=3)) as running,
        contextlib.AsyncExitStack() as streams,
    ):
        if reported:
            a.report_changes = {"requests_waiting": 5}
        else:  # Sent by this gateway, and not yet in any report; there is no free place for them.
            a.report_changes = b.report_changes = {"requests_running_max": 0}
            members = running.gateway.members
            await until(lambda: all(one.report and not one.report.requests_running_max for one in members.all()))
            a.engine_busy = b.engine_busy = True
            a.script = b.script = starts_and_waits
        for _ in range(0 if reported else 6):
            body = chat_body(stream=True)
            await streams.enter_async_context(running.client.stream("POST", "/v1/chat/completions", json=body))
        if reported:
            assert (await running.chat()).status_code == 200, "five over two instances are less than three each"
            b.report_changes = {"requests_waiting": 1}
        await until(lambda: running.gateway.members.all()[1].report)
        async with asyncio.timeout(5):
            while (refused := await running.chat(stream=True)).status_code == 200:
                await asyncio.sleep(0.02)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


async def test_a_request_waits_for_an_instance_that_is_not_usable_at_the_moment(start_gateway: StartGateway) -> None:
    quick = dataclasses.replace(INTERVALS, unheard_s=0.4)
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT, intervals=quick) as running:
        members = running.gateway.members
        a.runs.clear()  # As all instances of a machine that stands still.
        await until(lambda: members.is_stale(members.all()[0], asyncio.get_running_loop().time()))
        asking = asyncio.create_task(running.chat())
        await until(lambda: running.gateway.counters.get("requests_waited"))
        assert not asking.done()
        a.runs.set()
        assert (await asking).status_code == 200


async def test_a_client_that_leaves_gives_up_its_place_among_those_who_wait(start_gateway: StartGateway) -> None:
    limits = Limits(waiters=1)
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT, limits=limits) as running:
        a.draining = True
        await until(lambda: running.gateway.members.is_draining("a"))
        waiting = asyncio.create_task(running.chat())
        await until(lambda: running.gateway.counters.get("requests_waited") == 1)
        refused = await running.chat()
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        waiting.cancel()
        await asyncio.wait({waiting})
        await until(lambda: running.gateway.counters.get("requests", outcome="client_gone") == 1)
        second = asyncio.create_task(running.chat())
        await until(lambda: running.gateway.counters.get("requests_waited") == 2)
        a.draining = False
        assert (await second).status_code == 200
        assert len(a.received) == 1


async def test_counts_are_the_truth_across_probes_restarts_and_other_endpoints(start_gateway: StartGateway) -> None:
    """F15, F52: a restarted instance with an honest zero gets its share, and not everything."""
    async with instances("a", "b", "c") as fakes, start_gateway(*fakes) as running:
        for fake in fakes:
            fake.freeness_steps = 5000.0
            fake.script = starts_and_waits
        (first, *_) = fakes
        in_flight = running.gateway.dispatcher.in_flight
        async with contextlib.AsyncExitStack() as streams:
            for _ in range(6):
                body = chat_body(stream=True)
                await streams.enter_async_context(running.client.stream("POST", "/v1/chat/completions", json=body))
            held = {fake.instance_id: len(fake.received) for fake in fakes}
            sequences = [fake._sequence for fake in fakes]
            await until(lambda: all(fake._sequence > was + 5 for fake, was in zip(fakes, sequences, strict=True)))
            assert {fake.instance_id: in_flight(fake.instance_id) for fake in fakes} == held
        await until(lambda: not any(in_flight(fake.instance_id) for fake in fakes))
        first.boot_id, first._sequence = "boot-2", 0
        await until(lambda: running.gateway.members.all()[0].instance.boot_id == "boot-2")
        for fake in fakes:
            fake.received.clear()
            fake.script = generate
            fake.engine_busy = True  # No report in between: only what the gateway itself counts is left.
        await asyncio.gather(*(running.chat() for _ in range(30)))
        assert all(8 <= len(fake.received) <= 12 for fake in fakes), [len(fake.received) for fake in fakes]
        assert not any(in_flight(fake.instance_id) for fake in fakes)
