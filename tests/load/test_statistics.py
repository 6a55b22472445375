import math

import numpy as np
import pytest

from load.statistics import (
    curve,
    jain_index,
    max_min_shares,
    summarise,
)
from tests.load.goodness import dispersion, kolmogorov_p_value


def test_summary_of_known_values() -> None:
    summary = summarise(np.arange(1.0, 102.0))
    assert summary is not None
    assert (summary.count, summary.mean, summary.p50, summary.max) == (101, 51.0, 51.0, 101.0)
    assert (summary.p90, summary.p99) == (91.0, 100.0)


def test_no_values_no_summary() -> None:
    assert summarise(np.empty(0)) is None


def test_few_requests_have_no_interval() -> None:
    summary = summarise(np.arange(7.0))
    assert summary is not None
    assert summary.p50_ci is None


def test_intervals_cover_the_true_median_about_19_times_in_20() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        summary = summarise(rng.exponential(1.0, 100))
        assert summary is not None
        assert summary.p50_ci is not None
        covered += summary.p50_ci.low <= math.log(2) <= summary.p50_ci.high
    assert 180 <= covered <= 198


def test_intervals_know_that_gaps_of_one_answer_are_alike() -> None:
    rng = np.random.default_rng(5)
    levels = rng.exponential(10.0, 40)
    values = np.repeat(levels, 100)
    owners = np.repeat(np.arange(40), 100)
    clustered, naive = summarise(values, owners), summarise(values)
    assert clustered is not None
    assert naive is not None
    assert clustered.p50_ci is not None
    assert naive.p50_ci is not None
    assert clustered.p50_ci.high - clustered.p50_ci.low > 3 * (naive.p50_ci.high - naive.p50_ci.low)


def test_the_same_values_give_the_same_intervals() -> None:
    values = np.random.default_rng(1).exponential(1.0, 50)
    assert summarise(values) == summarise(values)


def test_jain_of_equals_and_of_one_that_has_all() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) == 1.0
    assert jain_index([1.0, 3.0]) == pytest.approx(0.8)


def test_max_min_gives_the_modest_what_they_ask_and_divides_the_rest() -> None:
    assert max_min_shares(30.0, [2.0, 100.0, 100.0], [1.0, 1.0, 1.0]) == [2.0, 14.0, 14.0]


def test_max_min_divides_by_weight() -> None:
    assert max_min_shares(30.0, [100.0, 100.0], [2.0, 1.0]) == [20.0, 10.0]


def test_max_min_never_gives_more_than_was_asked() -> None:
    assert max_min_shares(1000.0, [3.0, 4.0], [1.0, 5.0]) == [3.0, 4.0]


@pytest.mark.parametrize(("scaled", "p"), [(1.3581, 0.05), (1.6276, 0.01), (1.2238, 0.10)])
def test_kolmogorov_at_its_tabulated_critical_values(scaled: float, p: float) -> None:
    """Critical values of the asymptotic distribution (Massey 1951)."""
    n = 1_000_000
    distance = scaled / (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    values = (np.arange(n) + 0.5) / n
    shifted = values - (distance - 0.5 / n)
    assert kolmogorov_p_value(values, shifted) == pytest.approx(p, rel=0.01)


def test_dispersion_of_a_clock_and_of_bursts() -> None:
    assert dispersion(np.arange(1000) * 0.1 + 0.05, 1.0, 100.0) == 0.0
    assert dispersion(np.repeat(np.arange(100) + 0.5, 10)[::2], 2.0, 100.0) == 0.0
    assert dispersion(np.repeat(np.arange(0, 100, 10) + 0.5, 100), 1.0, 100.0) > 50


def test_curve_has_both_ends() -> None:
    points = curve(np.arange(11.0))
    assert (points[0], points[50], points[-1], len(points)) == (0.0, 5.0, 10.0, 101)
