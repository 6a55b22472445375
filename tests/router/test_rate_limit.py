"""The bucket, on any clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.rate_limit import MAX_RETRY_AFTER_S, TokenBucket, retry_after_s


def test_a_bucket_refills_in_a_minute() -> None:
    bucket = TokenBucket.full(600, 0.0)
    assert bucket.take(600, 0.0)
    assert not bucket.take(1, 0.05)
    assert bucket.take(10, 1.0)
    assert bucket.advance(100.0) == 600


def test_the_wait_is_exact() -> None:
    bucket = TokenBucket.full(600, 0.0)
    bucket.take(500, 0.0)
    wait_s = bucket.wait_s(150, 0.0)
    assert wait_s == pytest.approx(5.0)
    assert not bucket.take(150, wait_s - 0.01)
    assert bucket.take(150, wait_s)
    assert bucket.wait_s(601, 0.0) == math.inf


@given(times=st.lists(st.floats(-1e6, 1e6), max_size=50), amount=st.integers(1, 100))
def test_no_jump_of_the_clock_gives_more_than_the_time_that_has_gone_forward(
    times: list[float], amount: int
) -> None:
    bucket = TokenBucket.full(100, 0.0)
    taken, forward, before = 0.0, 0.0, 0.0
    for now in times:
        forward += min(60.0, max(0.0, now - before))
        before = now
        taken += amount if bucket.take(amount, now) else 0
        assert bucket.level <= bucket.capacity
    assert taken <= 100 + forward * 100 / 60 + 1e-3


def test_a_changed_limit_keeps_what_was_used() -> None:
    bucket = TokenBucket.full(100, 0.0)
    bucket.take(60, 0.0)
    bucket.resize(200)
    assert bucket.level == 140
    bucket.resize(50)
    assert bucket.level == 0


@given(wait_s=st.floats(0, 60), share=st.floats(0, 1))
def test_retry_after_is_never_too_soon_and_not_much_too_late(wait_s: float, share: float) -> None:
    seconds = retry_after_s(wait_s, lambda low, high: low + (high - low) * share)
    assert max(1.0, wait_s) <= seconds <= max(1.0, wait_s) * 1.3 + 1
    assert retry_after_s(1e9, lambda low, _: low) == MAX_RETRY_AFTER_S
