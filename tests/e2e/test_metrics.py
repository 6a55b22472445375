"""What Prometheus sees of a server under load: metrics, panels, alerts; its traces and its status."""

import concurrent.futures
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cluster.cli import main
from cluster.metrics.catalogue import COMMON_LABELS, METRICS, PREFIX, Kind, Metric
from deploy.grafana.alerts import ALERTS, prometheus_rules
from deploy.grafana.board import Query
from deploy.grafana.boards import BOARDS
from tests.e2e.prometheus import BINARY, Prometheus, scraping
from tests.e2e.server import Server, start_null, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(BINARY is None, reason="needs prometheus (apt-get install prometheus)"),
]
CONFIG = """\
engine: {max_num_seqs: 4, num_threads: 1, kv_cache_memory: 65536, itl_target_ms: 60000}
tiers: [{name: first, level: 0, ttft_target_ms: 60000}, {name: last, level: 1}]
metrics: {report_interval_s: 1, targets_file: targets.json}
"""


class Collector(HTTPServer):
    """A collector of OpenTelemetry's spans that keeps them as they come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.bodies: list[bytes] = []

    def names(self, trace: str) -> set[str]:
        """Return the names of the spans of a trace."""
        spans = [
            span
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return {span.name for span in spans if span.trace_id.hex() == trace}


class TakesSpans(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


LONG = "10m"
"""A window that reaches back to the load, however slow the machine is."""
QUERIES = [
    pytest.param(query, id=f"{board.title}: {panel.title} {position}")
    for board in BOARDS
    for panel in board.panels
    for position, query in enumerate(panel.queries)
]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """What takes the spans."""
    with Collector(("127.0.0.1", 0), TakesSpans) as started:
        thread = threading.Thread(target=started.serve_forever)
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def watched(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one router and one replica."""
    tracing = f"tracing: {{endpoint: http://127.0.0.1:{collector.server_port}}}\n"
    server = start_null(tmp_path_factory.mktemp("watched"), CONFIG + tracing)
    yield server
    assert server.stop() == 0
    assert not (server.config.parent / "targets.json").exists()


@pytest.fixture(scope="module")
def prometheus(watched: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped the server while it answered, until rates are known."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "rules.yml"
    rules.write_text(yaml.safe_dump(prometheus_rules()))
    with scraping(watched.config.parent / "targets.json", folder, rules) as started:
        load(watched)
        # A counter's first appearance is no increase: only the second load makes one.
        wait_for(lambda: started.value("sum(ray_headway_output_tokens_total)"), "the load to be seen")
        load(watched)
        grown = f"sum(rate(ray_headway_output_tokens_total[{LONG}])) > 0"
        wait_for(lambda: started.value(grown), "rates to be known")
        yield started


def load(server: Server) -> None:
    """Eight streams, two at a time, of two prompts."""
    body = {"model": "null", "max_tokens": 100, "stream": True, "temperature": 0}
    prompts = ["once upon a time " * 40, "there was a train " * 40]

    def stream(number: int) -> int:
        asked = body | {"prompt": prompts[number % 2]}
        return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).status_code

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(stream, range(8))) == [200] * 8


def runnable(expr: str) -> str:
    """Fill in Grafana's variables."""
    return expr.replace("$application", ".*").replace("$__rate_interval", LONG)


def series_names(metric: Metric) -> list[str]:
    name = f"{PREFIX}{metric.name}"
    return [f"{name}{end}" for end in ("_bucket", "_sum", "_count")] if metric.edges else [name]


@pytest.mark.parametrize("metric", [m for m in METRICS if not m.event_only], ids=lambda m: m.name)
def test_every_metric_is_there_with_its_type_and_labels(prometheus: Prometheus, metric: Metric) -> None:
    for name in series_names(metric):
        series = prometheus.query(name)
        assert series, name
        labels = {*COMMON_LABELS, *metric.labels} | ({"le"} if name.endswith("_bucket") else set())
        labels.discard("code")  # Prometheus has no label of an empty value: that of a good answer
        assert all(labels <= set(one["metric"]) for one in series)
        family = name.removesuffix("_total")  # as OpenMetrics names a counter
        (described,) = prometheus.get("metadata", metric=family)[family]
        assert described["type"] == ("counter" if metric.kind is Kind.COUNTER else "gauge")
        assert described["help"] == metric.help
    if metric.edges:
        edges = {float(one["metric"]["le"]) for one in prometheus.query(f"{PREFIX}{metric.name}_bucket")}
        assert edges == {*metric.edges, float("inf")}


def test_nothing_of_ours_is_there_that_the_catalogue_does_not_have(prometheus: Prometheus) -> None:
    known = {name for metric in METRICS for name in series_names(metric)}
    names = prometheus.get("label/__name__/values")
    assert {name for name in names if name.startswith("ray_headway_")} <= known


@pytest.mark.parametrize("query", QUERIES)
def test_every_panel_shows_something(prometheus: Prometheus, query: Query) -> None:
    found = prometheus.query(runnable(query.expr))
    values = [float(one["value"][1]) for one in found]
    assert query.event_only or any(value == value for value in values), query.expr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alerts_expression_is_understood_and_quiet(prometheus: Prometheus, alert: Any) -> None:
    assert [one for one in prometheus.query(alert.expr) if float(one["value"][1]) > alert.above] == []
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    (rule,) = [rule for rule in rules if rule["name"] == alert.name]
    assert not rule.get("lastError")


def test_counts_are_exact(prometheus: Prometheus) -> None:
    """Sixteen answers of 100 tokens each: the first of every answer has no gap before it."""
    for metric, count in (
        ("itl_ms_count", 16 * 99),
        ("ttft_ms_count", 16),
        ("output_tokens_total", 1600),
        ('requests_total{outcome="ok"}', 16),
        ("engine_output_tokens_total", 1600),
    ):
        wait_until(prometheus, f"sum(ray_headway_{metric}) == {count}")


def wait_until(prometheus: Prometheus, condition: str) -> None:
    wait_for(lambda: prometheus.value(condition), condition)


def test_events_show_when_they_happen(prometheus: Prometheus, watched: Server) -> None:
    body = {"model": "other", "prompt": "once", "max_tokens": 1}
    assert httpx.post(f"{watched.url}/v1/completions", json=body, timeout=60).status_code == 404
    wait_until(prometheus, 'sum(ray_headway_requests_total{code="model_not_found"}) == 1')
    wait_until(prometheus, "sum(ray_headway_cached_tokens_total) > 0")


def test_a_trace_goes_from_the_client_to_the_engine(collector: Collector, watched: Server) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body = {"model": "null", "prompt": "once", "max_tokens": 3}
    answer = httpx.post(f"{watched.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    wanted = {"completion", "queue", "replica", "engine"}
    wait_for(lambda: collector.names(trace) == wanted or None, "all spans of the trace")


def test_status_shows_it_all(watched: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--url", watched.url]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["routers"], len(status["replicas"]), status["kv"]["blocks"]) == (1, 1, 4096)
    assert list(status["queues"]) == ["first", "last"]
    assert status["tiers"]["first"]["itl_target_ms"] == 60_000
    assert main(["status", "--once", "--url", watched.url]) == 0
    assert "first" in capsys.readouterr().out


def test_prometheus_finds_it_by_a_file_as_ray_writes_it(watched: Server) -> None:
    (group,) = json.loads((watched.config.parent / "targets.json").read_text())
    assert group["labels"] == {"job": "ray"}
    assert all(re.fullmatch(r"\S+:\d+", target) for target in group["targets"])
    own = Path(watched.folder()) / "ray" / "prom_metrics_service_discovery.json"
    assert json.loads(own.read_text()) == [group]
