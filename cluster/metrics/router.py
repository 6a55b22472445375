"""A router's figures as samples."""

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.metrics import catalogue as c
from cluster.metrics.catalogue import Sample, histogram_sample
from router.access_log import AccessSink, AccessWriter
from router.backend import ReplicaBackend
from router.dispatch import QueueState
from router.measures import RouterMeasures, TenantMeasures, TierMeasures
from router.quota_client import QuotaClient
from router.stats import Stats
from router.transport_times import TransportTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFigures:
    """Where a router's figures are kept."""

    name: str
    """The router's."""
    measures: RouterMeasures
    backend: ReplicaBackend
    times: TransportTimes
    quota: QuotaClient
    access: AccessSink

    def stats(self) -> Stats:
        """Read what GET /stats tells."""
        backend = self.backend
        times = self.times.summary()
        return Stats.of(
            self.name, backend.loads(), times, self.measures, backend.queues(), backend.next_to_go()
        )

    def samples(self) -> Iterator[Sample]:
        """Read them all. O(tiers + tenants + open answers + waiting requests)."""
        measures = self.measures
        yield from measures_samples(measures)
        queues = {measures.tier_name(level): state for level, state in self.backend.queues().items()}
        for name in measures.tiers:
            queue = queues.get(name, QueueState(0, 0.0))
            yield Sample(c.QUEUED, (name,), queue.num_requests)
            yield Sample(c.QUEUE_AGE, (name,), queue.oldest_s)
        yield histogram_sample(c.ENGINE_TO_FRAME, self.times.engine_to_frame_ms)
        yield histogram_sample(c.FRAME_TO_ROUTER, self.times.frame_to_router_ms)
        yield Sample(c.CONNECTED, (), self.backend.num_usable)
        yield Sample(c.LEDGER_UP, (), not self.quota.is_down)
        if isinstance(self.access, AccessWriter):
            yield Sample(c.DROPPED_LINES, (), self.access.num_dropped)


def measures_samples(measures: RouterMeasures) -> Iterator[Sample]:
    """Read what a router counts of its own work."""
    for name, tier in measures.tiers.items():
        yield from _tier(name, tier)
        yield Sample(c.OPEN_GAP, (name,), measures.open_gap_ms(name))
    for name, tenant in measures.tenants.items():
        yield from _tenant(name, tenant)
    yield histogram_sample(c.PREPARE, measures.prepare_ms)
    yield Sample(c.OPEN_REQUESTS, (), len(measures.open_answers))
    yield Sample(c.ROUTED_TOKENS, (), measures.routed_tokens)
    yield Sample(c.MATCHED_TOKENS, (), measures.matched_tokens)
    yield Sample(c.RESUMED, (), measures.num_resumed)
    yield Sample(c.WITHDRAWN, (), measures.num_withdrawn)


def _tier(name: str, tier: TierMeasures) -> Iterator[Sample]:
    yield histogram_sample(c.TTFT, tier.ttft_ms, name)
    yield histogram_sample(c.ITL, tier.itl_ms, name)
    yield histogram_sample(c.QUEUE_WAIT, tier.queue_wait_ms, name)
    yield histogram_sample(c.REPLICA_TTFT, tier.replica_ttft_ms, name)
    yield histogram_sample(c.DURATION, tier.duration_ms, name)
    if tier.ttft_target_ms is not None:
        yield Sample(c.TTFT_TARGET, (name,), tier.ttft_target_ms)
    if tier.itl_target_ms is not None:
        yield Sample(c.ITL_TARGET, (name,), tier.itl_target_ms)
    yield Sample(c.LATE_STARTS, (name,), tier.num_late_starts)
    yield Sample(c.LATE_GAPS, (name,), tier.num_late_gaps)
    yield Sample(c.ANSWERS, (name, "yes"), tier.num_kept)
    yield Sample(c.ANSWERS, (name, "no"), tier.num_broken)
    for (outcome, code), count in tier.requests.items():
        yield Sample(c.REQUESTS, (name, outcome, code), count)
    yield Sample(c.PROMPT_TOKENS, (name,), tier.prompt_tokens)
    yield Sample(c.CACHED_TOKENS, (name,), tier.cached_tokens)
    yield Sample(c.OUTPUT_TOKENS, (name,), tier.output_tokens)


def _tenant(name: str, tenant: TenantMeasures) -> Iterator[Sample]:
    for outcome, count in tenant.requests.items():
        yield Sample(c.TENANT_REQUESTS, (name, outcome), count)
    yield Sample(c.TENANT_TOKENS, (name, "prompt"), tenant.prompt_tokens)
    yield Sample(c.TENANT_TOKENS, (name, "cached"), tenant.cached_tokens)
    yield Sample(c.TENANT_TOKENS, (name, "output"), tenant.output_tokens)
