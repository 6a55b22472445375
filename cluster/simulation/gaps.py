"""GapClock: the time between two tokens of every output, whichever replicas it runs on."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.simulation.measures import TierMeasures
from replicas.api import TokenDelta
from replicas.scheduler import Outputs
from router.histogram import Histogram


@dataclass(slots=True, eq=False)
class _Open:
    tier: TierMeasures
    routers: Histogram
    """The gaps in milliseconds that its router reports to the autoscaler."""
    last_at: float | None = None
    """When its last token was made."""


class GapClock:
    """Knows when each open request had its last token. One for all replicas; one output per request."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Open] = {}

    def begin(self, router: str, request_id: int, tier: TierMeasures, routers: Histogram) -> None:
        """A client waits for this request from now on; `routers` are the gaps that its router counts, ms."""
        self._open[router, request_id] = _Open(tier, routers)

    def end(self, router: str, request_id: int) -> None:
        """The client has all of it, or went away."""
        del self._open[router, request_id]

    def step(self, outputs: Outputs, now: float) -> None:
        """Take the deltas of a single step that ended at `now`."""
        gaps: Counter[tuple[TierMeasures, Histogram, float]] = Counter()
        for entry, delta in self._wanted(outputs):
            if not delta.token_ids:
                continue
            if entry.last_at is not None:
                gaps[entry.tier, entry.routers, entry.last_at] += 1
            entry.last_at = now
        for (tier, routers, before), count in gaps.items():
            tier.gap(now, now - before, count)
            routers.observe((now - before) * 1e3, count)

    def stretch(self, outputs: Outputs, started_at: float, now: float) -> None:
        """Take the deltas of equally long decode steps from `started_at` to `now`."""
        for entry, delta in self._wanted(outputs):
            count = len(delta.token_ids)
            gap_s = (now - started_at) / count
            entry.tier.gap((started_at + now) / 2, gap_s, count)
            entry.routers.observe(gap_s * 1e3, count)
            entry.last_at = now

    def _wanted(self, outputs: Outputs) -> Iterator[tuple[_Open, TokenDelta]]:
        for owner, deltas in outputs.items():
            router = owner.partition(":")[0]
            for delta in deltas:
                entry = self._open.get((router, delta.request_id))
                if entry is not None:
                    yield entry, delta
