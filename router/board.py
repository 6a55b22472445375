"""Board: the state of the whole server in one small struct, for the live page."""

from typing import Literal

import msgspec

from replicas.api import ReplicaLoad, TierLoad
from router.backend import ReplicaBackend
from router.connection import ReplicaState
from router.dispatch import QueueState
from router.histogram import ITL_EDGES_MS, WAIT_EDGES_MS
from router.limits import Limits, TenantUse
from router.measures import RouterMeasures, TierMeasures
from router.scaling import Scaling, ScalingSource
from router.tenants import Tier


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. Its numbers are those of its last report."""

    name: str
    state: ReplicaState
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_used_blocks: int
    num_blocks: int
    step_ms: float
    overloaded: bool


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tier: what it was promised and what there is of it now."""

    name: str
    level: int
    ttft_target_ms: float | None
    itl_target_ms: float | None
    num_running: int
    """On all replicas."""
    num_waiting: int
    """On all replicas."""
    num_queued: int
    """In this router."""
    oldest_queued_s: float
    """How long the first of them has waited."""
    num_kept: int
    """Answers of this router that kept every target. This and all below: since it started."""
    num_broken: int
    num_refused: int
    ttft_counts: list[int]
    """First tokens by latency: one count per bucket of BoardEvent.ttft_edges_ms, and one for all above."""
    itl_counts: list[int]
    """Gaps between tokens likewise."""


class BoardEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The board at one moment. Counts are cumulative: who wants those of a minute takes a difference."""

    kind: Literal["board"] = "board"
    router: str
    """Whose counts these are."""
    model: str | None
    ttft_edges_ms: tuple[float, ...] = WAIT_EDGES_MS
    itl_edges_ms: tuple[float, ...] = ITL_EDGES_MS
    replicas: tuple[ReplicaRow, ...]
    tiers: tuple[TierRow, ...]
    limits: list[TenantUse]
    scaling: Scaling


class Board:
    """Reads the board off a backend and its measures. One event loop."""

    def __init__(
        self,
        router_id: str,
        backend: ReplicaBackend,
        limits: Limits,
        measures: RouterMeasures,
        tiers: tuple[Tier, ...],
        scaling: ScalingSource,
    ) -> None:
        self._router_id = router_id
        self._backend = backend
        self._limits = limits
        self._scaling = scaling
        self._measures = measures
        self._tiers = tuple(sorted(tiers, key=lambda tier: tier.level))

    def replicas(self) -> list[str]:
        """The names of the replicas that answer."""
        return [name for name, state in sorted(self._backend.states().items()) if state != "starting"]

    def read(self) -> BoardEvent:
        """O(replicas x tiers)."""
        backend = self._backend
        loads, queues = backend.loads(), backend.queues()
        shares = [share for load in loads.values() for share in load.tiers]
        return BoardEvent(
            router=self._router_id,
            model=None if backend.card is None else backend.card.name,
            replicas=tuple(
                _replica_row(name, state, loads.get(name, ReplicaLoad()))
                for name, state in sorted(backend.states().items())
            ),
            tiers=tuple(
                _tier_row(
                    tier,
                    [share for share in shares if share.tier == tier.level],
                    queues.get(tier.level, QueueState(0, 0.0)),
                    self._measures.tier(tier.level),
                )
                for tier in self._tiers
            ),
            limits=self._limits.in_use(),
            scaling=self._scaling(),
        )


def _tier_row(tier: Tier, shares: list[TierLoad], queue: QueueState, measures: TierMeasures) -> TierRow:
    return TierRow(
        name=tier.name,
        level=tier.level,
        ttft_target_ms=tier.ttft_target_ms,
        itl_target_ms=tier.itl_target_ms,
        num_running=sum(share.num_running for share in shares),
        num_waiting=sum(share.num_waiting for share in shares),
        num_queued=queue.num_requests,
        oldest_queued_s=queue.oldest_s,
        num_kept=measures.num_kept,
        num_broken=measures.num_broken,
        num_refused=sum(n for (outcome, _), n in measures.requests.items() if outcome == "refused"),
        ttft_counts=measures.ttft_ms.counts,
        itl_counts=measures.itl_ms.counts,
    )


def _replica_row(name: str, state: ReplicaState, load: ReplicaLoad) -> ReplicaRow:
    return ReplicaRow(
        name=name,
        state=state,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        max_num_seqs=load.max_num_seqs,
        num_used_blocks=load.num_blocks - load.free_blocks,
        num_blocks=load.num_blocks,
        step_ms=load.step_ms,
        overloaded=load.overloaded,
    )
