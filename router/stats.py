"""Stats: what a router knows of its replicas and of its own work, for GET /stats."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from replicas.api import ReplicaLoad
from router.dispatch import QueueState
from router.measures import RouterMeasures, TierMeasures
from router.transport_times import TransportSummary


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier in one router since it started. Counts, not percentiles: those of several routers add up."""

    ttft_target_ms: float | None = None
    itl_target_ms: float | None = None
    ttft_counts: tuple[int, ...] = ()
    """By bucket of router.histogram.WAIT_EDGES_MS."""
    itl_counts: tuple[int, ...] = ()
    """By bucket of router.histogram.ITL_EDGES_MS."""
    queue_wait_counts: tuple[int, ...] = ()
    """Waits in this router until a replica was chosen, by bucket of router.histogram.WAIT_EDGES_MS."""
    kept: int = 0
    broken: int = 0
    output_tokens: int = 0
    open_gap_ms: float = 0.0
    num_queued: int = 0
    oldest_s: float = 0.0
    """How long the first of those has waited."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /stats."""

    router: str = ""
    """Whose answer this is: with several, each knows its own work only."""
    replicas: dict[str, dict[str, Any]] = {}
    """Name -> last report. On the wire a ReplicaLoad is positional; here people read it by name."""
    next_to_go: tuple[str, ...] = ()
    """Replicas that are given little: their node drains, or they would be stopped if one had to be."""
    transport_ms: TransportSummary = TransportSummary()
    tiers: dict[str, TierStats] = {}

    @classmethod
    def of(
        cls,
        router: str,
        loads: Mapping[str, ReplicaLoad],
        transport_ms: TransportSummary,
        measures: RouterMeasures,
        queues: Mapping[int, QueueState],
        next_to_go: Iterable[str] = (),
    ) -> "Stats":
        waiting = {measures.tier_name(level): state for level, state in queues.items()}
        return cls(
            router=router,
            replicas={name: _named(load, measures) for name, load in loads.items()},
            next_to_go=tuple(sorted(next_to_go)),
            transport_ms=transport_ms,
            tiers={
                name: _tier(tier, measures.open_gap_ms(name), waiting.get(name, QueueState(0, 0.0)))
                for name, tier in measures.tiers.items()
            },
        )


def _tier(tier: TierMeasures, open_gap_ms: float, queue: QueueState) -> TierStats:
    return TierStats(
        ttft_target_ms=tier.ttft_target_ms,
        itl_target_ms=tier.itl_target_ms,
        ttft_counts=tuple(tier.ttft_ms.counts),
        itl_counts=tuple(tier.itl_ms.counts),
        queue_wait_counts=tuple(tier.queue_wait_ms.counts),
        kept=tier.num_kept,
        broken=tier.num_broken,
        output_tokens=tier.output_tokens,
        open_gap_ms=round(open_gap_ms, 1),
        num_queued=queue.num_requests,
        oldest_s=round(queue.oldest_s, 3),
    )


def _named(load: ReplicaLoad, measures: RouterMeasures) -> dict[str, Any]:
    tiers = [msgspec.structs.asdict(tier) | {"name": measures.tier_name(tier.tier)} for tier in load.tiers]
    return msgspec.structs.asdict(load) | {"tiers": tiers}
