"""What a collector gets: over HTTP, in protobuf, from the gateway and from both instances of a request that moves."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway import wire
from tests.conftest import StartGateway, chat_body, until
from tests.fake_instance import Exchange, FakeInstance, instances
from tests.test_admin import Migratable, migrate
from tests.test_tracing import PARENT, TRACE_ID


class Collector:
    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """Each with the name of the service that has sent it."""
        self.url = ""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            (service,) = [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def of(self, service: str) -> list[Any]:
        return [span for name, span in self.spans if name == service]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            found.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def traced(fake: FakeInstance) -> Iterator[None]:
    """The instance tells the collector of its requests, as vLLM does with ``--otlp-traces-endpoint``."""
    provider = TracerProvider(resource=Resource.create({"service.name": fake.instance_id}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    tracer, script = provider.get_tracer("vllm.llm_engine"), fake.script

    async def tells(exchange: Exchange) -> None:
        context = TraceContextTextMapPropagator().extract(exchange.request.headers)
        with tracer.start_as_current_span("llm_request", context, SpanKind.SERVER):
            await script(exchange)

    fake.script = tells
    yield
    provider.shutdown()


async def test_a_forced_migration_is_one_trace_of_the_gateway_and_both_instances(
    collector: Collector, start_gateway: StartGateway
) -> None:
    async with instances("a", "b") as (a, b):
        Migratable(a, b)
        with traced(a), traced(b):
            async with start_gateway(a, b, tracing="otlp") as running:
                body = chat_body(stream=True)
                async with running.client.stream("POST", "/v1/chat/completions", json=body, headers=PARENT) as response:
                    chunks = response.aiter_bytes()
                    await anext(chunks)
                    answer = await migrate(running, response.headers[wire.OWN_REQUEST_ID_HEADER], "b")
                    assert answer.json()["outcome"] == "committed"
                    assert b"[DONE]" in b"".join([chunk async for chunk in chunks])
                await until(lambda: collector.of("a") and collector.of("b"))
    # The gateway has sent the last of its own when it ends.
    (request,) = [span for span in collector.of("kvferry-gateway") if span.name == "POST /v1/chat/completions"]
    legs = {value(span, "kvferry.instance"): span for span in collector.of("kvferry-gateway") if span is not request}
    assert set(legs) == {"a", "b"}
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE_ID}
    assert request.parent_span_id.hex() == PARENT["traceparent"].split("-")[2]
    for instance_id, leg in legs.items():
        (own,) = collector.of(instance_id)
        assert (own.parent_span_id, leg.parent_span_id) == (leg.span_id, request.span_id)
    assert [value(legs[instance_id], "kvferry.leg") for instance_id in ("a", "b")] == ["first", "migrated"]
    assert [event.name for event in request.events] == ["first_token", "migrated"]


def value(span: Any, name: str) -> str:
    found: str = next(one.value.string_value for one in span.attributes if one.key == name)
    return found
