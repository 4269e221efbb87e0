"""Who is healthy."""

from __future__ import annotations

import asyncio
import dataclasses

from gateway.app import Gateway
from gateway.cluster.discovery import TIMEOUTS_MAX
from gateway.config import Budgets, Intervals, Settings
from loadtest.processes import free_port
from tests.conftest import INTERVALS, StartGateway, until
from tests.fake_instance import SECRET, FakeInstance, instances


def gateway_of(*fakes: FakeInstance, probe_timeout_s: float = 10.0) -> Gateway:
    """Not started: the test runs its rounds."""
    urls = tuple(fake.url for fake in fakes)
    intervals = Intervals(probe_timeout_s=probe_timeout_s)
    return Gateway(Settings(SECRET, urls, redis_url=f"redis://127.0.0.1:{free_port()}/0", intervals=intervals))


async def test_a_slow_answer_is_forgiven_and_several_in_a_row_are_not() -> None:
    async with instances("a") as (a,):
        gateway = gateway_of(a, probe_timeout_s=1.0)
        await gateway.discovery.probe_all()
        assert gateway.members.healthy_count() == 1
        a.hangs = True
        for _ in range(TIMEOUTS_MAX - 1):
            await gateway.discovery.probe_all()
            assert gateway.members.healthy_count() == 1
        await gateway.discovery.probe_all()
        assert gateway.members.healthy_count() == 0
        await gateway.stop()


async def test_another_life_at_the_same_address_has_no_report_of_the_old_one() -> None:
    async with instances("a") as (a,):
        gateway = gateway_of(a)
        await gateway.discovery.probe_all()
        first = gateway.members.get("a")
        a.boot_id, a._sequence = "boot-2", 0
        await gateway.discovery.probe_all()
        (member,) = gateway.members.all()
        assert member.instance != first
        assert member.report is not None
        assert (member.report.boot_id, member.report.sequence) == ("boot-2", 1)
        await gateway.stop()


async def test_an_instance_id_that_is_taken_is_refused() -> None:
    async with instances("a", "a") as fakes:
        gateway = gateway_of(*fakes)
        await gateway.discovery.probe_all()
        await gateway.discovery.probe_all()
        assert len(gateway.members.all()) == 1
        await gateway.stop()


async def test_a_renamed_instance_replaces_the_one_at_its_address() -> None:
    async with instances("a") as (a,):
        gateway = gateway_of(a)
        await gateway.discovery.probe_all()
        a.instance_id = "b"
        await gateway.discovery.probe_all()
        assert [member.instance.instance_id for member in gateway.members.all()] == ["b"]
        await gateway.stop()


async def test_a_gateway_that_nobody_has_answered_yet_lets_requests_wait(start_gateway: StartGateway) -> None:
    """It has just started, on a machine that stands still for seconds, and knows of no instance at all."""
    quick = dataclasses.replace(INTERVALS, probe_timeout_s=0.5)
    async with instances("a") as (a,):
        a.runs.clear()
        async with start_gateway(a, budgets=Budgets(instance_wait_s=60), intervals=quick) as running:
            assert running.gateway.members.all() == ()
            asking = asyncio.create_task(running.chat())
            await until(lambda: running.gateway.waiting._waiters)
            a.runs.set()
            assert (await asking).status_code == 200


async def test_a_model_that_a_server_may_have_that_has_never_answered_is_waited_for(
    start_gateway: StartGateway,
) -> None:
    """And one that nobody has is not there, at once, when all have answered."""
    quick = dataclasses.replace(INTERVALS, probe_timeout_s=0.5)
    async with instances("a", "b") as (a, b):
        b.models = ("others",)
        b.runs.clear()
        async with start_gateway(a, b, budgets=Budgets(instance_wait_s=60), intervals=quick) as running:
            assert (await running.chat()).status_code == 200
            asking = asyncio.create_task(running.chat(model="others"))
            await until(lambda: running.gateway.waiting._waiters)
            b.runs.set()
            assert (await asking).status_code == 200
            assert (await running.chat(model="nobodys")).status_code == 404
            assert running.gateway.counters.counts("requests_waited") == {(): 1}
            b.health_status = 500
            await until(lambda: not running.gateway.members.is_healthy("b"))
            assert (await running.chat(model="nobodys")).status_code == 404
            assert running.gateway.counters.counts("requests_waited") == {(): 1}


async def test_what_a_name_without_an_address_may_serve_is_waited_for_a_little(start_gateway: StartGateway) -> None:
    async def no_address(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    async with (
        instances("a") as (a,),
        start_gateway(instance_urls=(a.url, "dns://gone:1"), resolve=no_address) as running,
    ):
        answer = await running.chat(model="others")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert running.gateway.counters.counts("requests_waited") == {(): 1}
