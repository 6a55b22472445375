"""Slot accounting: how many steps a batch takes, and how many of its slots do nothing. Exact and pure."""

import heapq
from collections.abc import Sequence


def static_steps(lengths: Sequence[int], seats: int) -> int:
    """Return the steps of batches that are bound until their longest member ends."""
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


def continuous_steps(lengths: Sequence[int], seats: int) -> int:
    """Return the steps when a seat is given to the next request the moment it falls free."""
    ends = [0] * seats
    heapq.heapify(ends)
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def waste(lengths: Sequence[int], seats: int, steps: int) -> float:
    """Return the share of slots (seats * steps) that brought no token."""
    return 1 - sum(lengths) / (seats * steps)
