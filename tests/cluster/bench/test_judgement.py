import pytest

from cluster.bench.judgement import Judgement, score, standard_error, wilson


def judgement(met: int, replica_s: float = 3600.0, changes: int = 0) -> Judgement:
    return Judgement(
        minutes=10,
        met=met,
        replica_s=replica_s,
        direction_changes=changes,
        requests=1000,
        refused=1,
        seconds=900.0,
    )


def test_a_score_adds_minutes_hours_and_changes_up() -> None:
    found = score([judgement(10, 4000.0), judgement(9, 5000.0, changes=1)], [judgement(10, 3000.0)] * 2)
    assert found["windows_met_fraction"] == pytest.approx(19 / 20)
    assert found["replica_hours_over_oracle"] == pytest.approx(1.5)
    assert found["direction_changes_per_day"] == pytest.approx(86_400 / 1800)
    assert found["refused_fraction"] == pytest.approx(1e-3)


def test_the_interval_is_wilsons_and_does_not_vanish_where_all_minutes_are_met() -> None:
    low, high = wilson(19, 20)
    assert (low, high) == (pytest.approx(0.764, abs=1e-3), pytest.approx(0.991, abs=1e-3))
    low, high = wilson(100, 100)
    assert (low, high) == (pytest.approx(0.963, abs=1e-3), pytest.approx(1.0))
    assert wilson(0, 0) == (0.0, 1.0)


def test_the_standard_error_is_that_of_stretches() -> None:
    assert standard_error([judgement(10), judgement(8)]) == pytest.approx(0.1)
