from collections import Counter
from random import Random

from router.routing import Candidate, Choice, choose


def make_candidates(**num_busy: int) -> list[Candidate]:
    return [Candidate(replica=name, num_busy=busy) for name, busy in num_busy.items()]


def test_the_least_busy_replica_is_chosen() -> None:
    choice = choose(make_candidates(a=3, b=1, c=2), Random(0))
    assert choice == Choice(replica="b", num_busy=1, num_tied=1)


def test_equals_are_drawn_evenly() -> None:
    draw = Random(0)
    counts = Counter(choose(make_candidates(a=1, b=1, c=2), draw).replica for _ in range(1000))
    assert counts.keys() == {"a", "b"}
    assert min(counts.values()) > 400
