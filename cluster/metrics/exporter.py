"""MetricsExporter: takes samples to Ray's metrics, which every node's agent shows to Prometheus.

Histograms travel as gauges named like a histogram's series (`_bucket`, `_sum`, `_count`; cumulative).
Ray's own histograms take one call per value, and its agent repeats each with the middle of its bucket:
sums are wrong, and at 50,000 tokens/s an agent would do nothing else. Gauges also end with their process;
Ray shows a dead process' counters until the node's agent ends.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context
from typing import Final

from ray.util.metrics import Counter, Gauge

from cluster.metrics.catalogue import COMMON_LABELS, Buckets, Kind, Metric, Sample

FLUSH_S: Final = 1.0
"""Ray passes on what it has at most once a second, and forgets gauges in between."""
_log: Final = logging.getLogger(__name__)


class MetricsExporter:
    """Exports the samples of one process. Keeps what it has told Ray, since counters take differences."""

    def __init__(self, collect: Callable[[], Iterable[Sample]], common: Mapping[str, str]) -> None:
        """`common` gives the values of COMMON_LABELS. Ray must run."""
        self._collect = collect
        self._common = {label: common[label] for label in COMMON_LABELS}
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    async def run(self) -> None:
        """Export once a second until cancelled. Figures are read on the loop, told in a thread."""
        while True:
            await asyncio.to_thread(self.export, tuple(self._collect()))
            await asyncio.sleep(FLUSH_S)

    def export(self, samples: Iterable[Sample]) -> None:
        """Tell Ray. About 3 us per series."""
        for sample in samples:
            if isinstance(sample.value, Buckets):
                self._export_buckets(sample, sample.value)
            elif sample.metric.kind is Kind.COUNTER:
                self._count(sample.metric, sample.labels, sample.value)
            else:
                self._set(sample.metric, sample.metric.name, self._tags(sample), sample.value)

    def _export_buckets(self, sample: Sample, buckets: Buckets) -> None:
        metric, tags = sample.metric, self._tags(sample)
        through = 0
        for edge, count in zip((*metric.edges, None), buckets.counts, strict=True):
            through += count
            le = "+Inf" if edge is None else f"{edge:g}"
            self._set(metric, f"{metric.name}_bucket", tags | {"le": le}, through, "le")
        self._set(metric, f"{metric.name}_count", tags, through)
        self._set(metric, f"{metric.name}_sum", tags, buckets.sum)

    def _count(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        key = metric.name, labels
        more = value - self._told.get(key, 0.0)
        if more <= 0:
            return
        counter = self._counters.get(metric.name)
        if counter is None:
            names = (*COMMON_LABELS, *metric.labels)
            counter = self._counters[metric.name] = Counter(metric.name, metric.help, names)
        counter.inc(more, self._common | dict(zip(metric.labels, labels, strict=True)))
        self._told[key] = value

    def _set(self, metric: Metric, name: str, tags: dict[str, str], value: float, *more: str) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(name, metric.help, (*COMMON_LABELS, *metric.labels, *more))
        gauge.set(float(value), tags)

    def _tags(self, sample: Sample) -> dict[str, str]:
        return self._common | dict(zip(sample.metric.labels, sample.labels, strict=True))


def export_in_background(
    collect: Callable[[], Iterable[Sample]], common: Mapping[str, str]
) -> asyncio.Task[None]:
    """Start an exporter; the caller keeps the task. An export that fails ends it with a line in the log."""
    work = MetricsExporter(collect, common).run()
    task = asyncio.get_running_loop().create_task(work, context=Context())
    task.add_done_callback(_note_end)
    return task


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _log.error("metrics are no longer exported", exc_info=task.exception())
