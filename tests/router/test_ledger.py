"""The ledger alone: sessions, memory, and messages that do not fit."""

import itertools

import pytest

from router.ledger import ROUTER_TTL_S, SETTLE_S, Ledger
from router.quota_messages import Amounts, Ask, Exchange, Hello, Limit, Reply, UnknownSession
from router.tenants import Catalogue, Tenant
from tests.router.quota_world import tenant


def ledger(*tenants: Tenant) -> Ledger:
    numbers = itertools.count(1)
    new = Ledger(epoch=1, draw_session=lambda: next(numbers))
    new.replace_catalogue(Catalogue(version="1", tenants=tenants), 0.0)
    return new


def ask(owner: Ledger, session: int, number: int, *asks: Ask, now: float = SETTLE_S) -> Reply:
    reply = owner.exchange(Exchange(session=session, number=number, asks=asks), now)
    assert isinstance(reply, Reply)
    return reply


def greet(owner: Ledger, router: str = "r", number: int = 1, now: float = 0.0) -> int:
    return owner.hello(Hello(router=router, number=number), now).session


def test_nothing_is_granted_before_the_ledger_has_settled() -> None:
    owner = ledger(tenant(tpm=100))
    session = greet(owner)
    need = Ask("acme", Amounts(), needs=(10,))
    [early] = ask(owner, session, 1, need, now=SETTLE_S - 0.5).shares
    assert early.verdicts[0].refused_by is Limit.REQUESTS
    assert early.verdicts[0].wait_s == pytest.approx(0.5)
    [later] = ask(owner, session, 2, need).shares
    assert later.verdicts[0].refused_by is None


def test_what_is_fetched_in_advance_leaves_enough_for_the_others() -> None:
    owner = ledger(tenant(tpm=1200))
    sessions = [greet(owner, f"r{i}") for i in range(3)]
    wants_all = Ask("acme", Amounts(), prefetch=Amounts(0, 1200))
    assert [ask(owner, s, 1, wants_all).shares[0].prefetched.tokens for s in sessions] == [200, 166, 139]


def test_a_router_cannot_return_slots_that_it_does_not_hold() -> None:
    owner = ledger(tenant(max_concurrent=1))
    first, second = greet(owner, "a"), greet(owner, "b")
    ask(owner, first, 1, Ask("acme", Amounts(), needs=(1,)))
    ask(owner, second, 1, Ask("acme", Amounts(0, 0, 5)))
    [share] = ask(owner, second, 2, Ask("acme", Amounts(), needs=(1,))).shares
    assert share.verdicts[0].refused_by is Limit.CONCURRENCY


def test_a_tenant_that_is_gone_is_refused() -> None:
    owner = ledger(tenant(tpm=100))
    session = greet(owner)
    owner.replace_catalogue(Catalogue(version="2"), 0.0)
    [share] = ask(owner, session, 1, Ask("acme", Amounts(0, 7), needs=(1, 2))).shares
    assert [verdict.refused_by for verdict in share.verdicts] == [Limit.REQUESTS] * 2


def test_a_silent_router_is_given_up_and_told_so() -> None:
    owner = ledger(tenant(tpm=100))
    silent, other = greet(owner, "silent"), greet(owner, "other")
    for second in range(1, int(ROUTER_TTL_S) + 6):
        ask(owner, other, second, now=float(second))
    assert owner.num_routers == 1
    gone = owner.exchange(Exchange(session=silent, number=1), ROUTER_TTL_S + 6.0)
    assert gone == UnknownSession(session=silent)


def test_accounts_of_a_hundred_thousand_tenants_are_forgotten_once_they_are_full() -> None:
    owner = ledger(*(tenant(f"t{i}", tpm=100) for i in range(100_000)))
    session = greet(owner)
    ask(owner, session, 1, *(Ask(f"t{i}", Amounts(), needs=(50,)) for i in range(100_000)))
    assert owner.num_accounts == 100_000
    for number in range(2, 10):
        ask(owner, session, number, now=SETTLE_S + 5.0 * number)
    assert owner.num_accounts == 0
