"""Spans through OpenTelemetry's SDK. Imported only when an endpoint was given: the packages are an extra."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from graphrunner.entrypoints.openai.tracing import FLUSH_TIMEOUT_MS, AttributeValue, RequestSpan

EXPORT_TIMEOUT_S = 5


class OtlpSpan:
    """A `RequestSpan`."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self._span.set_attribute(key, value)

    def add_event(self, name: str) -> None:
        self._span.add_event(name)

    def update_name(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, description: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, description))

    def end(self) -> None:
        self._span.end()


class OtlpTracer:
    """A `Tracer` with a provider of its own: a program around us keeps its global one."""

    def __init__(self, endpoint: str, version: str) -> None:
        resource = Resource.create({"service.name": "graphrunner", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("graphrunner", version)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        context = self._propagator.extract(dict(headers))
        return OtlpSpan(self._tracer.start_span(name, context=context, kind=SpanKind.SERVER))

    def close(self) -> None:
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()
