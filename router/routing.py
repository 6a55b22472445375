"""Which replica gets a request: pure, randomness as an argument."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

BETA: Final = 1.0
"""What load counts against a cached prefix: being busier than the mean by the mean is worth all of it."""
MARGIN: Final = 4.0
"""Requests beyond the mean that outweigh a whole prompt in the cache, while the mean is lower than this: a
bound that is only relative would act on chance at low load."""
TIE: Final = 1e-9
STEER: Final = 2.0
"""Requests that a replica which goes next counts as busier: at low load, when one may go, little is on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that may be given work."""

    replica: str
    num_busy: int
    """Outputs running or waiting on it: own ones counted, others' as last reported."""
    matched: float = 0.0
    """Share of the prompt that is probably in its prefix cache, 0 to 1."""
    is_next_to_go: bool = False
    """It would be stopped if one had to be, or its node drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The replica chosen, and what decided."""

    replica: str
    score: float
    matched: float
    num_tied: int
    """Candidates that were as good; one of them was drawn."""


def choose(candidates: Sequence[Candidate], draw: Random) -> Choice:
    """Choose among at least one candidate by cached prefix against load; equals are drawn from.

    score = matched - BETA * (load - mean) / max(MARGIN, mean): longest match alone would send all requests
    that share a system prompt to one replica.
    """
    mean = sum(candidate.num_busy for candidate in candidates) / len(candidates)
    scores = [_score(candidate, mean) for candidate in candidates]
    best = max(scores)
    tied = [c for c, score in zip(candidates, scores, strict=True) if score >= best - TIE]
    chosen = draw.choice(tied)
    return Choice(replica=chosen.replica, score=best, matched=chosen.matched, num_tied=len(tied))


def _score(candidate: Candidate, mean: float) -> float:
    num_busy = candidate.num_busy + STEER * candidate.is_next_to_go
    return candidate.matched - BETA * (num_busy - mean) / max(MARGIN, mean)
