"""Fake servers let in what can start now and nothing else, and obey the newest leader alone: as the plugin does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway import wire
from gateway.cluster import keys
from gateway.config import Budgets
from gateway.policy.decide import Policy
from gateway.policy.waiting import WaitingRules
from gateway.serving import waiting
from gateway.wire import PriorityClass
from loadtest.fake_vllm.server import FakeServers
from loadtest.sim.engine import EngineSettings
from tests.conftest import Running, StartGateway, http_client, until, until_true
from tests.fake_instance import MODEL, SECRET
from tests.fake_streams import PATIENCE_S, FakeStream
from tests.loadtest.test_fake_vllm import QUICK, SLOW, fakes, pace, urls

HIGH, NORMAL, LOW = sorted(PriorityClass)
PATIENT = Budgets(header_grace_s=0.05, instance_wait_s=15, order_s=15)
MANAGED = {wire.SECRET_HEADER: SECRET}


def settings(servers: FakeServers) -> dict[str, Any]:
    rules = WaitingRules(aged_s=10 * PATIENCE_S)
    return urls(servers) | {"policy": Policy.NONE, "budgets": PATIENT, "waiting": rules}


def starts(servers: FakeServers) -> int:
    return sum(len(site.instance.starts) for site in servers.sites)


async def in_line(running: Running, count: int) -> bool:
    """Redis knows of so many that wait."""
    return await running.gateway.store._redis.zcard(keys.waiting_order(MODEL)) == count


async def all_full(servers: FakeServers, *gateways: Running) -> None:
    """Every gateway has been told so by every instance."""

    def known() -> bool:
        members = [one for running in gateways for one in running.gateway.members.all()]
        rooms = [one.report.room_places for one in members if one.report is not None]
        return rooms == [0] * len(servers.sites) * len(gateways)

    await until(known, 30)


async def left(stream: FakeStream) -> None:
    stream.reading.cancel()
    await asyncio.wait({stream.reading})


async def test_two_gateways_start_by_class_and_then_by_age_whatever_instance_has_room(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "YIELD_S", PATIENCE_S)
    async with (
        fakes(3, engine=EngineSettings(batch_max=2), profile=SLOW.faster(0.2)) as servers,
        start_gateway(**settings(servers)) as one,
        start_gateway(**settings(servers)) as two,
    ):
        holding = [FakeStream(one.client, number, 5_000) for number in range(6)]
        await until(lambda: starts(servers) == 6, 30)
        await all_full(servers, one, two)
        turns = [(one, NORMAL), (two, NORMAL), (two, LOW), (one, HIGH), (one, NORMAL), (two, HIGH)]
        in_turn: list[FakeStream] = []
        for running, priority in turns:
            in_turn.append(FakeStream(running.client, 100 + len(in_turn), 600, priority))
            await until_true(lambda: in_line(two, len(in_turn)), 30)
        started: list[str] = []
        for index, stream in enumerate(holding):
            known = [{start.request_id for start in site.instance.starts} for site in servers.sites]
            await left(stream)
            await until(lambda index=index: starts(servers) == 7 + index, 30)  # type: ignore[misc]
            for site, before in zip(servers.sites, known, strict=True):
                started += [start.request_id for start in site.instance.starts if start.request_id not in before]
            await all_full(
                servers, one, two
            )  # Or one may be tried where there is no room, and another start meanwhile.
        pace(servers, QUICK)
        assert all([await stream.equals_its_twin() for stream in in_turn])
        assert started == [in_turn[number].request_id for number in (3, 5, 0, 1, 4, 2)]
        assert {start.steps_missed for site in servers.sites for start in site.instance.starts} == {0}
        await until_true(lambda: in_line(one, 0))


async def test_of_more_than_fit_each_starts_in_an_instances_next_step_and_none_waits_there(
    start_gateway: StartGateway,
) -> None:
    """Memory for three of them each; what does not fit waits at the gateways, or is told busy and comes again."""
    small = EngineSettings(blocks_total=40, sequence_tokens_max=600)
    async with (
        fakes(3, engine=small) as servers,
        start_gateway(**settings(servers)) as one,
        start_gateway(**settings(servers)) as two,
    ):
        streams = [
            FakeStream((one, two)[number % 2].client, number, 32, (HIGH, NORMAL, LOW)[number % 3])
            for number in range(24)
        ]
        assert all([await stream.equals_its_twin() for stream in streams])
        begun = [start for site in servers.sites for start in site.instance.starts]
        assert sorted(start.request_id for start in begun) == sorted(stream.request_id for stream in streams)
        assert {start.steps_missed for start in begun} == {0}
        assert sum(running.gateway.counters.get("requests_waited") for running in (one, two)) > 0
        for running in (one, two):
            names = [one.instance.instance_id for one in running.gateway.members.all()]
            assert [running.gateway.dispatcher.in_flight(name) for name in names] == [0, 0, 0]
            assert running.gateway.counters.get("legs_lost") == 0
        await until_true(lambda: in_line(one, 0))


async def test_what_is_to_start_now_is_told_busy_with_what_it_needs_and_leaves_no_trace() -> None:
    body = {"model": MODEL, "prompt": list(range(160)), "max_tokens": 8}
    small = EngineSettings(blocks_total=12, sequence_tokens_max=190)
    async with fakes(1, engine=small, profile=SLOW) as servers, http_client(servers.urls[0]) as client:
        instance = servers.sites[0].instance

        async def ask(name: str, *, now: bool = True) -> httpx.Response:
            headers = MANAGED | {wire.REQUEST_ID_HEADER: name} | ({wire.ADMIT_HEADER: wire.ADMIT_NOW} if now else {})
            return await client.post("/v1/completions", json=body | {"prompt": [len(name)] * 160}, headers=headers)

        first = asyncio.create_task(ask("a"))
        await until(lambda: instance.starts)
        refused = await ask("bb")
        assert (refused.status_code, refused.json()["error"]["code"]) == (wire.BUSY_STATUS, "busy")
        busy = wire.decode_busy_header(refused.headers[wire.BUSY_HEADER])
        assert busy is not None
        assert (busy.blocks_needed, busy.room_places) == (10, small.batch_max - 1)
        assert len(instance.engine.requests()) == 1
        queued = asyncio.create_task(ask("ccc", now=False))
        await until(lambda: instance.engine.waiting())
        pace(servers, QUICK)
        assert [(await one).status_code for one in (first, queued)] == [200, 200]
        instance.set_faults({"busy": True})
        assert [(await ask("d", now=now)).status_code for now in (True, False)] == [wire.BUSY_STATUS, 503]


async def test_a_leader_that_orders_by_an_older_lease_is_refused() -> None:
    async with fakes(2) as servers, http_client(servers.urls[0]) as client:

        async def order(method: str, path: str, body: dict[str, Any] | None = None) -> int:
            answer = await client.request(method, f"/llumlet/{path}", json=body, headers=MANAGED)
            return answer.status_code

        def pairing(fence: int | None) -> dict[str, Any]:
            return wire.Pairing("f1", servers.urls[1], 60_000, fence=fence).to_json()

        def move(fence: int | None) -> dict[str, Any]:
            return wire.MigrateOrder("nobody", "f1", servers.urls[1], fence=fence).to_json()

        assert [await order("PUT", "pairing", pairing(fence)) for fence in (7, 6, None, 7)] == [200, 409, 200, 200]
        assert [await order("DELETE", f"pairing?fence={fence}") for fence in (6, 8)] == [409, 200]
        assert [await order("POST", "migrate", move(fence)) for fence in (7, 8, None)] == [409, 404, 404]
        assert await order("PUT", "pairing", pairing(wire.FENCE_MAX + 1)) == 200, "no lease, and no order of one"
        async with client.stream("GET", "/llumlet/reports", headers=MANAGED) as reports:
            report = wire.Report.from_json(json.loads(await anext(reports.aiter_lines())))
        assert report.fence == 8
