"""TokenBucket, and how long a refused client is told to wait. Pure: clock and randomness are arguments."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

PERIOD_S: Final = 60.0
"""Limits are per minute: a full bucket holds a minute's worth."""
CONCURRENCY_RETRY_S: Final = 1.0
"""Nobody knows when a stream of the same tenant ends; one second is the shortest wait that can be told."""
MAX_RETRY_AFTER_S: Final = 90
_DUST: Final = 1e-6
"""Rounding errors of refills must not refuse the last token of a bucket."""


@dataclass(slots=True)
class TokenBucket:
    """A level that refills steadily up to its capacity.

    Whatever the clock does, it never holds more than `capacity`: a jump ahead gives one full bucket at
    most, a jump back takes nothing and refills nothing until time has gone on from there.
    """

    capacity: float
    """Units; refills once per PERIOD_S."""
    level: float
    at: float
    """When `level` was true, in seconds of a monotonic clock."""

    @classmethod
    def full(cls, capacity: float, now: float) -> "TokenBucket":
        return cls(capacity, capacity, now)

    @property
    def refill_per_s(self) -> float:
        return self.capacity / PERIOD_S

    def advance(self, now: float) -> float:
        """Refill up to `now`; returns the level."""
        self.level = min(self.capacity, self.level + max(0.0, now - self.at) * self.refill_per_s)
        self.at = now
        return self.level

    def take(self, amount: float, now: float) -> bool:
        """Take all of `amount`, or nothing."""
        if self.advance(now) + _DUST < amount:
            return False
        self.level -= amount
        return True

    def give(self, amount: float) -> None:
        """Put back what was taken and not used."""
        self.level = min(self.capacity, self.level + amount)

    def resize(self, capacity: float) -> None:
        """Change the limit; what was used stays used."""
        self.level = min(capacity, max(0.0, self.level + capacity - self.capacity))
        self.capacity = capacity

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` fits if nobody takes anything; infinite for more than the capacity."""
        if amount > self.capacity:
            return math.inf
        return max(0.0, amount - self.advance(now) - _DUST) / self.refill_per_s


def retry_after_s(wait_s: float, uniform: Callable[[float, float], float]) -> int:
    """Whole seconds >= the wait, stretched by up to 0.3 at random: equal values make a wave of retries."""
    return min(MAX_RETRY_AFTER_S, math.ceil(max(1.0, wait_s) * uniform(1.0, 1.3)))
