"""OpenTelemetry: spans of requests, router -> queue -> engine, to a collector. Off unless configured."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, TraceFlags, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replicas.errors import ConfigError
from replicas.traced_requests import EngineTrace

_CONTEXT: Final = TraceContextTextMapPropagator()


def open_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter of OTLP over HTTP. Raises ConfigError when its package is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError("tracing: its package is missing: pip install 'headway[tracing]'") from None
    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")


def open_tracing(endpoint: str, service: str) -> "OtelTracing":
    """Return tracing to a collector. Raises ConfigError."""
    return OtelTracing(open_exporter(endpoint), service)


class OtelTracing:
    """router.tracing.Tracing, and the sink of engines' traces. Spans leave in batches, from a thread."""

    def __init__(self, exporter: SpanExporter, service: str, wall: Callable[[], float] = time.time) -> None:
        """Sampling is OpenTelemetry's: OTEL_TRACES_SAMPLER, all requests by default."""
        provider = TracerProvider(resource=Resource.create({"service.name": service}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self._provider = provider
        self._tracer = provider.get_tracer("headway")
        self._wall = wall

    def begin(self, traceparent: bytes, began_at: float) -> "OtelSpan":
        parent = _CONTEXT.extract({"traceparent": traceparent.decode("latin-1")})
        began_ns = self._ns(began_at)
        span = self._tracer.start_span("completion", parent, SpanKind.SERVER, start_time=began_ns)
        return OtelSpan(self._tracer, span, self._ns)

    def engine(self, trace: EngineTrace) -> None:
        """Record a request's way through an engine of this process; its clock is time.monotonic."""
        parent = _CONTEXT.extract({"traceparent": trace.traceparent})
        span = self._tracer.start_span("engine", parent, start_time=self._ns(trace.added_at))
        if trace.first_at is not None:
            span.add_event("first token", timestamp=self._ns(trace.first_at))
        span.set_attribute("headway.prompt_tokens", trace.num_prompt_tokens)
        span.set_attribute("headway.output_tokens", trace.num_output_tokens)
        span.set_attribute("headway.finish", trace.how)
        span.end(self._ns(trace.ended_at))

    def flush(self) -> None:
        """Send what waits."""
        self._provider.force_flush()

    def close(self) -> None:
        """End its thread, with what waits sent."""
        self._provider.shutdown()

    def _ns(self, monotonic_at: float) -> int:
        return round((self._wall() - time.monotonic() + monotonic_at) * 1e9)


class OtelSpan:
    """router.tracing.Span over OpenTelemetry's."""

    def __init__(self, tracer: Tracer, span: Span, ns: Callable[[float], int]) -> None:
        self._tracer = tracer
        self._span = span
        self._ns = ns

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        if not context.trace_flags & TraceFlags.SAMPLED:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def part(self, name: str, began_at: float, ended_at: float) -> None:
        parent = set_span_in_context(self._span)
        self._tracer.start_span(name, parent, start_time=self._ns(began_at)).end(self._ns(ended_at))

    def end(self, attributes: Mapping[str, str | int]) -> None:
        for key, value in attributes.items():
            self._span.set_attribute(key, value)
        self._span.end()
