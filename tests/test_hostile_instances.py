"""What an instance says that cannot be: it is not believed, and nobody else is worse off for it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from gateway import wire
from gateway.cluster.plain import read_metrics
from tests.conftest import Running, StartGateway, until
from tests.fake_instance import MODEL, Exchange, FakeInstance, instances

HUGE = 10**400
NO_NUMBERS = [float("nan"), float("inf"), float("-inf"), HUGE, -HUGE, 2**53 + 1, True, "1", [], {}]


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info]


def report_of(running: Running, instance_id: str) -> wire.Report | None:
    return next((one.report for one in running.gateway.members.all() if one.instance.instance_id == instance_id), None)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:8])
@pytest.mark.parametrize("name", ["freeness_steps", "blocks_total", "running_by_priority"])
def test_a_number_that_nobody_can_count_with_is_no_report(name: str, value: Any) -> None:
    good = FakeInstance("a").report()
    assert wire.Report.from_json(good).to_json() == good
    with pytest.raises(wire.WireError):
        wire.Report.from_json(good | {name: {"0": value} if name == "running_by_priority" else value})


HOSTILE: list[dict[str, Any]] = [
    *({"freeness_steps": float("nan")}, {"step_ms": HUGE}, {"blocks_total": -HUGE}, {"block_size": 0}),
    *({"block_size": -1, "blocks_total": -5, "requests_running": -7}, {"requests_waiting": -(2**53)}),
    *({"requests_running_max": 2**53, "room_blocks": 2**53, "room_places": 2**53}, {"virtual_usage_blocks": -1e15}),
    *({"fence": wire.FENCE_MAX * 9}, {"sequence": 2**53}, {"sequence": -1}, {"models": ["\ud800"] * 1000}),
    *({"vllm_version": "\ud800" + "x" * 10_000, "kv_format": "\x00\n"}, {"boot_id": "\n\x1b[31m \ud800"}),
    *({"migrations_ended": {"committed": HUGE}}, {"instance_id": "b"}, {"instance_id": "../x"}),
]


async def test_the_others_go_on_whatever_one_of_them_reports(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        for number, changes in enumerate(HOSTILE):
            a.report_changes, a.boot_id = {}, f"good-{number}"
            await until(lambda: getattr(report_of(running, "a"), "boot_id", "") == a.boot_id)
            a.report_changes = changes
            told = a._sequence + 3
            await until(lambda told=told: a._sequence > told)  # type: ignore[misc]
            for path in ("/admin/instances", "/metrics", "/v1/models"):
                answer = await running.admin("GET", path)
                assert answer.status_code == 200, (changes, answer.text)
            assert (await running.chat()).status_code == 200, changes
        assert "b" in [
            one.instance_id for one in running.gateway.members.view(time.monotonic()).instances if one.usable
        ]
    assert tracebacks(caplog) == []


async def test_a_boot_id_that_is_another_one_in_each_report_leaves_nothing_behind(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    class Flips(FakeInstance):
        def report(self) -> dict[str, Any]:
            report = FakeInstance.report(self)
            return report | {"boot_id": f"boot-{self._sequence}"}

    async with Flips("a") as a, start_gateway(a) as running:
        await until(lambda: a._sequence > 30)
        assert (await running.chat()).status_code == 200
        assert len(running.gateway.members.all()) == 1
        dispatcher = running.gateway.dispatcher
        await until(lambda: len(dispatcher._sendings) <= 1 and len(dispatcher._busy) <= 1)
    assert tracebacks(caplog) == []


async def test_an_id_that_two_addresses_claim_belongs_to_the_one_that_had_it(start_gateway: StartGateway) -> None:
    async with (
        FakeInstance("a") as first,
        FakeInstance("a", boot_id="boot-2") as second,
        start_gateway(first) as running,
    ):
        await running.admin("POST", "/admin/instances", json={"url": second.url})
        state = running.gateway.discovery.state
        await until(lambda: "has the instance id a already" in (state(second.url) or ""))
        for _ in range(5):
            assert (await running.chat()).status_code == 200
        assert len(first.received) == 5
        await running.admin("DELETE", "/admin/instances", json={"url": second.url})


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity"])
async def test_a_model_card_that_is_no_json_is_not_shown_to_clients(start_gateway: StartGateway, value: str) -> None:
    async with instances("a") as (a,):
        a.models = (MODEL, "other")
        a.card_changes = {"other": {"max_model_len": float(value)}}
        async with start_gateway(a) as running:
            assert [card["id"] for card in (await running.client.get("/v1/models")).json()["data"]] == [MODEL]


@pytest.mark.parametrize("value", ["NaN", "1e308", "-1", "+Inf", "1e16"])
def test_metrics_that_nobody_can_count_with_are_not_there(value: str) -> None:
    text = "".join(
        f'vllm:{name}{{engine="{engine}"}} {value}\n'
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for engine in (0, 1)
    )
    assert read_metrics(text).load is None


@pytest.mark.parametrize("message", ["\ud800" + "x" * 100_000, {}])
async def test_an_instances_own_words_of_an_error_cost_no_answer(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture, message: Any
) -> None:
    class Refuses(FakeInstance):
        async def _control(self, exchange: Exchange) -> None:
            await exchange.json(500, {"error": {"message": message, "code": message}})

    async with Refuses("a") as a, FakeInstance("b") as b, start_gateway(a, b) as running:
        await until(lambda: running.gateway.discovery.state(a.url) is not None)
        listed = await running.admin("GET", "/admin/instances")
        assert listed.status_code == 200
        assert len(listed.content) < 10_000
        assert (await running.chat()).status_code == 200
    assert tracebacks(caplog) == []
