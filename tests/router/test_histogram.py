import pytest

from router.histogram import COUNT_EDGES, ITL_EDGES_MS, LEG_EDGES_MS, WAIT_EDGES_MS, Histogram


def test_a_value_at_an_edge_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.num_observed, histogram.sum) == (5, 7.0)


def test_one_call_counts_equal_values() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(3.0, 4)
    assert (histogram.counts, histogram.sum) == ([0, 4], 12.0)


def test_quantiles_are_linear_within_a_bucket() -> None:
    histogram = Histogram((10.0, 20.0, 40.0))
    histogram.observe(5.0, 50)
    histogram.observe(30.0, 50)
    assert histogram.quantile(0.5) == pytest.approx(10.0)
    assert histogram.quantile(0.75) == pytest.approx(30.0)
    assert histogram.quantile(1.0) == pytest.approx(40.0)


def test_what_lies_above_all_edges_counts_as_the_last() -> None:
    histogram = Histogram((10.0, 20.0))
    histogram.observe(1e6)
    assert histogram.quantile(0.5) == 20.0


def test_nothing_has_no_quantile() -> None:
    assert Histogram((1.0,)).quantile(0.99) is None


def test_merged_counts_have_the_percentile_of_all_values() -> None:
    """Averaging would say 75 ms: half of the routers never saw a slow gap."""
    merged = Histogram(ITL_EDGES_MS)
    for value, times in ((20.0, 990), (150.0, 10)):
        one = Histogram(ITL_EDGES_MS)
        one.observe(value, times)
        merged.add(one.counts, one.sum)
    quantile = merged.quantile(0.98)
    assert quantile is not None
    assert quantile < 20.0
    assert merged.sum == 20.0 * 990 + 150.0 * 10


@pytest.mark.parametrize("edges", [ITL_EDGES_MS, LEG_EDGES_MS, WAIT_EDGES_MS, COUNT_EDGES])
def test_edges_ascend(edges: tuple[float, ...]) -> None:
    assert list(edges) == sorted(set(edges))
