"""Instances without the plugin: served, never told what is not theirs to know, and never moved to or from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from gateway.wire import SECRET_HEADER
from loadtest.processes import free_port
from tests.conftest import StartGateway, until
from tests.fake_instance import MODEL, Exchange, FakeInstance, Generation, generate, instances, metrics_page, token_ids
from tests.scripts import loses_after, moved, normal, resets, starts_and_waits

STREAM = {"model": MODEL, "messages": [], "stream": True}


@contextlib.asynccontextmanager
async def stock(metrics: str | None = None) -> AsyncIterator[FakeInstance]:
    async with FakeInstance("unused", has_plugin=False, metrics=metrics) as fake:
        yield fake


def name(fake: FakeInstance) -> str:
    return fake.url.removeprefix("http://")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_without_the_plugin_is_served_and_shown_and_learns_no_secret(
    stream: bool, start_gateway: StartGateway
) -> None:
    async with stock(metrics_page()) as fake, start_gateway(fake) as running:
        assert (await running.chat(stream=stream)).status_code == 200
        await until(lambda: running.gateway.members.all()[0].load is not None)
        (shown,) = (await running.admin("GET", "/admin/instances")).json()["instances"]
        assert (shown["id"], shown["plugin"], shown["healthy"], shown["report"]) == (name(fake), None, True, None)
        assert shown["load"]["requests_running"] == 0
        sent = [headers for _, headers in fake.control_headers] + [request.headers for request in fake.received]
        assert not [one for headers in sent for one in headers if one == SECRET_HEADER or one.startswith("x-kvferry")]
        assert {path for path, _ in fake.control_headers if "llumlet" in path} == {"/llumlet/status"}


async def test_it_takes_part_in_no_migration(start_gateway: StartGateway) -> None:
    async with stock(metrics_page()) as plain, FakeInstance("b", freeness_steps=-500.0) as b:
        b.report_changes = {"requests_running": 5}
        async with start_gateway(plain, b) as running:
            await until(lambda: running.gateway.leader.is_leading)
            plain.script = starts_and_waits
            async with running.client.stream("POST", "/v1/chat/completions", json=STREAM):
                exchange = await plain.exchange()
                request_id = exchange.request.headers["x-request-id"]
                order = {"request": request_id, "destination": "b"}
                refused = await running.admin("POST", "/admin/migrate", json=order)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_plugin")
            drained = await running.admin("POST", f"/admin/instances/{name(plain)}/drain")
            assert drained.status_code == 409
            assert b.pairings == []


async def test_a_stream_lost_before_its_first_event_starts_again_on_any_instance(start_gateway: StartGateway) -> None:
    async with (
        stock(metrics_page()) as one,
        stock(metrics_page(running=50, kv_usage=0.5)) as other,
        start_gateway(one, other) as running,
    ):
        await until(lambda: all(member.load for member in running.gateway.members.all()))
        unmoved = normal(await running.stream())
        assert len(one.received) == 1
        one.script = resets
        assert normal(await running.stream()) == unmoved
        assert (len(one.received), len(other.received)) == (2, 1)


async def test_a_stream_lost_later_is_resumed_on_an_instance_with_the_plugin_alone(
    start_gateway: StartGateway,
) -> None:
    async with stock(metrics_page()) as lost, stock(metrics_page()) as other, instances("b") as (b,):
        b.freeness_steps = 10.0
        async with start_gateway(lost, other, b) as running:
            await until(lambda: all(one.load for one in running.gateway.members.all() if not one.instance.managed))
            unmoved = normal(await running.stream())
            lost.script = other.script = loses_after(3, "cut")
            assert normal(await running.stream()) == unmoved
            assert [resume.output_token_ids for resume in b.resumes.values()] == [token_ids(0, 3)]
            assert lost.resumes == other.resumes == {}


async def test_a_stream_lost_later_with_only_plain_servers_left_ends_in_one_error_event(
    start_gateway: StartGateway,
) -> None:
    async with stock() as lost, stock() as other, start_gateway(lost, other) as running:
        lost.script = other.script = loses_after(3, "cut")
        events = (await running.stream()).split(b"\n\n")
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == 502
        assert sum(b'"error"' in event for event in events) == 1
        assert not any(b"[DONE]" in event for event in events)
        assert len(lost.received) + len(other.received) == 1


async def test_a_server_that_says_it_has_moved_a_stream_to_a_plain_one_is_not_followed_there(
    start_gateway: StartGateway,
) -> None:
    async with stock() as plain, instances("b") as (b,), start_gateway(plain, b) as running:
        unmoved = normal(await running.stream())
        plain_name = FakeInstance(name(plain))

        async def script(exchange: Exchange) -> None:
            b.script = generate
            await exchange.start()
            await exchange.send(*Generation(exchange.request).upto(3), moved(plain_name, 3))
            await exchange.finish()

        b.script = script
        assert normal(await running.stream()) == unmoved
        assert not plain.received


async def test_a_server_that_gets_the_plugin_becomes_managed_and_back(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,):
        a.has_plugin = False
        async with start_gateway(a) as running:

            def ids() -> list[tuple[str, bool]]:
                known = running.gateway.members.all()
                return [(one.instance.instance_id, one.instance.managed) for one in known if one.usable]

            assert ids() == [(name(a), False)]
            a.has_plugin = True
            await until(lambda: ids() == [("a", True)])
            assert (await running.chat()).status_code == 200
            a.has_plugin = False
            await until(lambda: ids() == [(name(a), False)])
            a.control_headers.clear()
            assert (await running.chat()).status_code == 200
            assert SECRET_HEADER not in a.received[-1].headers


async def test_another_start_of_the_process_is_another_instance_with_a_pool_of_its_own(
    start_gateway: StartGateway,
) -> None:
    """F46: restarted between two probes, on the same address."""
    async with stock(metrics_page(started=1.0)) as fake, start_gateway(fake) as running:
        assert (await running.chat()).status_code == 200
        (before,) = running.gateway.members.all()
        pool = running.gateway.backend._pools[name(fake)][1]
        fake.metrics = metrics_page(started=2.0)
        await until(lambda: running.gateway.members.all()[0].instance != before.instance)
        assert (await running.chat()).status_code == 200
        assert running.gateway.backend._pools[name(fake)][1] is not pool
        await until(lambda: pool._closed)


@pytest.mark.parametrize("page", [None, "<html>vllm:num_requests_running 0</html>", "x 1\n"])
async def test_a_server_of_unknown_load_never_comes_before_one_with_room(
    page: str | None, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.serving.dispatch.TRICKLE_S", 600.0)
    async with (
        stock(page) as unknown,
        stock(metrics_page(running=5, kv_usage=0.5)) as known,
        start_gateway(unknown, known) as running,
    ):
        await until(lambda: any(one.load for one in running.gateway.members.all()))
        for _ in range(10):
            assert (await running.chat()).status_code == 200
        assert (len(unknown.received), len(known.received)) == (0, 10)


async def test_servers_of_unknown_load_share_by_what_the_gateway_has_sent_there(start_gateway: StartGateway) -> None:
    async with stock() as one, stock() as other, start_gateway(one, other) as running:
        one.script = other.script = starts_and_waits
        async with contextlib.AsyncExitStack() as streams:
            for _ in range(8):
                await streams.enter_async_context(
                    running.client.stream(
                        "POST",
                        "/v1/chat/completions",
                        json=STREAM,
                    )
                )
            assert (len(one.received), len(other.received)) == (4, 4)


async def test_load_of_metrics_and_of_reports_is_compared(start_gateway: StartGateway) -> None:
    full = metrics_page(running=100, waiting=50, kv_usage=0.98)
    async with stock(full) as plain, instances("b") as (b,), start_gateway(plain, b) as running:
        await until(lambda: any(one.load for one in running.gateway.members.all()))
        assert running.gateway.dispatcher.choose(None).instance_id == "b"
        b.freeness_steps, plain.metrics = 10.0, metrics_page()
        await until(lambda: running.gateway.dispatcher.choose(None).instance_id == name(plain))


async def test_a_sleeping_server_gets_nothing_until_it_wakes(start_gateway: StartGateway) -> None:
    async with stock() as plain, start_gateway(plain) as running:
        assert (await running.chat()).status_code == 200
    async with stock() as asleep:
        asleep.asleep = True
        async with start_gateway(asleep) as running:
            assert (await running.chat()).status_code == 503
            assert asleep.received == []
            asleep.asleep = False
            await until(lambda: running.gateway.members.healthy_count() == 1)
            assert (await running.chat()).status_code == 200


async def test_a_plain_server_that_is_not_there_yet_is_found_later(start_gateway: StartGateway) -> None:
    fake = FakeInstance("unused", has_plugin=False)
    fake.url = f"http://127.0.0.1:{free_port()}"
    async with start_gateway(fake) as running:
        assert not running.gateway.members.all()
        await fake.listen(int(fake.url.rpartition(":")[2]))
        try:
            await until(lambda: running.gateway.members.healthy_count() == 1)
            assert (await running.chat()).status_code == 200
            assert all(SECRET_HEADER not in headers for _, headers in fake.control_headers)
        finally:
            await fake.stop()
