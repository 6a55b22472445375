"""Histogram: how often a value fell between fixed edges. What all percentiles of Headway are made of.

Counts of equal edges can be added, over tiers, routers and time; percentiles cannot. Pure.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

ITL_EDGES_MS: Final = (
    *(1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 75.0, 100.0, 150.0, 200.0),
    *(300.0, 500.0, 1000.0, 2000.0, 5000.0),
)
"""Gaps between tokens, and steps of an engine. The same everywhere, or gaps could not be compared."""
LEG_EDGES_MS: Final = (0.1, 0.25, 0.5, *ITL_EDGES_MS)
"""Parts of the way that should cost next to nothing."""
WAIT_EDGES_MS: Final = (
    *(5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 300.0, 500.0, 750.0, 1e3, 1.5e3, 2e3, 3e3, 5e3, 7.5e3, 10e3, 15e3),
    *(20e3, 30e3, 60e3, 120e3, 300e3, 600e3),
)
"""What is waited for once per request."""
COUNT_EDGES: Final = tuple(float(1 << power) for power in range(14))
"""1, 2, 4, ... 8192: sequences and tokens of a step."""


class Histogram:
    """Counts by bucket; bucket i holds values in (edges[i - 1], edges[i]], the last one all above."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: tuple[float, ...]) -> None:
        """`edges` ascend."""
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value. O(log edges), a third of a microsecond."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @property
    def num_observed(self) -> int:
        return sum(self.counts)

    def add(self, counts: Iterable[int], total: float) -> None:
        """Merge counts over the same edges, `total` the sum of their values."""
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, counts, strict=True)]
        self.sum += total

    def quantile(self, share: float) -> float | None:
        """Estimate the value that a share of all does not exceed, linear within a bucket, as Prometheus does.

        None without values. What lies above the last edge counts as that edge.
        """
        rank = share * self.num_observed
        below = 0
        for position, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                low = self.edges[position - 1] if position else 0.0
                return low + (self.edges[position] - low) * (rank - below) / count
            below += count
        return self.edges[-1] if self.counts[-1] else None
