"""The gateway's own policy, live: what pairings say, who is protected, and the instance that is kept for who waits."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.config import Budgets
from gateway.policy.waiting import WaitingRules
from gateway.wire import PriorityClass
from tests.conftest import Running, StartGateway, chat_body, until
from tests.fake_instance import FakeInstance, instances

PATIENT = Budgets(header_grace_s=0.05, instance_wait_s=15, order_s=15)
HIGH = PriorityClass.HIGH


async def heard(running: Running, *fakes: FakeInstance) -> None:
    """The gateway has a report of what each fake says now."""

    def said() -> bool:
        reports = {one.instance.instance_id: one.report for one in running.gateway.members.all()}
        return all(
            (report := reports.get(fake.instance_id)) is not None
            and fake.report_changes.items() <= report.to_json().items()
            for fake in fakes
        )

    await until(said)


async def test_a_pairing_says_the_rules_that_its_source_is_to_move_by(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b):
        a.freeness_steps, a.report_changes = 10, {"requests_running": 4}
        async with start_gateway(a, b, target_loads={HIGH: 1_600}):
            await until(lambda: a.pairings)
            pairing = a.pairings[0]
            assert pairing is not None
            assert (pairing.concurrency, pairing.cool_down_s, pairing.moves_max) == (2, 5.0, 3)
            assert pairing.protected == [HIGH]


async def test_where_an_urgent_request_runs_there_is_headroom_and_the_next_urgent_one_joins_it(
    start_gateway: StartGateway,
) -> None:
    """By its report it is the freest of all; what it keeps free makes it the fullest, and a source."""
    async with instances("a", "b", "c") as (a, b, c):
        running_high = {"requests_running": 2, "running_by_priority": {"-100": 1, "0": 1}}
        a.report_changes = running_high | {"virtual_usage_blocks": 95.0, "room_blocks": 300, "room_places": 9}
        a.freeness_steps = (1_000 - 95) * 16 / 2
        b.report_changes = c.report_changes = {"room_blocks": 300, "room_places": 9, "requests_running": 1}
        b.freeness_steps = 1_000.0
        async with start_gateway(a, b, c, target_loads={HIGH: 1_600}, budgets=PATIENT) as running:
            await heard(running, a, b, c)
            await until(lambda: a.pairings)
            served = []
            for priority in PriorityClass:
                headers = {"x-kvferry-priority": priority.word}
                answer = await running.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
                assert answer.status_code == 200
                served.append(next(fake.instance_id for fake in (a, b, c) if fake.received))
                for fake in (a, b, c):
                    fake.received.clear()
            assert served[0] == "a"
            assert "a" not in served[1:]
            metrics = (await running.client.get("/metrics")).text
            assert 'kvferry_instance_freeness_steps{instance_id="a"} 40.0' in metrics


async def test_the_leader_empties_the_instance_that_is_kept_for_a_request_of_another_gateway(
    start_gateway: StartGateway,
) -> None:
    rules: dict[str, Any] = {"waiting": WaitingRules(aged_s=0.2), "budgets": PATIENT}
    async with instances("a", "b") as (a, b):
        full = {"requests_running": 2, "room_places": 9, "blocks_free": 900}
        a.report_changes, b.report_changes = full | {"room_blocks": 30}, full | {"room_blocks": 20}
        a.freeness_steps = b.freeness_steps = 10_000.0
        async with start_gateway(a, b, **rules) as one, start_gateway(a, b, **rules) as two:
            await until(lambda: any(each.gateway.leader.is_leading for each in (one, two)), 20)
            follower = two if one.gateway.leader.is_leading else one
            for each in (one, two):
                await heard(each, a, b)
            assert not a.pairings
            large = asyncio.create_task(follower.chat(user="x" * 6 * 16 * 40))
            await until(lambda: a.pairings and a.pairings[-1] is not None, 20)
            pairing = a.pairings[-1]
            assert pairing is not None
            assert (pairing.destination_id, b.pairings) == ("b", [])
            a.report_changes = full | {"room_blocks": 500}
            assert (await large).status_code == 200
            assert [len(fake.received) for fake in (a, b)] == [1, 0]
