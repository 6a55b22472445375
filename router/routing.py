"""Which replica gets a request: pure, randomness as an argument."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that may be given work."""

    replica: str
    num_busy: int
    """Outputs running or waiting on it: own ones counted, others' as last reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The replica chosen, and what decided."""

    replica: str
    num_busy: int
    num_tied: int
    """Candidates that were as good; one of them was drawn."""


def choose(candidates: Sequence[Candidate], draw: Random) -> Choice:
    """Choose the least busy of at least one candidate; among equals at random, so that routers differ."""
    least = min(candidate.num_busy for candidate in candidates)
    tied = [candidate for candidate in candidates if candidate.num_busy == least]
    return Choice(replica=draw.choice(tied).replica, num_busy=least, num_tied=len(tied))
