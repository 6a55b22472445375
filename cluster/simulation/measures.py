"""Measures: what requests got, kept in counters. Its size grows with tiers and minutes, not requests."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from router.tenants import Tier

WINDOW_S: Final = 60.0
ALLOWED: Final = 0.01
"""A window meets a p99 target when at most this share misses it."""
RESOLUTION: Final = math.log(1.02)
"""A histogram's values are known to 2%."""
SMALLEST_S: Final = 1e-4


class Histogram:
    """Counts over logarithmic buckets; adding is O(1)."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.total += seconds * count
        self._buckets[int(math.log(max(seconds, SMALLEST_S) / SMALLEST_S) / RESOLUTION)] += count

    def quantile(self, share: float) -> float:
        """Return the middle of the bucket that holds it; NaN for no values."""
        rank = share * self.count
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return SMALLEST_S * math.exp((bucket + 0.5) * RESOLUTION)
        return math.nan

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(slots=True)
class Window:
    """One minute of one tier."""

    requests: int = 0
    ttft_missed: int = 0
    """First tokens after their target, and requests without one."""
    gaps: int = 0
    gaps_over: int = 0

    @property
    def is_met(self) -> bool:
        """Whether both p99 are in their targets."""
        return self.ttft_missed <= ALLOWED * self.requests and self.gaps_over <= ALLOWED * self.gaps


@dataclass(slots=True, eq=False)
class TierMeasures:
    """One tier's totals and windows."""

    ttft_target_s: float
    """Infinite where nothing is promised."""
    itl_target_s: float
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    windows: defaultdict[int, Window] = field(default_factory=lambda: defaultdict(Window))
    """By the minute in which requests arrived, and gaps ended."""

    @property
    def requests(self) -> int:
        return sum(window.requests for window in self.windows.values())

    @property
    def attainment(self) -> float:
        """Share of the requests whose first token came in time; 1 if there were none."""
        missed = sum(window.ttft_missed for window in self.windows.values())
        return 1 - missed / self.requests if self.requests else 1.0

    @property
    def itl_attainment(self) -> float:
        gaps = sum(window.gaps for window in self.windows.values())
        over = sum(window.gaps_over for window in self.windows.values())
        return 1 - over / gaps if gaps else 1.0

    def first_token(self, arrived_at: float, seconds: float | None) -> None:
        """Note a request's time to its first token; None = it got none."""
        window = self.windows[int(arrived_at / WINDOW_S)]
        window.requests += 1
        if seconds is not None:
            self.ttft.add(seconds)
        window.ttft_missed += seconds is None or seconds > self.ttft_target_s

    def gap(self, at_s: float, seconds: float, count: int) -> None:
        self.itl.add(seconds, count)
        window = self.windows[int(at_s / WINDOW_S)]
        window.gaps += count
        if seconds > self.itl_target_s:
            window.gaps_over += count


class Measures:
    """Of all tiers."""

    def __init__(self, tiers: Iterable[Tier], itl_target_ms: float | None) -> None:
        """`itl_target_ms`: where a tier has none of its own."""
        self.tiers = {tier.level: _tier_measures(tier, itl_target_ms) for tier in tiers}

    def windows_met(self, since_s: float, until_s: float) -> float:
        """Share of the whole minutes in a span in which every tier met both targets."""
        minutes = range(math.ceil(since_s / WINDOW_S), int(until_s / WINDOW_S))
        met = sum(
            all(minute not in tier.windows or tier.windows[minute].is_met for tier in self.tiers.values())
            for minute in minutes
        )
        return met / len(minutes) if minutes else math.nan


def _tier_measures(tier: Tier, itl_target_ms: float | None) -> TierMeasures:
    itl_ms = tier.itl_target_ms or itl_target_ms
    return TierMeasures(
        ttft_target_s=math.inf if tier.ttft_target_ms is None else tier.ttft_target_ms / 1e3,
        itl_target_s=math.inf if itl_ms is None else itl_ms / 1e3,
    )
