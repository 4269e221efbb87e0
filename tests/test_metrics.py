"""What operators read at /metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gateway
from gateway import wire
from gateway.app import Gateway
from gateway.cluster.members import Instance
from gateway.config import Settings
from gateway.counters import FAMILIES, OTHER, Counters, Distribution
from gateway.metrics import GAUGES, INSTANCE_GAUGES, INSTANCE_TOTALS
from loadtest.processes import free_port
from tests.conftest import ADMIN_KEY, Running, StartGateway, chat_body, until, until_true
from tests.fake_instance import MODEL, SECRET, FakeInstance, instances
from tests.scripts import loses_after, moves_after, starts_and_waits

ROOT = Path(gateway.__file__).parent.parent
Samples = dict[str, float]
"""By name with its labels, as ``kvferry_legs_total{instance_id=a,kind=first}``."""


def parsed(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, f"{name} is there twice"
            found[name] = sample.value
    return found


async def read(running: Running) -> Samples:
    response = await running.client.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain")
    return parsed(response.text)


def chat_requests(outcome: str, model: str = MODEL) -> str:
    return f"kvferry_requests_total{{model={model},outcome={outcome},route=/v1/chat/completions}}"


async def test_requests_tokens_and_times_are_counted_by_model(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        await running.stream()
        assert (await running.chat()).status_code == 200
        await until(lambda: not running.gateway.sessions.live())
        found = await read(running)
        assert found[chat_requests("2xx")] == 2
        assert found[f"kvferry_output_tokens_total{{model={MODEL}}}"] == 16
        assert found[f"kvferry_time_to_first_event_seconds_count{{model={MODEL}}}"] == 1
        labels = f"model={MODEL},route=/v1/chat/completions"
        assert found[f"kvferry_request_duration_seconds_count{{{labels}}}"] == 2
        assert found["kvferry_legs_total{instance_id=a,kind=first}"] == 2
        # A first read may hold several events; every event after it is one gap.
        gaps = found.get(f"kvferry_event_gap_seconds_count{{model={MODEL}}}", 0)
        assert 0 <= gaps <= 9


async def test_a_stream_under_way_is_counted_and_never_counted_back(start_gateway: StartGateway) -> None:
    tokens, in_flight = f"kvferry_output_tokens_total{{model={MODEL}}}", "kvferry_instance_requests_in_flight"
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = starts_and_waits
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)):

            async def shows_two() -> bool:
                return (await read(running)).get(tokens) == 2

            await until_true(shows_two)
            found = await read(running)
            assert (found["kvferry_requests_in_flight"], found[f"{in_flight}{{instance_id=a}}"]) == (1, 1)
        await until(lambda: running.gateway.counters.get("requests", outcome="client_gone"))
        found = await read(running)
        assert found[tokens] == 2
        assert found[chat_requests("client_gone")] == 1
        assert (found["kvferry_requests_in_flight"], found[f"{in_flight}{{instance_id=a}}"]) == (0, 0)


async def test_moves_are_counted_with_their_pause(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script = moves_after(2, b)
        await running.stream()
        a.script = loses_after(3, "cut")
        await running.stream()
        found = await read(running)
        assert found["kvferry_requests_migrated_total"] == 1
        assert found["kvferry_requests_resumed_total"] == 1
        assert found["kvferry_move_pause_seconds_count{kind=migrated}"] == 1
        assert found["kvferry_move_pause_seconds_count{kind=resumed}"] == 1
        assert found["kvferry_legs_lost_total{kind=leg_cut}"] == 1
        assert found["kvferry_legs_total{instance_id=b,kind=resumed}"] == 1


async def test_failures_are_counted_by_kind(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        a.script = loses_after(3, "cut")
        await running.stream()
        assert (await running.chat(model="no-such-model")).status_code == 404
        found = await read(running)
        assert found[chat_requests("broken_stream")] == 1
        assert found[chat_requests("4xx", OTHER)] == 1
        assert found["kvferry_errors_total{kind=leg_cut}"] == 1
        assert found["kvferry_errors_total{kind=not_found}"] == 1


async def test_an_ordered_migration_is_counted_as_the_source_tells_it(start_gateway: StartGateway) -> None:
    async def migrate(order: wire.MigrateOrder) -> tuple[int, Any]:
        result = wire.MigrationResult("m1", order.request_id, "a", "b", "aborted", "x", 3, 7, 0, 5000, 2, 100.0, 5.0)
        return 200, result.to_json()

    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        a.script, a.migrate = starts_and_waits, migrate
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            order = {"request": response.headers[wire.REQUEST_ID_HEADER], "destination": "b"}
            await running.admin("POST", "/admin/migrate", json=order)
        found = await read(running)
        assert found["kvferry_ordered_migrations_total{method=live,outcome=aborted}"] == 1
        sums = {name: found[f"kvferry_ordered_migration_{name}_sum{{method=live}}"] for name in ("stages", "blocks")}
        assert sums == {"stages": 3, "blocks": 7}
        assert found["kvferry_ordered_migration_bytes_sum{method=live}"] == 5000
        assert found["kvferry_ordered_migration_seconds_sum{method=live}"] == 0.1


async def test_migrations_that_no_gateway_ordered_are_shown_as_their_source_tells_them(
    start_gateway: StartGateway,
) -> None:
    """The leader only pairs instances: what moves then, and how, is between the two."""
    async with instances("a", "b", "old") as (a, b, old):
        ended = wire.MigrationTotals()
        for outcome, stages in (("committed", 3), ("aborted", 9), ("committed", 2)):
            ended = ended.plus(
                wire.MigrationResult("m", "r", "a", "b", outcome, None, stages, 7, 2, 500, 9, 250.0, 8.0)
            )
        a.report_changes = {"migrations_ended": ended.to_json()}
        b.report_changes = {"migrations_ended": wire.MigrationTotals().to_json()}
        async with start_gateway(a, b, old) as running:
            await until(lambda: all(member.report is not None for member in running.gateway.members.all()))
            found = await read(running)
        names = ("migration_stages", "migration_blocks", "migration_bytes", "migration_seconds")
        told = {
            name: [
                found.get(f"kvferry_instance_{name}_total{{instance_id={instance_id}}}")
                for instance_id in ("a", "b", "old")
            ]
            for name in (*names, "migration_final_seconds")
        }
        assert told == {
            "migration_stages": [5, 0, None],
            "migration_blocks": [14, 0, None],
            "migration_bytes": [1000, 0, None],
            "migration_seconds": [0.5, 0, None],
            "migration_final_seconds": [0.016, 0, None],
        }
        by_outcome = [
            found[f"kvferry_instance_migrations_ended_total{{instance_id=a,outcome={outcome}}}"]
            for outcome in ("committed", "aborted")
        ]
        assert by_outcome == [2, 1]


async def test_instances_are_shown_with_their_load_and_the_age_of_what_they_said(start_gateway: StartGateway) -> None:
    async with instances("a", "b") as (a, b), start_gateway(a, b) as running:
        await until(lambda: running.gateway.store.up)
        found = await read(running)
        assert found["kvferry_redis_up"] == 1
        assert found["kvferry_instance_freeness_steps{instance_id=a}"] == a.freeness_steps
        assert found["kvferry_instance_blocks{instance_id=b}"] == 1000
        assert 0 <= found["kvferry_instance_report_age_seconds{instance_id=b}"] < 60
        assert found[f"kvferry_model_instances{{model={MODEL}}}"] == 2
        await b.stop()

        async def is_shown_as_lost() -> bool:
            return (await read(running))["kvferry_instance_healthy{instance_id=b}"] == 0

        await until_true(is_shown_as_lost)
        await b.listen(free_port())


async def test_a_lost_redis_shows(start_gateway: StartGateway) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    async with instances("a") as (a,), start_gateway(a, redis_url=nowhere) as running:
        await until(lambda: running.gateway.store.failures)
        found = await read(running)
        assert found["kvferry_redis_up"] == 0
        assert found["kvferry_redis_failures_total"] >= 1
        assert "kvferry_redis_answer_age_seconds" not in found
        assert found["kvferry_leader"] == 0


async def test_the_operators_routes_show_the_same_counts(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        await running.stream()
        counted = (await running.admin("GET", "/admin/instances")).json()["counters"]
        assert (
            counted["legs{instance_id=a,kind=first}"]
            == (await read(running))["kvferry_legs_total{instance_id=a,kind=first}"]
        )


@pytest.mark.parametrize(
    ("settings", "let_in"),
    [
        ({}, {None, "x", ADMIN_KEY}),
        ({"metrics_key": "metrics"}, {"metrics", ADMIN_KEY}),
        ({"metrics_key": "metrics", "admin_key": ""}, {"metrics"}),
        ({"host": "0.0.0.0"}, {ADMIN_KEY}),
        ({"host": "0.0.0.0", "admin_key": ""}, set()),
        ({"host": "0.0.0.0", "api_keys": ("client",)}, {ADMIN_KEY}),
    ],
)
async def test_who_may_read_the_metrics(settings: dict[str, Any], let_in: set[str | None]) -> None:
    async with unstarted(**settings) as app:
        for key in (None, "x", "client", "metrics", ADMIN_KEY):
            headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
            status, _ = await ask(app, "GET", "/metrics", headers)
            assert (status == 200) == (key in let_in or None in let_in), key
        assert (await ask(app, "POST", "/metrics", [(b"authorization", b"Bearer " + ADMIN_KEY.encode())]))[0] != 200


async def test_openmetrics_is_spoken_where_it_is_asked_for(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        accept = "application/openmetrics-text; version=1.0.0; charset=utf-8"
        response = await running.client.get("/metrics", headers={"accept": accept})
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        assert response.text.endswith("# EOF\n")


class unstarted:  # noqa: N801
    """A gateway that no loop of its own disturbs, called without a socket."""

    def __init__(self, **settings: Any) -> None:
        nowhere = f"redis://127.0.0.1:{free_port()}/0"
        values = {"secret": SECRET, "instance_urls": (), "admin_key": ADMIN_KEY, "redis_url": nowhere}
        self.gateway = Gateway(Settings(**(values | settings)))

    async def __aenter__(self) -> Gateway:
        return self.gateway

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.stop()


async def ask(
    app: Gateway, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes = b""
) -> tuple[int, str]:
    sent: list[MutableMapping[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


JSON = [(b"content-type", b"application/json")]


def nameable(index: int) -> Iterator[tuple[str, bytes]]:
    """What a client may choose: a path, and a body with a model and a user."""
    models = [f"m-{index}", f'q"uo\\te\n{index}', f"long-{index}" * 100, f"é-{index}"]
    yield "/v1/chat/completions", json.dumps({"model": models[index % 4], "user": f"user-{index}"}).encode()
    yield f"/v1/x/{index}", b"{}"
    yield "/v1/completions", json.dumps({"model": f"{index}" * 3000}).encode()


async def test_what_clients_choose_makes_no_series() -> None:
    async with unstarted() as app:
        known(app, "a", MODEL)

        async def count(first: int, last: int) -> tuple[set[str], int]:
            """What is there after requests of these numbers: without a reader in between, who would have it swept."""
            for index in range(first, last):
                for path, body in nameable(index):
                    status, _ = await ask(app, "POST", path, [*JSON, (b"x-request-id", f"{index}".encode())], body)
                    assert status in (400, 404)
            counted = set(app.counters.to_json())
            _, text = await ask(app, "GET", "/metrics", [])
            return counted | set(parsed(text)), len(text)

        series, _ = await count(0, 4)
        after, size = await count(4, 700)
        assert after == series
        assert size < 1_000_000


async def test_instances_and_models_that_are_gone_leave_no_series() -> None:
    async with unstarted() as app:
        url = f"http://127.0.0.1:{free_port()}"
        sizes = []
        for index in range(60):
            app.members.forget(url, keep="")
            known(app, f"instance-{index}", f"model-{index}", url)
            status, _ = await ask(
                app, "POST", "/v1/completions", JSON, json.dumps({"model": f"model-{index}"}).encode()
            )
            assert status == 502
            if index % 20 == 19:
                _, text = await ask(app, "GET", "/metrics", [])
                assert f"instance-{index}" in text
                assert f"model-{index}" in text
                sizes.append(len(parsed(text)))
        assert len(set(sizes)) == 1
        app.members.forget(url, keep="")
        await app._forget_gone()
        _, text = await ask(app, "GET", "/metrics", [])
        assert not re.search(r"(instance|model)-\d", text)
        assert not app.dispatcher._sendings
        assert not app.backend._pools


def known(app: Gateway, instance_id: str, model: str, url: str = "http://127.0.0.1:1") -> None:
    """As if discovery had found it."""
    fake = FakeInstance(instance_id, models=(model,))
    report = wire.Report.from_json(fake.report())
    app.members.probed(
        Instance(instance_id, url, fake.boot_id), [{"id": model}], True, None, asyncio.get_running_loop().time()
    )
    app.members.reported(report, asyncio.get_running_loop().time())


def test_a_count_is_under_the_first_bound_that_is_not_below_it() -> None:
    distribution = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        distribution.observe(value)
    assert (distribution.counts, distribution.sum) == ([2, 2, 1], 14.0)


def test_every_name_that_is_counted_is_described() -> None:
    source = "".join(path.read_text() for path in Path(gateway.__file__).parent.rglob("*.py"))
    named = set(re.findall(r'counters\.(?:add|distribution)\(\s*"(\w+)"', source))
    assert named
    assert named <= set(FAMILIES)


def test_an_undeclared_name_or_label_is_a_bug() -> None:
    with pytest.raises(AssertionError, match=r"counters\.py"):
        Counters().add("no_such_name")
    with pytest.raises(AssertionError, match="labels"):
        Counters().add("legs", kind="first")


def gateways_own() -> set[str]:
    """The names of all metrics that this package writes."""
    counts = {f"kvferry_{name}" + ("" if family.bounds else "_total") for name, family in FAMILIES.items()}
    gauges = {f"kvferry_{name}" for name in GAUGES} | {f"kvferry_instance_{name}" for name in INSTANCE_GAUGES}
    totals = {f"kvferry_instance_{name}_total" for name in INSTANCE_TOTALS}
    more = {"kvferry_redis_failures_total", "kvferry_instance_info", "kvferry_instance_ejections_total"}
    return counts | gauges | totals | more


def servers_own() -> set[str]:
    """Those of the plugin, as its source names them: it is not imported here, for it needs vLLM's environment."""
    source = (ROOT / "vllm_plugin" / "metrics.py").read_text()
    kinds = re.findall(r'(Counter|Histogram)\(\s*"(\w+)"', source)
    return {name + ("_total" if kind == "Counter" else "") for kind, name in kinds}


def test_the_documentation_names_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    named = [set(re.findall(r"`(kvferry_[a-z_]+)", part)) for part in page.split("## The servers' own page")]
    assert named == [gateways_own(), servers_own()]


def test_the_dashboard_asks_for_no_metric_that_is_not_there() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "kvferry.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {re.sub("_bucket$", "", name) for query in queries for name in re.findall(r"kvferry_[a-z_]+", query)}
    assert asked <= gateways_own() | servers_own()
    labels = {label for query in queries for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
    known = {"instance_id", "le"} | {label for family in FAMILIES.values() for label in family.labels}
    assert labels <= known


def test_the_dashboard_shows_what_operators_look_for() -> None:
    text = (ROOT / "deploy" / "grafana" / "kvferry.json").read_text()
    for name in (
        *("time_to_first_event_seconds", "event_gap_seconds", "instance_requests_waiting", "output_tokens_total"),
        *("errors_total", "instance_migrations_ended_total", "instance_migration_stages_total", "move_pause_seconds"),
        *("instance_migration_bytes_total", "instance_ejections_total", "limits_refused_total", "leader_actions_total"),
    ):
        assert f"kvferry_{name}" in text


def test_panels_lie_side_by_side() -> None:
    panels = json.loads((ROOT / "deploy" / "grafana" / "kvferry.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({str(panel["gridPos"]) for panel in panels}) == len(panels)


async def test_a_name_of_any_characters_costs_no_page(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,):
        a.models = (MODEL, 'q"\n\\{}')
        a.report_changes = {"vllm_version": 'v"\n\\'}
        async with start_gateway(a) as running:
            await until(lambda: running.gateway.members.all()[0].report is not None)
            page = await running.client.get("/metrics")
            assert page.status_code == 200
            assert 'model="q\\"\\n\\\\{}"' in page.text
            assert 'vllm="v\\"\\n\\\\"' in page.text
