import random
from itertools import pairwise

import numpy as np
import pytest

from load.arrivals import draw_arrivals, parse_rate, unit_gaps
from load.errors import LoadError
from load.lengths import parse_lengths
from load.tenants import Cast
from load.workload import OpenLoop, Workload, open_schedule
from tests.load.goodness import dispersion, kolmogorov_p_value


def poisson_times(rate: str, duration_s: float, seed: int = 1) -> np.ndarray:
    profile = parse_rate(rate, duration_s)
    return np.array(draw_arrivals(profile, unit_gaps("poisson", 1.0, random.Random(seed))))


def exponential_p_value(gaps: np.ndarray, rate: float) -> float:
    gaps = np.sort(gaps)
    return kolmogorov_p_value(gaps, 1 - np.exp(-rate * gaps))


@pytest.mark.parametrize("seed", range(5))
def test_poisson_gaps_are_exponential(seed: int) -> None:
    times = poisson_times("50", 200.0, seed)
    assert exponential_p_value(np.diff(times), 50.0) > 0.001


@pytest.mark.parametrize("seed", range(5))
def test_poisson_counts_are_as_dispersed_as_their_mean(seed: int) -> None:
    assert dispersion(poisson_times("50", 400.0, seed), 1.0, 400.0) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_what_all_workers_send_together_is_poisson(num_workers: int) -> None:
    workload = Workload(input_tokens=parse_lengths("8"), output_tokens=parse_lengths("8"))
    scripts = open_schedule(OpenLoop(profile=parse_rate("40", 200.0)), workload, Cast().sources)
    sent = sorted(s.at_s for w in range(num_workers) for s in scripts[w::num_workers])
    assert exponential_p_value(np.diff(sent), 40.0) > 0.001
    assert dispersion(np.array(sent), 1.0, 200.0) == pytest.approx(1.0, abs=0.3)


def test_the_test_itself_sees_gaps_that_are_not_exponential() -> None:
    profile = parse_rate("50", 200.0)
    times = np.array(draw_arrivals(profile, unit_gaps("gamma", 1.5, random.Random(1))))
    assert exponential_p_value(np.diff(times), 50.0) < 1e-6


def test_constant_gaps() -> None:
    times = draw_arrivals(parse_rate("4", 2.0), unit_gaps("constant", 1.0, random.Random(0)))
    assert times == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0])


@pytest.mark.parametrize("cv", [0.5, 2.0, 4.0])
def test_gamma_gaps_have_the_variation_asked_for(cv: float) -> None:
    next_gap = unit_gaps("gamma", cv, random.Random(3))
    gaps = np.array([next_gap() for _ in range(100_000)])
    assert gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_ramp_puts_three_quarters_into_its_second_half() -> None:
    times = poisson_times("ramp:0:100", 100.0)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert np.mean(times > 50) == pytest.approx(0.75, abs=0.02)


def test_a_ramp_is_poisson_after_its_time_change() -> None:
    times = poisson_times("ramp:0:100", 100.0)
    gaps = np.diff(times**2 / 2)
    assert exponential_p_value(gaps, 1.0) > 0.001


def test_steps_have_their_own_rates() -> None:
    times = poisson_times("steps:10,100,0", 300.0)
    counts = np.histogram(times, bins=[0, 100, 200, 300])[0]
    assert counts[0] == pytest.approx(1000, rel=0.15)
    assert counts[1] == pytest.approx(10_000, rel=0.05)
    assert counts[2] == 0


def test_a_day_has_its_valley_at_the_start_and_its_peak_in_the_middle() -> None:
    times = poisson_times("diurnal:50:0.8:100", 100.0)
    counts = np.histogram(times, bins=[0, 10, 45, 55, 90, 100])[0]
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert counts[2] > 5 * counts[0]


def test_arrivals_ascend_and_stay_within_the_run() -> None:
    times = poisson_times("steps:3,0,30,7", 60.0)
    assert all(a < b for a, b in pairwise(times))
    assert times[0] > 0
    assert times[-1] <= 60


def test_a_seed_gives_the_same_times_again() -> None:
    assert poisson_times("9", 30.0, 4).tolist() == poisson_times("9", 30.0, 4).tolist()
    assert poisson_times("9", 30.0, 4).tolist() != poisson_times("9", 30.0, 5).tolist()


@pytest.mark.parametrize(
    "rate", ["", "x", "0", "-1", "nan", "inf", "ramp:1", "steps:1,b", "diurnal:1:2:3", "poisson:3", "1:2"]
)
def test_rates_that_mean_nothing_are_refused(rate: str) -> None:
    with pytest.raises(LoadError, match="rate"):
        parse_rate(rate, 10.0)


def test_an_impossible_rate_is_refused_with_its_number() -> None:
    with pytest.raises(LoadError, match="1e\\+10 requests"):
        parse_rate("1e9", 10.0)


@pytest.mark.parametrize("cv", [0.0, -1.0, 1e6, float("nan")])
def test_a_variation_that_means_nothing_is_refused(cv: float) -> None:
    with pytest.raises(LoadError, match="variation"):
        unit_gaps("gamma", cv, random.Random(0))
