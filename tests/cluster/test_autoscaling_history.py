import pytest

from cluster.autoscaling_history import History, bucket, num_over, problem
from router.counters import ITL_EDGES_MS, TTFT_EDGES_MS, RouterCounters, TierCounters

KEPT_S = 90.0


def report(
    number: int, num_requests: int, epoch: int = 1, router: str = "a", **more: object
) -> RouterCounters:
    tier = TierCounters(0, num_requests=num_requests, **more)  # type: ignore[arg-type]
    return RouterCounters(router, epoch, number, (tier,))


def counted(*looks: list[RouterCounters]) -> int:
    """Requests counted by looks 5 s apart."""
    history, now = History(), 0.0
    for reports in looks:
        now += 5.0
        history = history.advanced(reports, now, KEPT_S)
    return history.tally(0, now, 60.0).num_requests


def test_a_first_report_is_where_counting_begins() -> None:
    assert counted([report(1, 1000)]) == 0
    assert counted([report(1, 1000)], [report(2, 1010)]) == 10


def test_a_restarted_router_counts_from_zero() -> None:
    assert counted([report(7, 1000)], [report(1, 4, epoch=2)], [report(2, 9, epoch=2)]) == 9


def test_late_and_repeated_reports_count_once() -> None:
    assert counted([report(1, 0)], [report(3, 30), report(2, 20), report(3, 30)], [report(2, 20)]) == 30


def test_a_counter_that_falls_is_begun_again() -> None:
    assert counted([report(1, 100)], [report(2, 40)], [report(3, 45)]) == 5


def test_routers_are_added() -> None:
    looks = [[report(n, 10 * n), report(n, 3 * n, router="b")] for n in (1, 2, 3)]
    assert counted(*looks) == 26


def test_cached_tokens_are_no_work() -> None:
    history = History().advanced([report(1, 0)], 0.0, KEPT_S)
    history = history.advanced([report(2, 2, input_tokens=300, cached_tokens=120)], 5.0, KEPT_S)
    assert history.tally(0, 5.0, 60.0).input_tokens == 180


def test_spans_end_where_they_should() -> None:
    history = History()
    for number in range(1, 40):
        history = history.advanced([report(number, number)], 5.0 * number, KEPT_S)
    now = 5.0 * 39
    assert history.tally(0, now, 15.0).num_requests == 3
    assert sum(i.seconds for i in history.within(now, 30.0, 30.0)) == pytest.approx(30.0)
    assert len(history.increments) == 18


def test_a_router_is_silent_before_it_is_forgotten() -> None:
    history = History().advanced([report(1, 1)], 0.0, KEPT_S)
    for now in (5.0, 10.0, 20.0):
        history = history.advanced([report(1, 1)], now, KEPT_S)
    assert history.silent(20.0, 15.0) == ("a",)
    assert not history.advanced([], 61.0, KEPT_S).routers


def test_buckets_and_shares() -> None:
    assert bucket(ITL_EDGES_MS, 1.0) == 0
    assert bucket(ITL_EDGES_MS, 1.01) == 1
    assert bucket(ITL_EDGES_MS, 9999.0) == len(ITL_EDGES_MS)
    counts = [0] * (len(TTFT_EDGES_MS) + 1)
    counts[bucket(TTFT_EDGES_MS, 1800.0)] = 100  # between 1,500 and 2,000
    counts[-1] = 7
    assert num_over(counts, TTFT_EDGES_MS, 2000.0) == 7
    assert num_over(counts, TTFT_EDGES_MS, 1750.0) == pytest.approx(57)
    assert num_over((), TTFT_EDGES_MS, 1750.0) == 0


def test_what_is_impossible_is_named() -> None:
    assert problem(report(1, 5)) is None
    assert problem(report(1, -1)) == "num_requests of tier 0 is -1"
    assert problem(report(1, 1, itl=(1,) * 99)) == "a histogram of tier 0 has too many buckets"
