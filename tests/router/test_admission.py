from random import Random

import pytest

from replicas.api import ReplicaLoad, TierLoad
from router.admission import (
    EXPLORATION,
    MAX_RETRY_AFTER_S,
    MIN_SHARE,
    Admission,
    Admit,
    Ahead,
    DrainRate,
    Reject,
)
from router.tenants import Tier

TIERS = (
    Tier(name="soon", level=0, ttft_target_ms=2_000.0, max_queue=50),
    Tier(name="late", level=2, queue_ttl_s=100.0),
)
STEADY = ReplicaLoad(num_running=1, step_ms=20.0, prefill_tokens_per_s=1000.0)


def make_ahead(
    num_outputs: int = 0,
    num_requests: int = 0,
    tokens: int = 0,
    room: bool = False,
    num_better: int = 0,
    seat: bool = False,
    sent: float = 0.0,
    sent_better: float = 0.0,
    num_open: int = 0,
) -> Ahead:
    return Ahead(
        num_outputs=num_outputs,
        num_better=num_better,
        num_sent=sent,
        num_sent_better=sent_better,
        num_open=num_open,
        num_requests=num_requests,
        queued_tokens=tokens,
        has_room=room,
        has_seat=seat,
        num_prompt_tokens=100,
    )


def make_admission(per_s: float | None = 10.0, tier: int = 0) -> Admission:
    """`per_s`: outputs of `tier` that ended per second until time 100."""
    admission = Admission(TIERS, Random(0))
    if per_s is not None:
        for tick in range(int(100 * per_s)):
            admission.note_end(tier, 1.0, tick / per_s, is_saturated=True)
    return admission


def test_the_drain_rate_is_what_ended_per_second() -> None:
    rate = DrainRate()
    for tick in range(1000):
        rate.note(tick / 10, 1.0, is_saturated=True)
    assert rate.per_s(100.0) == pytest.approx(10.0, rel=0.1)


def test_the_drain_rate_is_not_low_in_the_beginning_nor_known_at_once() -> None:
    rate = DrainRate()
    assert rate.per_s(0.0) is None
    for tick in range(20):
        rate.note(tick / 10, 1.0, is_saturated=True)
    assert rate.per_s(2.0) == pytest.approx(10.0, rel=0.2)


def test_the_predicted_wait_is_that_for_a_seat() -> None:
    wait_s = make_admission().predict_wait_s(0, make_ahead(9), [STEADY], 100.0)
    assert wait_s == pytest.approx(10 / 10 + 0.01, rel=0.1)


def test_with_a_seat_it_is_that_for_prompts_of_its_tier_and_better_ones() -> None:
    load = ReplicaLoad(
        num_running=1,
        step_ms=20.0,
        prefill_tokens_per_s=1000.0,
        tiers=(TierLoad(0, 0, 0, 500), TierLoad(2, 0, 0, 9000)),
    )
    decision = make_admission(None).decide(0, make_ahead(seat=True), [load], 100.0)
    assert isinstance(decision, Admit)
    assert decision.predicted_wait_s == pytest.approx(0.02 + 0.5)


def test_an_idle_replica_has_no_step_to_wait_for() -> None:
    idle = ReplicaLoad(max_num_seqs=4, step_ms=11_000.0)
    decision = make_admission(None).decide(0, make_ahead(seat=True), [idle], 100.0)
    assert isinstance(decision, Admit)
    assert decision.predicted_wait_s == 0.0


def test_what_better_tiers_take_of_the_seats_is_not_counted_on() -> None:
    admission = make_admission(8.0, tier=0)
    for tick in range(200):
        admission.note_end(2, 1.0, tick / 2, is_saturated=True)
    wait_s = admission.predict_wait_s(2, make_ahead(15, num_better=6), [STEADY], 100.0)
    assert wait_s == pytest.approx(10 / 2 + 6 / 10, rel=0.1)
    wait_s = admission.predict_wait_s(0, make_ahead(6), [STEADY], 100.0)
    assert wait_s == pytest.approx(7 / 10, rel=0.1)


def test_better_ones_that_wait_on_replicas_take_seats_of_all_not_of_its_share() -> None:
    admission = make_admission(8.0, tier=0)
    for tick in range(200):
        admission.note_end(2, 1.0, tick / 2, is_saturated=True)
    ahead = make_ahead(sent=9.0, sent_better=8.0)
    wait_s = admission.predict_wait_s(2, ahead, [STEADY], 100.0)
    assert wait_s == pytest.approx(2 / 2 + 8 / 10, rel=0.1)


def test_before_anybody_waited_seats_become_free_as_fast_as_those_who_have_them_leave() -> None:
    admission = Admission(TIERS, Random(0))
    for tick in range(1000):
        admission.note_end(0, 2.0, tick / 10, is_saturated=False)
    wait_s = admission.predict_wait_s(0, make_ahead(9, num_open=40), [STEADY], 100.0)
    assert wait_s == pytest.approx(10 / (40 / 2), rel=0.1)
    wait_s = admission.predict_wait_s(0, make_ahead(9, num_open=4), [STEADY], 100.0)
    assert wait_s == pytest.approx(10 / 10, rel=0.1), "they left faster than that"


def test_a_tier_that_better_ones_leave_nothing_is_counted_on_to_age() -> None:
    wait_s = make_admission(10.0, tier=0).predict_wait_s(2, make_ahead(), [STEADY], 100.0)
    assert wait_s == pytest.approx(1 / (10 * MIN_SHARE), rel=0.1)


def test_the_first_token_takes_the_wait_and_the_own_prompt() -> None:
    decision = make_admission().decide(0, make_ahead(9), [STEADY], 100.0)
    assert isinstance(decision, Admit)
    assert decision.predicted_wait_s is not None
    assert decision.predicted_ttft_s == pytest.approx(decision.predicted_wait_s + 0.1)
    started = make_admission(None).decide(0, make_ahead(room=True, seat=True), [STEADY], 100.0)
    assert isinstance(started, Admit)
    assert started.predicted_ttft_s == pytest.approx(0.02 + 0.1)


def test_room_without_a_seat_is_a_wait_on_the_replica() -> None:
    decision = make_admission().decide(0, make_ahead(room=True), [STEADY], 100.0)
    assert isinstance(decision, Admit)
    assert decision.predicted_wait_s == pytest.approx(1 / 10 + 0.01, rel=0.1)


def test_without_a_rate_of_prompts_no_first_token_is_predicted() -> None:
    load = ReplicaLoad(step_ms=20.0)
    decision = make_admission(None).decide(0, make_ahead(room=True, seat=True), [load], 100.0)
    assert isinstance(decision, Admit)
    assert decision.predicted_ttft_s is None


def test_replicas_with_a_free_seat_count_and_of_those_all() -> None:
    def load(num_running: int, queued_tokens: int) -> ReplicaLoad:
        tiers = (TierLoad(0, num_running, 0, queued_tokens),)
        return ReplicaLoad(
            num_running=num_running, max_num_seqs=4, step_ms=20.0, prefill_tokens_per_s=1000.0, tiers=tiers
        )

    loads = [load(4, 9000), load(3, 500), load(1, 100)]
    decision = make_admission(None).decide(0, make_ahead(seat=True), loads, 100.0)
    assert isinstance(decision, Admit)
    assert decision.predicted_wait_s == pytest.approx(0.02 + 0.3)


def test_a_request_that_waited_twice_its_target_comes_too_late() -> None:
    admission = make_admission()
    assert [admission.comes_too_late(0, waited_s, [STEADY]) for waited_s in (3.9, 4.1)] == [False, True]
    assert not admission.comes_too_late(2, 1e6, [STEADY]), "its tier has no target"


def test_a_wait_beyond_the_tiers_target_is_refused_with_the_time_it_is_too_long_by() -> None:
    decision = make_admission().decide(0, make_ahead(99, 10), [STEADY], 100.0)
    assert isinstance(decision, Reject)
    assert decision.reason == "predicted_wait"
    assert 0.8 * 8 <= decision.retry_after_s <= 1.3 * 9 + 1


def test_a_tier_without_a_target_may_wait_as_long_as_it_may_queue() -> None:
    assert isinstance(make_admission(tier=2).decide(2, make_ahead(900, 10), [STEADY], 100.0), Admit)
    assert isinstance(make_admission().decide(2, make_ahead(2000, 10), [STEADY], 100.0), Reject)


def test_with_room_nothing_is_refused() -> None:
    decision = make_admission().decide(0, make_ahead(9999, 9999, 1 << 40, room=True), [], 100.0)
    assert isinstance(decision, Admit)


def test_while_a_seat_seems_free_only_the_bounds_refuse() -> None:
    admission = make_admission()
    decision = admission.decide(0, make_ahead(999, 49, seat=True), [STEADY], 100.0)
    assert isinstance(decision, Admit)
    assert decision.predicted_wait_s == pytest.approx(0.02)
    full = admission.decide(0, make_ahead(999, 50, seat=True), [STEADY], 100.0)
    assert isinstance(full, Reject)


def test_without_experience_only_the_bounds_refuse() -> None:
    admission = make_admission(None)
    assert isinstance(admission.decide(0, make_ahead(49, 49), [STEADY], 100.0), Admit)
    full = admission.decide(0, make_ahead(50, 50), [STEADY], 100.0)
    assert isinstance(full, Reject)
    assert full.reason == "queue_full"
    huge = admission.decide(0, make_ahead(1, 1, 1 << 40), [STEADY], 100.0)
    assert isinstance(huge, Reject)
    assert huge.reason == "queue_bytes"
    assert admission.num_rejected[0] == 2


def test_retry_after_is_spread_and_bounded() -> None:
    admission = make_admission()
    decisions = [admission.decide(0, make_ahead(n, 10), [STEADY], 100.0) for n in [300] * 100 + [10**6]]
    times = [decision.retry_after_s for decision in decisions if isinstance(decision, Reject)]
    assert len(set(times)) > 5
    assert max(times) == MAX_RETRY_AFTER_S


def test_a_few_are_admitted_against_the_prediction() -> None:
    admission = make_admission()
    decisions = [admission.decide(0, make_ahead(300, 10), [STEADY], 100.0) for _ in range(5000)]
    share = sum(isinstance(decision, Admit) for decision in decisions) / 5000
    assert share == pytest.approx(EXPLORATION, rel=0.5)


def test_an_expired_request_is_told_when_the_queue_will_be_shorter() -> None:
    expired = make_admission().expired(0, make_ahead(99), [STEADY], 100.0)
    assert (expired.reason, expired.retry_after_s >= 8) == ("queue_timeout", True)
