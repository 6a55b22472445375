"""Spans of a request, from the client's context to the engine's."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.tracing import OtelTracing, open_exporter, open_tracing
from replicas.errors import ConfigError
from replicas.traced_requests import EngineTrace
from router.app import build_app
from router.generation import GenerationTimes
from router.text import TextCodec
from tests.router.asgi_client import CHAT, HI, begin
from tests.router.fake_backend import FakeBackend
from tests.router.tiny_tokenizers import byte_level_folder

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.from_folder(byte_level_folder(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(spans: InMemorySpanExporter) -> Iterator[OtelTracing]:
    made = OtelTracing(spans, "test")
    yield made
    made.close()


def by_name(tracing: OtelTracing, spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing.flush()
    return {span.name: span for span in spans.get_finished_spans()}


def ids(span: ReadableSpan) -> tuple[str, str]:
    """Trace id, and the parent's span id (empty for a root)."""
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else ""


async def test_a_completion_joins_the_clients_trace_and_hands_its_own_on(
    tracing: OtelTracing, spans: InMemorySpanExporter, byte_level: TextCodec
) -> None:
    backend = FakeBackend()
    app = build_app(backend, byte_level, tracing=tracing)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "r-1"}
    call = begin(app, CHAT, HI, headers=headers)
    generation = await backend.started()
    now = time.monotonic()
    generation.times = GenerationTimes(now - 0.2, now - 0.1)
    generation.stop()
    await call.finish()
    seen = by_name(tracing, spans)
    assert set(seen) == {"completion", "queue", "replica"}
    root = seen["completion"]
    assert ids(root) == (TRACE, PARENT)
    _, trace, own, flags = generation.traceparent.split("-")
    assert (trace, flags) == (TRACE, "01")
    assert ids(seen["queue"]) == ids(seen["replica"]) == (TRACE, own)
    assert root.attributes is not None
    assert root.attributes["headway.request_id"] == "r-1"
    assert root.attributes["headway.output_tokens"] == 1
    queue = seen["queue"]
    assert queue.end_time is not None
    assert queue.start_time is not None
    assert (queue.end_time - queue.start_time) / 1e9 == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-01", "\xff" * 55, f"00-{'0' * 32}-{PARENT}-01"])
def test_a_context_that_is_none_begins_a_trace_of_its_own(
    tracing: OtelTracing, spans: InMemorySpanExporter, header: str
) -> None:
    tracing.begin(header.encode("latin-1"), time.monotonic()).end({})
    trace, parent = ids(by_name(tracing, spans)["completion"])
    assert (parent, int(trace, 16) != 0) == ("", True)


def test_what_the_client_does_not_sample_nobody_records(
    tracing: OtelTracing, spans: InMemorySpanExporter
) -> None:
    span = tracing.begin(f"00-{TRACE}-{PARENT}-00".encode(), time.monotonic())
    span.part("queue", 0.0, 1.0)
    span.end({})
    assert span.traceparent == ""
    assert by_name(tracing, spans) == {}


def test_the_engines_span_hangs_below_the_routers(tracing: OtelTracing, spans: InMemorySpanExporter) -> None:
    now = time.monotonic()
    parent = f"00-{TRACE}-{PARENT}-01"
    tracing.engine(EngineTrace(parent, now - 3, 6, 0, now - 2, now - 1, num_output_tokens=9, how="stop"))
    span = by_name(tracing, spans)["engine"]
    assert ids(span) == (TRACE, PARENT)
    assert span.start_time is not None
    assert [(e.name, round((e.timestamp - span.start_time) / 1e9)) for e in span.events] == [
        ("first token", 1)
    ]
    assert span.attributes == {
        "headway.prompt_tokens": 6,
        "headway.output_tokens": 9,
        "headway.finish": "stop",
    }


def test_spans_reach_a_collector_by_otlp_over_http() -> None:
    bodies: list[tuple[str, bytes]] = []
    arrived = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()
            arrived.set()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.handle_request)
        thread.start()
        tracing = open_tracing(f"http://127.0.0.1:{collector.server_port}/", "test")
        tracing.begin(f"00-{TRACE}-{PARENT}-01".encode(), time.monotonic()).end({})
        tracing.close()
        assert arrived.wait(30)
        thread.join()
    (body,) = bodies
    assert body[0] == "/v1/traces"
    assert bytes.fromhex(TRACE) in body[1]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[tracing\]'"):
        open_exporter("http://127.0.0.1:4318")
