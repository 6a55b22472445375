from collections.abc import Callable

import pytest

from replicas.api import TierDemand
from router.dispatch import MAX_PASSED, PATIENCE_S, Dispatcher, Turn, Verdict, Waiting

AGING_S = 30.0


def make_dispatcher() -> Dispatcher:
    return Dispatcher({}, AGING_S)


def make_waiting(
    key: int, tier: int = 0, tenant: str = "t", num_outputs: int = 1, at: float = 0.0
) -> Waiting:
    return Waiting(
        key=key, tenant=tenant, tier=tier, num_outputs=num_outputs, num_tokens=10, max_tokens=64, queued_at=at
    )


def placed(dispatcher: Dispatcher, now: float = 0.0, seats: int = 100) -> list[int]:
    """Dispatch into so many seats; returns the keys in order."""
    keys: list[int] = []

    def place(turn: Turn) -> Verdict:
        if len(keys) == seats:
            return Verdict.NO_SEAT
        keys.append(turn.waiting.key)
        return Verdict.PLACED

    dispatcher.dispatch(now, place)
    return keys


def test_better_tiers_go_first() -> None:
    dispatcher = make_dispatcher()
    for key, tier in enumerate([2, 0, 1, 0]):
        dispatcher.add(make_waiting(key, tier))
    assert placed(dispatcher) == [1, 3, 2, 0]
    assert len(dispatcher) == 0


def test_within_a_tier_the_least_served_tenant_goes_first() -> None:
    dispatcher = make_dispatcher()
    for key in range(4):
        dispatcher.add(make_waiting(key, tenant="ab"[key % 2]))
    dispatcher.charge(0, "a", 10.0, 1.0)
    assert placed(dispatcher) == [1, 3, 0, 2]


def test_interrupted_requests_go_first_within_their_tier() -> None:
    dispatcher = make_dispatcher()
    dispatcher.add(make_waiting(1, tier=1))
    dispatcher.add_first(make_waiting(2, tier=1))
    dispatcher.add_first(make_waiting(3, tier=1))
    dispatcher.add(make_waiting(4, tier=0))
    assert placed(dispatcher) == [4, 2, 3, 1]


def test_a_starving_tier_gets_one_request_through_per_aging_bound() -> None:
    dispatcher = make_dispatcher()
    for key in range(10):
        dispatcher.add(make_waiting(key, tier=1))
    served_at = []
    for second in range(200):
        dispatcher.add(make_waiting(1000 + second, tier=0, at=second))
        (key,) = placed(dispatcher, now=second, seats=1)
        if key < 1000:
            served_at.append(second)
    gaps = [later - earlier for earlier, later in zip([0, *served_at], served_at, strict=False)]
    assert len(served_at) >= 6
    assert max(gaps) <= AGING_S + 1


def test_waiting_alone_does_not_count_as_starving() -> None:
    dispatcher = make_dispatcher()
    for key in range(100):
        dispatcher.add(make_waiting(key, tier=1))
    for second in range(90):
        placed(dispatcher, now=second, seats=1)
    dispatcher.add(make_waiting(1000, tier=0, at=90))
    assert placed(dispatcher, now=90, seats=1) == [1000]


def verdicts(answers: dict[int, Verdict], asked: list[int]) -> Callable[[Turn], Verdict]:
    def place(turn: Turn) -> Verdict:
        asked.append(turn.waiting.key)
        return answers.get(turn.waiting.key, Verdict.PLACED)

    return place


def test_a_giant_without_room_blocks_neither_other_tenants_nor_other_tiers() -> None:
    dispatcher = make_dispatcher()
    for key, (tier, tenant) in enumerate([(0, "giant"), (0, "giant"), (0, "b"), (1, "c")]):
        dispatcher.add(make_waiting(key, tier, tenant))
    asked: list[int] = []
    dispatcher.dispatch(0.0, verdicts({0: Verdict.NO_ROOM}, asked))
    assert asked == [0, 2, 3]
    assert len(dispatcher) == 2, "its own tenant's next request waits behind it"


def test_an_interrupted_request_without_room_blocks_only_itself() -> None:
    dispatcher = make_dispatcher()
    for key in (0, 1):
        dispatcher.add_first(make_waiting(key))
    dispatcher.add(make_waiting(2))
    asked: list[int] = []
    dispatcher.dispatch(0.0, verdicts({0: Verdict.NO_ROOM}, asked))
    assert asked == [0, 1, 2]


def test_a_request_passed_for_long_is_impatient() -> None:
    dispatcher = make_dispatcher()
    giant = make_waiting(0)
    dispatcher.add(giant)
    dispatcher.dispatch(5.0, verdicts({0: Verdict.NO_ROOM}, []))
    assert not giant.is_impatient(5.0 + PATIENCE_S)
    dispatcher.dispatch(6.0, verdicts({0: Verdict.NO_ROOM}, []))
    assert giant.is_impatient(5.1 + PATIENCE_S)


def test_without_a_seat_for_a_tier_worse_ones_are_not_asked() -> None:
    dispatcher = make_dispatcher()
    for key in range(3):
        dispatcher.add(make_waiting(key, tier=key))
    asked: list[int] = []
    dispatcher.dispatch(0.0, verdicts({1: Verdict.NO_SEAT}, asked))
    assert asked == [0, 1]


def test_a_round_asks_a_bounded_number_of_times() -> None:
    dispatcher = make_dispatcher()
    for key in range(100):
        dispatcher.add(make_waiting(key, tenant=str(key)))
    asked: list[int] = []
    dispatcher.dispatch(0.0, verdicts(dict.fromkeys(range(100), Verdict.NO_ROOM), asked))
    assert len(asked) == MAX_PASSED


@pytest.mark.parametrize("is_first", [False, True])
def test_a_removed_request_is_not_placed(is_first: bool) -> None:
    dispatcher = make_dispatcher()
    (dispatcher.add_first if is_first else dispatcher.add)(make_waiting(1, num_outputs=2))
    assert 1 in dispatcher
    assert dispatcher.remove(1)
    assert not dispatcher.remove(1)
    assert placed(dispatcher) == []
    assert dispatcher.demand(1) == ()


def test_demand_is_what_waits_split_over_the_replicas() -> None:
    dispatcher = make_dispatcher()
    dispatcher.add(make_waiting(1, tier=0, num_outputs=5))
    dispatcher.add_first(make_waiting(2, tier=2))
    assert dispatcher.demand(2) == (TierDemand(0, 3), TierDemand(2, 1))
    assert (dispatcher.num_waiting(0), dispatcher.num_waiting(1)) == (1, 0)
    assert (dispatcher.num_ahead(1), dispatcher.num_ahead(2), dispatcher.queued_tokens) == (5, 6, 20)
    placed(dispatcher)
    assert (dispatcher.num_ahead(2), dispatcher.queued_tokens) == (0, 0)
