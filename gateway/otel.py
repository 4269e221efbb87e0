"""Tracing with OpenTelemetry: the only importer of it, loaded only when tracing is on (extra ``tracing``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.tracing import Headers, LegTrace, Trace, Tracer

SERVICE_NAME = "kvferry-gateway"
STOP_S = 5.0

_PROPAGATOR = TraceContextTextMapPropagator()
_CONTEXT_HEADERS = ("traceparent", "tracestate")
EVENTS_MAX = 128


class OtelLegTrace(LegTrace):
    def __init__(self, span: Any) -> None:
        self._span = span
        self._outcome = "unused"
        """A leg that waited at a destination whose migration came to nothing."""

    def headers(self, headers: Headers) -> Headers:
        """The leg's own context in place of the client's: the instance's spans become its children."""
        own: dict[str, str] = {}
        _PROPAGATOR.inject(own, set_span_in_context(self._span))
        kept = tuple((name, value) for name, value in headers if name.lower() not in _CONTEXT_HEADERS)
        return (*kept, *own.items())

    def outcome(self, outcome: str) -> None:
        self._outcome = outcome

    def end(self) -> None:
        if self._span.is_recording():
            self._span.set_attribute("kvferry.outcome", self._outcome)
            if self._outcome.startswith("lost"):
                self._span.set_status(Status(StatusCode.ERROR))
            self._span.end()


class OtelTrace(Trace):
    def __init__(self, tracer: Any, headers: Sequence[tuple[bytes, bytes]]) -> None:
        carrier = {name: value.decode("latin-1") for name, value in _context(headers)}
        self._tracer = tracer
        self._span = tracer.start_span("request", _PROPAGATOR.extract(carrier), SpanKind.SERVER)
        self._events = 0
        self.trace_id = format_trace_id(self._span.get_span_context().trace_id)

    def leg(self, instance_id: str, boot_id: str, kind: str) -> LegTrace:
        attributes = {"kvferry.instance": instance_id, "kvferry.boot_id": boot_id, "kvferry.leg": kind}
        context = set_span_in_context(self._span)
        return OtelLegTrace(self._tracer.start_span("leg", context, SpanKind.CLIENT, attributes))

    def event(self, name: str, **attributes: str | int | float) -> None:
        self._events += 1
        if self._events <= EVENTS_MAX:
            self._span.add_event(name, _named(attributes))

    def end(self, name: str, failed: bool, **attributes: str | int | float) -> None:
        self._span.update_name(name)
        self._span.set_attributes(_named(attributes))
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class OtelTracer(Tracer):
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvferry")

    def begin(self, headers: Sequence[tuple[bytes, bytes]]) -> Trace:
        return OtelTrace(self._tracer, headers)

    async def stop(self) -> None:
        """The SDK sends from a thread of its own, which a collector that hangs may hold up."""
        await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(self._provider.shutdown))}, timeout=STOP_S)


def otlp_tracer() -> OtelTracer:
    """Sends over HTTP, as the standard ``OTEL_*`` variables say."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": SERVICE_NAME})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracer(provider)


def _context(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, bytes]]:
    """W3C Trace Context: of a ``traceparent`` that comes twice none is valid; lines of ``tracestate`` are one list."""
    parents = [value for name, value in headers if name == b"traceparent"]
    states = [value for name, value in headers if name == b"tracestate"]
    if len(parents) != 1:
        return []
    return [("traceparent", parents[0])] + ([("tracestate", b",".join(states))] if states else [])


def _named(attributes: dict[str, str | int | float]) -> dict[str, str | int | float]:
    return {name if "." in name else f"kvferry.{name}": value for name, value in attributes.items()}
