"""TransportTimes: how long tokens travel between an engine and this router."""

import math
from collections import deque

import msgspec

from replicas.api import FrameBatch
from router.histogram import LEG_EDGES_MS, Histogram

MAX_SAMPLES = 4096


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles of recent samples, milliseconds; 0 without samples."""

    count: int = 0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class TransportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Two legs of a token's way."""

    engine_to_frame: Percentiles = Percentiles()
    """From the end of an engine step until the replica hands its frame to the carrier."""
    frame_to_router: Percentiles = Percentiles()
    """From there until the router has it; across hosts this includes the skew of their clocks."""


class TransportTimes:
    """Of the frame batches of all replicas: the last 4,096, and counts of all."""

    def __init__(self) -> None:
        self._engine_to_frame: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._frame_to_router: deque[float] = deque(maxlen=MAX_SAMPLES)
        self.engine_to_frame_ms = Histogram(LEG_EDGES_MS)
        """Of all that ever came; likewise the next."""
        self.frame_to_router_ms = Histogram(LEG_EDGES_MS)

    def observe(self, batch: FrameBatch, arrived_at: float) -> None:
        """Note a batch that arrived at this wall-clock second. O(1)."""
        travelled_s = arrived_at - batch.handed_at
        self._engine_to_frame.append(batch.delay_s)
        self._frame_to_router.append(travelled_s)
        self.engine_to_frame_ms.observe(batch.delay_s * 1e3)
        self.frame_to_router_ms.observe(travelled_s * 1e3)

    def summary(self) -> TransportSummary:
        return TransportSummary(
            engine_to_frame=_percentiles(self._engine_to_frame),
            frame_to_router=_percentiles(self._frame_to_router),
        )


def _percentiles(samples: deque[float]) -> Percentiles:
    if not samples:
        return Percentiles()
    ordered = sorted(samples)

    def rank(percent: float) -> float:
        return 1e3 * ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    return Percentiles(count=len(ordered), p50=rank(50), p99=rank(99), max=1e3 * ordered[-1])
