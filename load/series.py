"""A run over time: equal bins of load, throughput and latency, and the heatmap of gaps. Pure."""

import math
from typing import Final

import msgspec
import numpy as np

from load.measures import ttft_ms
from load.record import RequestRecord
from load.statistics import Floats, Ints

MAX_BINS: Final = 120
BIN_WIDTHS_S: Final = (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
GAP_EDGES_MS: Final = (
    0.0, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 75.0, 100.0, 150.0, 200.0,
    300.0, 500.0, 1000.0, 2000.0, 5000.0,
)  # fmt: skip


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of time."""

    at_s: float
    sent: int
    answered: int
    failed: int
    output_tokens_per_s: float
    in_flight: int
    """At the end of the bin."""
    ttft_p50_ms: float | None
    """Of the requests sent in this bin."""
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    """Of the gaps that ended in this bin."""
    itl_p99_ms: float | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, warm-up and cool-down included."""

    bin_s: float
    bins: list[Bin]
    gap_edges_ms: tuple[float, ...] = GAP_EDGES_MS
    """Bucket i of the heatmap holds gaps of edge i up to edge i + 1; the last has no upper edge."""
    gap_counts: list[list[int]]
    """[num_bins][num_buckets]"""


def build_series(records: list[RequestRecord]) -> Series:
    """Cut the run into at most 120 bins. Answers that we read slowly count, but not their latencies."""
    end_s = max((max(record.done_s, record.first_sent_s) for record in records), default=0.0)
    bin_s = next((width for width in BIN_WIDTHS_S if end_s / width <= MAX_BINS), end_s / MAX_BINS)
    edges: Floats = np.arange(0, math.floor(end_s / bin_s) + 2, dtype=np.float64) * float(bin_s)
    gap_at, gaps = _gaps(records)
    gap_bin = np.digitize(gap_at, edges) - 1
    bucket = np.digitize(gaps, GAP_EDGES_MS) - 1
    counts = np.zeros((len(edges) - 1, len(GAP_EDGES_MS)), dtype=np.int64)
    np.add.at(counts, (gap_bin, bucket), 1)
    bins = _bins(records, edges, gap_bin, gaps)
    return Series(bin_s=float(bin_s), bins=bins, gap_counts=counts.tolist())


def _gaps(records: list[RequestRecord]) -> tuple[Floats, Floats]:
    arrays = [np.frombuffer(record.output_s) for record in records if not record.is_slow]
    ends = [instants[1:] for instants in arrays if len(instants) > 1]
    gaps = [np.diff(instants) * 1e3 for instants in arrays if len(instants) > 1]
    if not gaps:
        return np.empty(0), np.empty(0)
    return np.concatenate(ends), np.concatenate(gaps)


def _bins(records: list[RequestRecord], edges: Floats, gap_bin: Ints, gaps: Floats) -> list[Bin]:
    sent_at = np.array([record.first_sent_s for record in records])
    done_at = np.array([record.done_s for record in records])
    failed = np.array([record.failure is not None for record in records], dtype=bool)
    events = np.concatenate([np.frombuffer(record.output_s) for record in records] or [np.empty(0)])
    sent_bin = np.digitize(sent_at, edges) - 1
    ttft = np.array([math.nan if record.is_slow else ttft_ms(record) or math.nan for record in records])
    num_sent = np.histogram(sent_at, edges)[0]
    num_failed = np.histogram(done_at[failed], edges)[0]
    num_done = np.histogram(done_at, edges)[0]
    num_events = np.histogram(events, edges)[0]
    in_flight = np.cumsum(num_sent) - np.cumsum(num_done)
    bins = []
    for i in range(len(edges) - 1):
        firsts, between = ttft[sent_bin == i], gaps[gap_bin == i]
        firsts = firsts[~np.isnan(firsts)]
        bins.append(
            Bin(
                at_s=float(edges[i]),
                sent=int(num_sent[i]),
                answered=int(num_done[i] - num_failed[i]),
                failed=int(num_failed[i]),
                output_tokens_per_s=float(num_events[i] / (edges[1] - edges[0])),
                in_flight=int(in_flight[i]),
                ttft_p50_ms=_quantile(firsts, 0.5),
                ttft_p99_ms=_quantile(firsts, 0.99),
                itl_p50_ms=_quantile(between, 0.5),
                itl_p99_ms=_quantile(between, 0.99),
            )
        )
    return bins


def _quantile(values: Floats, q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
