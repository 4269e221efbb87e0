"""The gateway's own policy in real time, on fake servers: what it empties, and what it leaves where it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import wire
from gateway.policy.decide import Policy
from gateway.policy.waiting import WaitingRules
from loadtest.fake_vllm.llumlet import Llumlet
from loadtest.fake_vllm.server import FakeServers
from loadtest.sim.engine import EngineSettings
from loadtest.sim.profile import FAST
from tests.conftest import Running, StartGateway, until
from tests.fake_instance import MODEL
from tests.fake_streams import FakeStream
from tests.loadtest.test_fake_admission import PATIENT
from tests.loadtest.test_fake_vllm import QUICK, fakes, pace, urls

PACE = FAST.faster(0.02)
"""100 ms a token."""


async def test_for_a_large_prompt_that_has_waited_its_instance_is_emptied_whichever_gateways_it_is(
    start_gateway: StartGateway,
) -> None:
    """Both instances hold a request for long; neither has room beside it for a prompt of most of its memory."""
    memory = EngineSettings(blocks_total=120, sequence_tokens_max=1_900)
    async with fakes(engine=memory, profile=PACE) as servers:
        rules: dict[str, Any] = urls(servers) | {"waiting": WaitingRules(aged_s=0.2), "budgets": PATIENT}
        async with start_gateway(**rules) as one, start_gateway(**rules) as two:
            await until(lambda: any(each.gateway.leader.is_leading for each in (one, two)), 20)
            follower, leading = (two, one) if one.gateway.leader.is_leading else (one, two)
            small = [FakeStream(leading.client, number, 300) for number in range(2)]
            await until(lambda: [len(held(servers, name)) for name in ("f0", "f1")] == [1, 1], 20)
            body = {"model": MODEL, "prompt": [7] * 1_800, "max_tokens": 4}
            large = asyncio.create_task(follower.client.post("/v1/completions", json=body, timeout=120))
            await until(lambda: any(1_800 in held(servers, name) for name in ("f0", "f1")), 60)
            assert not any(stream.reading.done() for stream in small), "they made room by ending"
            assert sum(site.llumlet.migrations_ended.committed for site in servers.sites) == 1
            pace(servers, QUICK)
            assert (await large).status_code == 200
            assert all([await stream.equals_its_twin() for stream in small])


def held(servers: FakeServers, name: str) -> list[int]:
    """Prompts' tokens of the requests that run there."""
    (site,) = [site for site in servers.sites if site.llumlet.identity.instance_id == name]
    return [request.prompt_tokens for request in site.instance.engine.running()]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_has_moved_three_times_is_not_moved_by_a_pairing_and_a_fourth_is_allowed_for(
    stream: bool, start_gateway: StartGateway
) -> None:
    """Its moves travel with it, whoever ordered them."""
    async with fakes(profile=PACE) as servers, start_gateway(**urls(servers), policy=Policy.NONE) as running:
        body = {"model": MODEL, "prompt": [1] * 50, "max_tokens": 400, "stream": stream}
        asking = asyncio.create_task(running.client.post("/v1/completions", json=body, timeout=120))
        llumlets = [site.llumlet for site in servers.sites]
        await until(lambda: any(here(one) for one in llumlets), 20)
        source, destination = sorted(llumlets, key=lambda one: not here(one))
        for _ in range(3):
            await move(running, source, destination)
            source, destination = destination, source
        to = servers.urls[llumlets.index(destination)]

        def pair(fence: int, **rules: Any) -> None:
            pairing = wire.Pairing(destination.identity.instance_id, to, 600_000, fence=fence, **rules)
            source.pair(pairing)

        pair(1, cool_down_s=0.0, moves_max=3)
        await some_rounds(source)
        pair(2, cool_down_s=3_600.0, moves_max=4)
        await some_rounds(source)
        assert (len(here(source)), source.migrations_ended.committed) == (1, 1)
        pair(3, cool_down_s=0.0, moves_max=4)
        await until(lambda: source.migrations_ended.committed == 2, 20)
        source.pair(None)
        pace(servers, QUICK)
        assert (await asking).status_code == 200


def here(llumlet: Llumlet) -> list[str]:
    return [one.request_id for one in llumlet.status().requests if one.state == "running"]


async def move(running: Running, source: Llumlet, destination: Llumlet) -> None:
    (request_id,) = here(source)
    body = {"request": request_id, "destination": destination.identity.instance_id}
    answer = await running.admin("POST", "/admin/migrate", json=body)
    assert answer.json()["outcome"] == "committed", answer.text
    await until(lambda: here(destination), 20)


async def some_rounds(llumlet: Llumlet) -> None:
    """In each, after its report, it may follow its pairing."""
    sequence = llumlet._sequence
    await until(lambda: llumlet._sequence > sequence + 3, 20)
