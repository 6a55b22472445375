import pytest

from load.series import GAP_EDGES_MS, MAX_BINS, build_series
from tests.load.records import record


def test_bins_count_what_happened_in_them() -> None:
    series = build_series(
        [record(0.2, 0.3, 0.4), record(0.3, 0.9, 1.1), record(1.2, failure="reset", done_s=1.3)]
    )
    assert series.bin_s == 0.5
    assert [one.sent for one in series.bins] == [2, 0, 1]
    assert [one.answered for one in series.bins] == [1, 0, 1]
    assert [one.failed for one in series.bins] == [0, 0, 1]
    assert [one.in_flight for one in series.bins] == [1, 1, 0]
    assert [one.output_tokens_per_s for one in series.bins] == [4.0, 2.0, 2.0]


def test_latencies_belong_to_the_bin_they_began_or_ended_in() -> None:
    first, second, third = build_series([record(0.2, 0.3, 0.4), record(0.3, 0.9, 1.1)]).bins
    assert first.ttft_p50_ms == pytest.approx(350)
    assert second.ttft_p50_ms is None
    assert (first.itl_p50_ms, second.itl_p50_ms) == (pytest.approx(100), None)
    assert third.itl_p50_ms == pytest.approx(200)


def test_the_heatmap_counts_every_gap_once() -> None:
    series = build_series([record(0.0, 0.1, 0.112, 0.2, 9.0)])
    counts = {edge: sum(row[i] for row in series.gap_counts) for i, edge in enumerate(GAP_EDGES_MS)}
    assert {edge: count for edge, count in counts.items() if count} == {10.0: 1, 75.0: 1, 5000.0: 1}


def test_slow_readers_are_not_drawn() -> None:
    series = build_series([record(0.0, 0.1, 0.2, is_slow=True)])
    assert sum(map(sum, series.gap_counts)) == 0
    assert series.bins[0].ttft_p50_ms is None


def test_long_runs_have_wider_bins() -> None:
    series = build_series([record(float(i), i + 0.5) for i in range(0, 1000, 10)])
    assert series.bin_s == 10
    assert len(series.bins) <= MAX_BINS + 1


def test_no_requests_no_trouble() -> None:
    assert build_series([]).bins[0].sent == 0
