"""What holds for every request, whether it can move or is only passed on: keys, limits, places, time and counts."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest

from gateway.cluster.health import HealthSettings
from gateway.config import Budgets, Limits
from gateway.openai.caps import Caps
from loadtest.processes import free_port
from tests.conftest import Running, StartGateway, chat_body, until
from tests.fake_instance import MODEL, Exchange, FakeInstance, instances
from tests.scripts import gone, resets, silent
from tests.test_admission import BEARER, PATIENT, settings
from tests.test_endpoints import EVENTS, STREAMS, post, streams, whole
from tests.test_metrics import read
from tests.test_routes import assert_openai_error

MESSAGES = "/v1/messages"
PATHS = ["/v1/chat/completions", "/v1/responses", MESSAGES, "/v1/embeddings", "/tokenize"]
FORM = {"file": ("speech.wav", b"RIFF" * 1000, "audio/wav"), "model": (None, MODEL)}
FORM_PATH = "/v1/audio/transcriptions"


@pytest.mark.parametrize("path", [*PATHS, FORM_PATH])
async def test_a_keys_requests_are_counted_whatever_they_ask_for(path: str, start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings(requests_per_minute=1)) as running:
        a.script = whole(b"{}")
        more = {"files": FORM} if path == FORM_PATH else {"json": chat_body()}
        first = await running.client.post(path, headers=BEARER, **more)
        second = await running.client.post(path, headers=BEARER, **more)
        assert (first.status_code, second.status_code) == (200, 429)
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(second.headers["retry-after"]) >= 1
        found = await read(running)
        assert found["kvferry_limits_refused_total{limit=requests_per_minute}"] == 1
        assert found["kvferry_errors_total{kind=limit_reached}"] == 1


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_is_passed_on_frees_its_place_before_its_last_event(
    path: str, start_gateway: StartGateway
) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings(concurrent_requests=1)) as running:
        a.script = streams(*EVENTS[path])
        for _ in range(3):
            response = await running.client.post(path, json={"model": MODEL, "stream": True}, headers=BEARER)
            assert response.status_code == 200


async def test_tokens_of_what_is_passed_on_are_settled_by_its_usage(start_gateway: StartGateway) -> None:
    usage = b'"usage":{"input_tokens":10,"output_tokens":5}'
    message = [
        b'event: message_start\ndata: {"message":{"usage":{"input_tokens":10,"output_tokens":0}}}\n\n',
        b'event: message_delta\ndata: {"type":"message_delta",' + usage + b"}\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ]
    async with instances("a") as (a,), start_gateway(a, **settings(tokens_per_minute=1000)) as running:
        left: list[int] = []
        for script in (whole(b"{" + usage + b"}"), streams(*message), whole(b"{" + usage + b"}")):
            a.script = script
            body = {"model": MODEL, "max_tokens": 900, "messages": [], "stream": True}
            response = await running.client.post(MESSAGES, json=body, headers=BEARER)
            assert response.status_code == 200
            left.append(int(response.headers["x-ratelimit-remaining-tokens"]))
        assert [before - after for before, after in itertools.pairwise(left)] == [15, 15]


async def test_the_class_reaches_the_instance_where_it_takes_one(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, **settings()) as running:
        a.script = whole(b"{}")
        for path in PATHS:
            headers = BEARER | {"x-kvferry-priority": "high", "x-vllm-priority": "7"}
            response = await running.client.post(path, json=chat_body(priority=3), headers=headers)
            assert (response.status_code, response.headers["x-kvferry-priority"]) == (200, "high")
        said = [(one.json.get("priority"), one.headers.get("x-vllm-priority")) for one in a.received]
        assert said == [(-100, None), (-100, None), (None, "-100"), (-100, None), (None, None)]


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/v1/responses", MESSAGES, "/v1/embeddings"])
async def test_the_caps_hold_for_what_is_passed_on(path: str, start_gateway: StartGateway) -> None:
    caps = Caps(max_tokens=10, prompts=2)
    async with instances("a") as (a,), start_gateway(a, caps=caps) as running:
        assert (await post(running, path, max_tokens=11)).status_code == 400
        assert (await post(running, path, input=["a", "b", "c"])).status_code == 400
        assert (await post(running, path, messages=[[{"role": "user", "content": "x"}]] * 3)).status_code == 400
        assert not a.received


async def test_an_instance_that_is_full_takes_nothing_that_is_passed_on_either(start_gateway: StartGateway) -> None:
    async with (
        instances("a") as (a,),
        start_gateway(a, limits=Limits(requests_per_instance=1)) as running,
    ):
        a.script = silent
        waiting = asyncio.create_task(post(running, "/v1/embeddings"))
        exchange = await a.exchange()
        refused = await post(running, "/v1/embeddings")
        assert assert_openai_error(refused, 503)["code"] == "overloaded"
        waiting.cancel()
        await gone(exchange, within_s=10)


async def test_what_is_passed_on_waits_for_an_instance_too(start_gateway: StartGateway) -> None:
    budgets = Budgets(header_grace_s=0.05, instance_wait_s=15)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        a.script = whole(b"{}")
        a.draining = True
        running.gateway.members.drain_ordered("a", True)
        waiting = asyncio.create_task(post(running, "/v1/embeddings"))
        await until(lambda: running.gateway.counters.get("requests_waited"))
        a.draining = False
        running.gateway.members.drain_ordered("a", False)
        assert (await waiting).status_code == 200


async def test_what_is_passed_on_has_a_total_time(start_gateway: StartGateway) -> None:
    budgets = dataclasses.replace(PATIENT, total_s=0.3)
    async with instances("a") as (a,), start_gateway(a, budgets=budgets) as running:
        a.script = silent
        assert (await post(running, "/v1/embeddings")).status_code == 504
        await until(lambda: not running.gateway.dispatcher.in_flight("a"))


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_passed_on_ends_with_the_gateway(stream: bool, start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a, budgets=PATIENT) as running:
        a.script = streams(EVENTS["/v1/responses"][0], end="wait") if stream else silent
        body = {"model": MODEL, "input": "x", "stream": stream}
        ends = asyncio.create_task(ends_all(running, a, stream))
        async with running.client.stream("POST", "/v1/responses", json=body) as response:
            parts = response.aiter_bytes()
            if stream:
                assert b"response.created" in await anext(parts)
                running.gateway.end_requests()
            content = b"".join([part async for part in parts])
        await ends
        assert response.status_code == (200 if stream else 503)
        assert not stream or b"event: error" in content
        await gone(await a.exchange(), within_s=10)


async def ends_all(running: Running, a: FakeInstance, stream: bool) -> None:
    await a.exchange()
    if not stream:
        await until(lambda: running.gateway.end_requests() == 1)


async def test_an_instance_that_fails_what_is_passed_on_is_ejected(start_gateway: StartGateway) -> None:
    health = HealthSettings(failures_max=2, ejected_first_s=60.0)
    async with instances("a", "b") as (a, b), start_gateway(a, b, health=health) as running:
        a.script, b.script = resets, whole(b"{}")
        members = running.gateway.members
        for _ in range(20):
            assert (await post(running, "/v1/embeddings")).status_code == 200
            if any(member.health.ejected_why for member in members.all()):
                break
        (failing,) = [member for member in members.all() if member.health.ejected_why]
        assert failing.instance.instance_id == "a"
        found = await read(running)
        assert found["kvferry_instance_ejected{instance_id=a}"] == 1
        assert found["kvferry_instance_ejections_total{instance_id=a}"] == 1
        assert found["kvferry_legs_lost_total{kind=leg_cut}"] == 2
        assert found["kvferry_instances_healthy"] == 1


async def test_a_server_without_the_plugin_serves_every_endpoint(start_gateway: StartGateway) -> None:
    async with FakeInstance(f"plain-{free_port()}", has_plugin=False) as plain, start_gateway(plain) as running:
        plain.script = whole(b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}')
        for path in PATHS:
            assert (await post(running, path)).status_code == 200
        sent = {name for one in plain.received for name in one.headers}
        assert not [name for name in sent if name.startswith(("x-kvferry", "x-llumlet"))]
        (name,) = [member.instance.instance_id for member in running.gateway.members.all()]
        found = await read(running)
        assert found[f"kvferry_instance_plain{{instance_id={name}}}"] == 1
        assert found[f"kvferry_legs_total{{instance_id={name},kind=forwarded}}"] == len(PATHS) - 1


async def test_what_is_passed_on_is_counted_by_its_route_and_what_it_came_to(start_gateway: StartGateway) -> None:
    async def cuts(exchange: Exchange) -> None:
        await exchange.start()
        await exchange.send(EVENTS["/v1/responses"][0])
        await exchange.cut()

    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = whole(b'{"id":"resp_1","usage":{"input_tokens":3,"output_tokens":4,"total_tokens":7}}')
        await post(running, "/v1/responses", input="x")
        await running.client.get("/v1/responses/resp_1")
        a.script = cuts
        await post(running, "/v1/responses", input="x", stream=True)
        await running.client.get("/v1/responses/resp_2")
        await until(lambda: running.gateway.counters.get("requests") == 4)
        found = await read(running)
        route = "/v1/responses/{response_id}"
        assert found[f"kvferry_requests_total{{model={MODEL},outcome=2xx,route=/v1/responses}}"] == 1
        assert found[f"kvferry_requests_total{{model={MODEL},outcome=broken_stream,route=/v1/responses}}"] == 1
        assert found[f"kvferry_requests_total{{model=other,outcome=2xx,route={route}}}"] == 1
        assert found[f"kvferry_requests_total{{model=other,outcome=4xx,route={route}}}"] == 1
        assert found[f"kvferry_output_tokens_total{{model={MODEL}}}"] == 4
