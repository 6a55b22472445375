"""Slices and ledger together: nothing passes beyond a limit, whatever is lost, repeated or restarted."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.ledger import ROUTER_TTL_S
from router.quota_messages import Limit
from router.quota_slice import SLOT_GRACE_S, TicketState
from tests.router.quota_world import Fate, QuotaWorld, Router, tenant

FATES: list[Fate] = ["arrives", "request lost", "reply lost", "repeated"]
GRANTED, REFUSED, WAITING = TicketState.GRANTED, TicketState.REFUSED, TicketState.WAITING


def world(num_routers: int = 1, **limits: int) -> QuotaWorld:
    started = QuotaWorld(tenant(**limits), num_routers)
    started.start()
    return started


def burst(world: QuotaWorld, router: Router, tokens: list[int]) -> list[TicketState]:
    """Requests at one moment, and what the ledger says once it does not wait for slots any more."""
    tickets = [world.reserve(router, count) for count in tokens]
    world.pump(router)
    if any(ticket.state is WAITING for ticket in tickets):
        world.now += SLOT_GRACE_S + 0.01
        world.pump(router)
    return [ticket.state for ticket in tickets]


def test_of_five_requests_at_once_as_many_pass_as_fit() -> None:
    w = world(tpm=400)
    assert burst(w, w.routers[0], [175] * 5) == [GRANTED, GRANTED, REFUSED, REFUSED, REFUSED]


def test_a_need_beyond_the_whole_bucket_is_never_granted() -> None:
    w = world(tpm=100)
    assert burst(w, w.routers[0], [175] * 5) == [REFUSED] * 5


def test_a_refusal_says_what_ran_out_and_when_it_fits() -> None:
    w = world(rpm=60, tpm=600)
    assert burst(w, w.routers[0], [500]) == [GRANTED]
    ticket = w.reserve(w.routers[0], 350)
    w.pump(w.routers[0])
    assert ticket.verdict is not None
    assert ticket.verdict.refused_by is Limit.TOKENS
    assert ticket.verdict.wait_s == pytest.approx(25.0)  # 250 more at 10 a second


def test_requests_run_out_apart_from_tokens() -> None:
    w = world(rpm=2, tpm=600)
    tickets = [w.reserve(w.routers[0], 1) for _ in range(3)]
    w.pump(w.routers[0])
    assert [ticket.state for ticket in tickets] == [GRANTED, GRANTED, REFUSED]
    assert tickets[2].verdict is not None
    assert tickets[2].verdict.refused_by is Limit.REQUESTS
    assert tickets[2].verdict.wait_s == pytest.approx(30.0)


def test_what_a_request_did_not_use_serves_the_next_without_an_exchange() -> None:
    w = world(tpm=100)
    assert burst(w, w.routers[0], [100]) == [GRANTED]
    w.settle(w.routers[0], used=35)
    assert w.reserve(w.routers[0], 65).state is GRANTED
    assert w.reserve(w.routers[0], 1).state is WAITING


def test_what_a_request_did_not_use_serves_another_router() -> None:
    w = world(num_routers=2, tpm=100)
    first, second = w.routers
    assert burst(w, first, [100]) == [GRANTED]
    assert burst(w, second, [60]) == [REFUSED]
    w.settle(first, used=35)
    w.now += 3.0
    for _ in range(3):
        w.now += 0.1
        w.pump(first)
    assert burst(w, second, [60]) == [GRANTED]


def test_a_cancelled_request_leaves_no_trace() -> None:
    w = world(rpm=1, tpm=100, max_concurrent=1)
    assert burst(w, w.routers[0], [100]) == [GRANTED]
    w.cancel(w.routers[0])
    assert burst(w, w.routers[0], [100]) == [GRANTED]


def test_a_request_cancelled_while_it_is_asked_for_leaves_no_trace() -> None:
    w = world(rpm=1, tpm=100, max_concurrent=1)
    (router,) = w.routers
    ticket = w.reserve(router, 100)
    w.pump(router, "reply lost")
    router.quota.cancel(ticket)
    w.pump(router)
    assert burst(w, router, [100]) == [GRANTED]


def test_a_slot_is_held_until_the_end_and_then_free_for_all() -> None:
    w = world(num_routers=2, max_concurrent=1)
    first, second = w.routers
    assert burst(w, first, [10]) == [GRANTED]
    w.advance(3600.0)
    assert burst(w, second, [10]) == [REFUSED]
    w.settle(first, used=5)
    w.pump(first)
    assert burst(w, second, [10]) == [GRANTED]


def test_the_next_request_of_a_client_waits_for_the_slot_of_its_last_one() -> None:
    w = world(num_routers=2, max_concurrent=1)
    first, second = w.routers
    assert burst(w, first, [10]) == [GRANTED]
    w.settle(first, used=10)
    ticket = w.reserve(second, 10)
    w.pump(second)
    assert ticket.state is WAITING
    w.now += 0.1
    w.pump(first)
    w.pump(second)
    assert ticket.state is GRANTED


def test_a_busy_tenant_is_served_from_the_slice() -> None:
    w = world(num_routers=3, rpm=60_000, tpm=6_000_000)
    router = w.routers[0]
    waited = 0
    for tick in range(50):
        for _ in range(10):
            waited += w.reserve(router, 100).state is WAITING and tick >= 20
        w.now += 0.1
        w.pump(router)
    assert waited == 0


def test_an_idle_slice_goes_back_and_is_forgotten() -> None:
    w = world(num_routers=2, rpm=600, tpm=60_000)
    router = w.routers[0]
    for _ in range(20):
        burst(w, router, [1000])
        w.now += 0.1
    assert router.quota.remaining(w.limits, w.now).tokens < 60_000
    w.advance(120.0)
    assert w.left_tokens() == 60_000
    assert router.quota.num_slices == 0


def test_slots_of_a_router_that_died_are_free_again() -> None:
    w = world(num_routers=2, max_concurrent=1)
    assert burst(w, w.routers[0], [1]) == [GRANTED]
    w.kill_router(0)
    assert burst(w, w.routers[1], [1]) == [REFUSED]
    w.advance(ROUTER_TTL_S + 6.0)
    assert burst(w, w.routers[1], [1]) == [GRANTED]


def test_a_new_ledger_knows_from_the_routers_what_is_used_and_held() -> None:
    w = world(num_routers=2, rpm=10, tpm=100, max_concurrent=1)
    first, second = w.routers
    assert burst(w, first, [90]) == [GRANTED]
    w.restart_ledger()
    w.now += 2.0
    assert w.left_tokens() <= 10 + 2 * 100 / 60
    assert burst(w, second, [1]) == [REFUSED]  # the slot
    w.settle(first, used=90)
    w.pump(first)
    assert burst(w, second, [50]) == [REFUSED]
    assert burst(w, second, [10]) == [GRANTED]


def test_routers_go_on_with_what_they_hold_while_the_ledger_is_away() -> None:
    w = world(tpm=6000)
    (router,) = w.routers
    for _ in range(20):
        burst(w, router, [50])
        w.now += 0.1
    assert w.reserve(router, 50).state is GRANTED


def test_service_of_all_routers_reaches_all_once() -> None:
    w = world(num_routers=3, tpm=100)
    told = [0.0, 0.0, 0.0]
    draw = random.Random(1)
    for number in range(1, 100):
        w.now += 0.1
        sender = draw.randrange(3)
        told[sender] += w.pump(w.routers[sender], draw.choice(FATES), {"acme": float(number)}).get(
            "acme", 0.0
        )
    for _ in range(2):  # the last reports, then what they bring to the others
        w.now += 1.0
        for index, router in enumerate(w.routers):
            told[index] += w.pump(router).get("acme", 0.0)
    total = sum(range(1, 100))
    assert sum(told) == 2 * total  # every charge is told to two others


def test_a_limit_lowered_while_it_is_used_holds_at_once() -> None:
    w = world(tpm=1000)
    assert burst(w, w.routers[0], [600]) == [GRANTED]
    w.change_limits(tenant(tpm=500))
    assert burst(w, w.routers[0], [1]) == [REFUSED]


class QuotaMachine(RuleBasedStateMachine):
    """Routers and ledgers come and go; the sum of what passes stays within the limits."""

    @initialize(num_routers=st.integers(1, 4))
    def start(self, num_routers: int) -> None:
        self.world = world(num_routers, rpm=30, tpm=1000, max_concurrent=4)
        self.routers_lost = 0
        self.slack_tokens = 0.0

    def router(self, index: int) -> Router:
        return self.world.routers[index % len(self.world.routers)]

    @rule(index=st.integers(0, 3), tokens=st.integers(1, 400))
    def reserve(self, index: int, tokens: int) -> None:
        self.world.reserve(self.router(index), tokens)

    @rule(index=st.integers(0, 3), share=st.floats(0, 1))
    def settle(self, index: int, share: float) -> None:
        router = self.router(index)
        if router.tickets:
            self.world.settle(router, int(router.tickets[0].tokens * share))

    @rule(index=st.integers(0, 3))
    def cancel(self, index: int) -> None:
        if self.router(index).tickets:
            self.world.cancel(self.router(index))

    @rule(index=st.integers(0, 3), fate=st.sampled_from(FATES))
    def pump(self, index: int, fate: Fate) -> None:
        self.world.pump(self.router(index), fate)

    @rule(age=st.integers(1, 30))
    def repeat_late(self, age: int) -> None:
        sent = self.world.sent
        self.world.repeat_late(max(0, len(sent) - age))

    @rule(seconds=st.floats(0.0, 20.0))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.routers_lost < 3)
    @rule(index=st.integers(0, 3))
    def kill_router(self, index: int) -> None:
        self.world.kill_router(index % len(self.world.routers))
        self.routers_lost += 1

    @rule()
    def restart_ledger(self) -> None:
        before = self.world.left_tokens()
        self.world.restart_ledger()
        if self.routers_lost:  # with them went the memory of what they took last
            self.slack_tokens += max(0.0, self.world.left_tokens() - before)

    @invariant()
    def tokens_stay_within_the_limit(self) -> None:
        assert self.world.passed_tokens <= self.world.allowed_tokens() + self.slack_tokens + 1e-6

    @invariant()
    def requests_stay_within_the_limit(self) -> None:
        if not self.routers_lost:
            assert self.world.passed_requests <= 30 * (1 + self.world.now / 60) + 1e-6

    @invariant()
    def slots_stay_within_the_limit(self) -> None:
        assert sum(len(router.tickets) for router in self.world.routers) <= 4


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
