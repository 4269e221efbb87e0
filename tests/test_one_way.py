"""What is sent arrives, and no answer does: a cut in one direction, which closes no connection."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from tests.conftest import StartGateway, until
from tests.cutting_proxy import CuttingProxy
from tests.fake_instance import Exchange, Generation, generate, instances, token_ids
from tests.scripts import gone, normal
from tests.test_hangs import BUDGETS, QUICK
from tests.test_replicas import knows_each_other


async def test_a_stream_of_an_instance_that_is_heard_no_more_goes_on_elsewhere(start_gateway: StartGateway) -> None:
    """It goes on generating and does not know; it learns by the closed connection that nobody wants that."""
    async with instances("a", "b") as (a, b), CuttingProxy(urlsplit(a.url).port or 0).running() as proxy:
        urls = (proxy.url, b.url)
        async with start_gateway(instance_urls=urls, budgets=BUDGETS, intervals=QUICK) as running:
            unmoved = normal(await running.stream())

            async def unheard(exchange: Exchange) -> None:
                generation = Generation(exchange.request)
                await exchange.start()
                await exchange.send(*generation.upto(3))
                await asyncio.sleep(0.1)
                proxy.answers_pass.clear()
                await exchange.send(*generation.rest(3)[:2])
                await exchange.client_gone.wait()

            a.script = unheard
            b.freeness_steps = 1.0
            await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "a")
            async with asyncio.timeout(60):
                assert normal(await running.stream()) == unmoved
            assert [one.output_token_ids for one in b.resumes.values()] == [token_ids(0, 3)]
            await gone(a.exchanges[-1])
            members = running.gateway.members
            await until(lambda: members.is_stale(members.all()[0], time.monotonic()), 30)
            received = len(a.received)
            assert (await running.chat()).status_code == 200
            assert len(a.received) == received
            a.script = generate
            proxy.cut()  # As far as the system of a machine has given the old connections up by then.
            proxy.answers_pass.set()
            await until(lambda: running.gateway.dispatcher.choose(None).instance_id == "a", 30)
            assert (await running.chat()).status_code == 200
            assert len(a.received) == received + 1


async def test_a_leader_that_redis_hears_and_that_does_not_hear_redis_leads_no_more_and_keeps_nobody_from_it(
    start_gateway: StartGateway, redis_url: str
) -> None:
    async with CuttingProxy(urlsplit(redis_url).port or 0).running() as proxy, instances("a") as (a,):
        behind = f"redis://127.0.0.1:{proxy.port}/0"
        async with start_gateway(a, redis_url=behind) as one:
            await until(lambda: one.gateway.leader.is_leading)
            async with start_gateway(a) as other:
                await knows_each_other(one, other)
                proxy.answers_pass.clear()
                for _ in range(2):  # It goes on asking for the lease, and might hold it so without knowing it.
                    await until(lambda: other.gateway.leader.is_leading, 60)
                    assert not one.gateway.leader.is_leading
                    failures = one.gateway.store.failures
                    await until(lambda failures=failures: one.gateway.store.failures > failures + 2, 60)  # type: ignore[misc]
                assert (await one.chat()).status_code == 200
                proxy.cut()
                proxy.answers_pass.set()
                await until(lambda: one.gateway.store.up, 60)
