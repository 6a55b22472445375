from collections import Counter
from random import Random

import pytest

from router.routing import Candidate, choose


def make_candidates(**num_busy: int) -> list[Candidate]:
    return [Candidate(replica=name, num_busy=busy) for name, busy in num_busy.items()]


def test_without_a_match_the_least_busy_replica_is_chosen() -> None:
    choice = choose(make_candidates(a=3, b=1, c=2), Random(0))
    assert (choice.replica, choice.num_tied, choice.matched) == ("b", 1, 0.0)


def test_equals_are_drawn_evenly() -> None:
    draw = Random(0)
    counts = Counter(choose(make_candidates(a=1, b=1, c=2), draw).replica for _ in range(1000))
    assert counts.keys() == {"a", "b"}
    assert min(counts.values()) > 400


@pytest.mark.parametrize(
    ("busy", "chosen"),
    [(10, "warm"), (14, "warm"), (20, "cold")],
    ids=["level", "busier by less than the match", "busier by more"],
)
def test_a_match_is_weighed_against_load(busy: int, chosen: str) -> None:
    warm = Candidate(replica="warm", num_busy=busy, matched=0.5)
    choice = choose([warm, Candidate(replica="cold", num_busy=10)], Random(0))
    assert choice.replica == chosen


def test_at_low_load_one_request_more_does_not_outweigh_a_full_match() -> None:
    warm = Candidate(replica="warm", num_busy=1, matched=1.0)
    choice = choose([warm, Candidate(replica="cold", num_busy=0)], Random(0))
    assert choice.replica == "warm"


def test_little_is_given_to_the_next_replica_to_go() -> None:
    def chosen(others_busy: int, matched: float = 0.0) -> str:
        next_to_go = Candidate(replica="goes", num_busy=0, is_next_to_go=True, matched=matched)
        return choose([next_to_go, Candidate(replica="stays", num_busy=others_busy)], Random(0)).replica

    assert [chosen(busy) for busy in (0, 1, 3)] == ["stays", "stays", "goes"]
    assert chosen(0, matched=0.9) == "goes"
