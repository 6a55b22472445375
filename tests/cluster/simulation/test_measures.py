import pytest

from cluster.simulation.measures import Histogram, Measures, Window
from cluster.simulation.summary import direction_changes, interval
from router.tenants import Tier
from tests.cluster.simulation.small_world import run_small

TIERS = (Tier(name="a", level=0, ttft_target_ms=1000.0, itl_target_ms=50.0), Tier(name="b", level=1))


def test_a_histogram_knows_quantiles_to_two_percent() -> None:
    histogram = Histogram()
    for i in range(1, 1001):
        histogram.add(i / 1000)
    assert histogram.quantile(0.5) == pytest.approx(0.5, rel=0.02)
    assert histogram.quantile(0.99) == pytest.approx(0.99, rel=0.02)
    assert histogram.mean == pytest.approx(0.5005)


def test_a_window_is_met_while_one_in_a_hundred_misses() -> None:
    assert Window(requests=100, ttft_missed=1, gaps=1000, gaps_over=10).is_met
    assert not Window(requests=99, ttft_missed=1).is_met
    assert not Window(gaps=1000, gaps_over=11).is_met


def test_a_request_without_a_first_token_is_late() -> None:
    tier = Measures(TIERS, None).tiers[0]
    tier.first_token(10.0, 0.5)
    tier.first_token(20.0, 1.5)
    tier.first_token(30.0, None)
    assert tier.attainment == pytest.approx(1 / 3)


def test_a_tier_without_targets_cannot_miss_them() -> None:
    tier = Measures(TIERS, None).tiers[1]
    tier.first_token(0.0, 1e6)
    tier.gap(0.0, 1e6, 5)
    assert tier.attainment == tier.itl_attainment == 1.0
    assert Measures(TIERS, 20.0).tiers[1].itl_target_s == 0.02


def test_only_whole_minutes_are_judged_and_one_tier_spoils_them() -> None:
    measures = Measures(TIERS, None)
    measures.tiers[0].first_token(130.0, None)
    assert measures.windows_met(0.0, 240.0) == 0.75
    assert measures.windows_met(10.0, 170.0) == 1.0  # minute 2 is not whole


def test_the_confidence_interval_is_students() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - 2.0 == pytest.approx(4.303 / 3**0.5)


def test_turns_are_counted_not_moves() -> None:
    outcome = run_small(seconds=5.0)
    for targets, turns in (([1, 2, 3], 0), ([1, 2, 1], 1), ([1, 2, 2, 1, 3], 2)):
        outcome.targets[:] = [(float(i), target) for i, target in enumerate(targets)]
        assert direction_changes(outcome) == turns
