"""A request as its trace tells it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.app import Gateway, build_tracer
from gateway.config import Budgets, Settings
from gateway.errors import ConfigError
from gateway.otel import OtelTracer
from gateway.tracing import NO_TRACER
from tests.conftest import INTERVALS, Running, StartGateway, chat_body, http_client, serve, until
from tests.fake_instance import SECRET, FakeInstance, instances
from tests.scripts import loses_after, moves_after, starts_and_waits

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "tracestate": "vendor=1"}


@contextlib.asynccontextmanager
async def traced(redis_url: str, *fakes: FakeInstance) -> AsyncIterator[tuple[Running, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    urls = tuple(fake.url for fake in fakes)
    settings = Settings(
        SECRET, urls, redis_url, budgets=Budgets(header_grace_s=0.05), intervals=INTERVALS, admin_key="k"
    )
    gateway = Gateway(settings, OtelTracer(provider))
    async with serve(gateway) as url, http_client(url) as client:
        yield Running(gateway, url, client), exporter


async def spans(running: Running, exporter: InMemorySpanExporter) -> tuple[Any, list[Any]]:
    """The request's span, once it has ended, and those of its legs."""
    await until(lambda: any(span.parent is None or span.parent.is_remote for span in exporter.get_finished_spans()))
    finished = exporter.get_finished_spans()
    (server,) = [span for span in finished if span.parent is None or span.parent.is_remote]
    legs = [span for span in finished if span is not server]
    assert all(leg.parent.span_id == server.context.span_id for leg in legs)
    return server, legs


def told(legs: list[Any]) -> list[tuple[str, str, str]]:
    names = ("kvferry.instance", "kvferry.leg", "kvferry.outcome")
    return sorted(tuple(leg.attributes[name] for name in names) for leg in legs)


async def test_a_request_that_moves_is_one_trace_across_both_instances(redis_url: str) -> None:
    async with instances("a", "b") as (a, b), traced(redis_url, a, b) as (running, exporter):
        a.script = moves_after(2, b)
        await running.client.post("/v1/chat/completions", json=chat_body(stream=True), headers=PARENT)
        server, legs = await spans(running, exporter)
        assert f"{server.context.trace_id:032x}" == TRACE_ID
        assert server.name == "POST /v1/chat/completions"
        assert server.attributes["http.response.status_code"] == 200
        assert told(legs) == [("a", "first", "left"), ("b", "migrated", "ended")]
        first, moved = server.events
        assert (first.name, moved.name, moved.attributes["kvferry.migration"]) == ("first_token", "migrated", "m1")
        assert moved.attributes["kvferry.pause_ms"] > 0
        for fake, leg in zip(
            (a, b), sorted(legs, key=lambda leg: str(leg.attributes["kvferry.instance"])), strict=True
        ):
            sent = fake.received[0].headers
            assert sent["traceparent"] == f"00-{TRACE_ID}-{leg.context.span_id:016x}-01"
            assert sent["tracestate"] == "vendor=1"
            assert leg.attributes["kvferry.boot_id"] == "boot-1"


async def test_a_resume_and_its_lost_leg_are_told(redis_url: str) -> None:
    async with instances("a", "b") as (a, b), traced(redis_url, a, b) as (running, exporter):
        a.script = loses_after(3, "cut")
        await running.stream()
        server, legs = await spans(running, exporter)
        assert server.parent is None
        assert told(legs) == [("a", "first", "lost: leg_cut"), ("b", "resumed", "ended")]
        assert [event.name for event in server.events] == ["first_token", "resumed"]


async def test_a_client_that_leaves_ends_its_spans(redis_url: str) -> None:
    async with instances("a") as (a,), traced(redis_url, a) as (running, exporter):
        a.script = starts_and_waits
        async with running.client.stream("POST", "/v1/chat/completions", json=chat_body(stream=True)) as response:
            await anext(response.aiter_bytes())
        server, legs = await spans(running, exporter)
        assert server.attributes["kvferry.outcome"] == "client_gone"
        assert told(legs) == [("a", "first", "cancelled")]


@pytest.mark.parametrize("value", ["", "nonsense", "00-0-0-01", f"ff-{TRACE_ID}-b7ad6b7169203331-01", "é" * 100])
async def test_a_malformed_trace_context_begins_a_new_trace(value: str, redis_url: str) -> None:
    async with instances("a") as (a,), traced(redis_url, a) as (running, exporter):
        headers = [(b"traceparent", value.encode())]
        response = await running.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert response.status_code == 200
        server, legs = await spans(running, exporter)
        assert server.parent is None
        (leg,) = legs
        assert a.received[0].headers["traceparent"].split("-")[2] == f"{leg.context.span_id:016x}"


async def test_without_tracing_a_trace_context_passes_unchanged(start_gateway: StartGateway) -> None:
    async with instances("a") as (a,), start_gateway(a) as running:
        await running.client.post("/v1/chat/completions", json=chat_body(), headers=PARENT)
        assert {name: a.received[0].headers[name] for name in PARENT} == PARENT


def test_tracing_without_its_packages_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_tracer("off") is NO_TRACER
    monkeypatch.delitem(sys.modules, "gateway.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"kvferry\[tracing\]"):
        build_tracer("otlp")


async def test_a_collector_that_is_not_there_holds_nothing_up(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with instances("a") as (a,), start_gateway(a, tracing="otlp") as running:
        assert (await running.chat()).status_code == 200
        assert len(a.received[0].headers["traceparent"].split("-")) == 4
