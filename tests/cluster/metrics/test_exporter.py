"""What reaches Ray of a process' samples."""

from collections.abc import Mapping

import pytest

from cluster.metrics import exporter
from cluster.metrics.catalogue import Kind, Metric, Sample, histogram_sample
from cluster.metrics.exporter import MetricsExporter
from router.histogram import Histogram

COMMON = {"application": "a", "deployment": "d", "replica": "r"}
COUNTED = Metric(name="c_total", kind=Kind.COUNTER, help="", labels=("tier",))
LEVEL = Metric(name="g", kind=Kind.GAUGE, help="")
SPREAD = Metric(name="h_ms", kind=Kind.HISTOGRAM, help="", edges=(1.0, 2.5))


class FakeRay:
    """Keeps what its metrics are told, by name."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, dict[str, str]]] = []

    def family(self, name: str, help: str, labels: tuple[str, ...]) -> "FakeFamily":  # noqa: ARG002 - as Ray's
        return FakeFamily(self, name, labels)


class FakeFamily:
    def __init__(self, ray: FakeRay, name: str, labels: tuple[str, ...]) -> None:
        self._ray, self._name, self._labels = ray, name, labels

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        assert set(tags) == set(self._labels)  # Ray raises for missing ones
        self._ray.told.append((self._name, value, {k: v for k, v in tags.items() if k not in COMMON}))

    inc = set


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(exporter, "Gauge", fake.family)
    monkeypatch.setattr(exporter, "Counter", fake.family)
    return fake


def test_counters_are_told_what_came_on_top(ray: FakeRay) -> None:
    exports = MetricsExporter(list, COMMON)
    for value in (0.0, 3.0, 3.0, 7.0):
        exports.export([Sample(COUNTED, ("gold",), value)])
    assert ray.told == [("c_total", 3.0, {"tier": "gold"}), ("c_total", 4.0, {"tier": "gold"})]


def test_gauges_are_told_every_time_for_ray_forgets_them(ray: FakeRay) -> None:
    exports = MetricsExporter(list, COMMON)
    for _ in range(2):
        exports.export([Sample(LEVEL, (), True)])
    assert ray.told == [("g", 1.0, {})] * 2


def test_histograms_are_cumulative_and_end_in_infinity(ray: FakeRay) -> None:
    histogram = Histogram(SPREAD.edges)
    for value in (0.5, 2.0, 2.0, 9.0):
        histogram.observe(value)
    MetricsExporter(list, COMMON).export([histogram_sample(SPREAD, histogram)])
    assert ray.told == [
        ("h_ms_bucket", 1.0, {"le": "1"}),
        ("h_ms_bucket", 3.0, {"le": "2.5"}),
        ("h_ms_bucket", 4.0, {"le": "+Inf"}),
        ("h_ms_count", 4.0, {}),
        ("h_ms_sum", 13.5, {}),
    ]
