"""The catalogue of metrics: name, kind, labels, meaning. docs/metrics.md has the same table."""

import enum
from dataclasses import dataclass
from typing import Final

from router.histogram import COUNT_EDGES, ITL_EDGES_MS, LEG_EDGES_MS, WAIT_EDGES_MS, Histogram


class Kind(enum.StrEnum):
    """How a metric behaves, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COMMON_LABELS: Final = ("application", "deployment", "replica")
"""Of every metric: Serve's names of the application, the deployment and the process."""
PREFIX: Final = "ray_"
"""Ray puts this before every name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family of series."""

    name: str
    """With its unit; counters end in _total."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Beside the common ones."""
    edges: tuple[float, ...] = ()
    """Of a histogram."""
    event_only: bool = False
    """Has no series until it happens for the first time."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram at one moment."""

    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of one series at one moment; counters and histograms count from the process' start."""

    metric: Metric
    labels: tuple[str, ...]
    """Values, in the order of the metric's labels."""
    value: float | Buckets


def histogram_sample(metric: Metric, histogram: Histogram, *labels: str) -> Sample:
    """Take a histogram as it is now."""
    return Sample(metric, labels, Buckets(tuple(histogram.counts), histogram.sum))


def _counter(name: str, help: str, *labels: str, event_only: bool = False) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=help, labels=labels, event_only=event_only)


def _gauge(name: str, help: str, *labels: str, event_only: bool = False) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=help, labels=labels, event_only=event_only)


def _histogram(name: str, help: str, edges: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, help=help, labels=labels, edges=edges)


# Routers: the promise
TTFT: Final = _histogram(
    "headway_ttft_ms", "From a request's header to its first token, written", WAIT_EDGES_MS, "tier"
)
ITL: Final = _histogram(
    "headway_itl_ms", "Gaps between tokens of an output, where they are written", ITL_EDGES_MS, "tier"
)
OPEN_GAP: Final = _gauge(
    "headway_open_gap_ms", "How long the stream that waits longest for its next token has waited", "tier"
)
TTFT_TARGET: Final = _gauge("headway_ttft_target_ms", "Promised time to the first token", "tier")
ITL_TARGET: Final = _gauge("headway_itl_target_ms", "Promised gap between tokens", "tier", event_only=True)
LATE_STARTS: Final = _counter(
    "headway_late_starts_total", "Answers whose first token missed its target", "tier", event_only=True
)
LATE_GAPS: Final = _counter(
    "headway_late_gaps_total", "Gaps between tokens that missed their target", "tier", event_only=True
)
ANSWERS: Final = _counter(
    "headway_answers_total", "Answers that kept (yes) or broke (no) their tier's promise", "tier", "kept"
)
# Routers: requests
REQUESTS: Final = _counter(
    "headway_requests_total",
    "Requests by outcome (ok, refused, failed, client_gone) and code of the error",
    *("tier", "outcome", "code"),
)
DURATION: Final = _histogram(
    "headway_request_duration_ms", "From a request's header to the end of its answer", WAIT_EDGES_MS, "tier"
)
PROMPT_TOKENS: Final = _counter("headway_prompt_tokens_total", "Prompt tokens of answered requests", "tier")
CACHED_TOKENS: Final = _counter(
    "headway_cached_tokens_total", "Of those, found in prefix caches", "tier", event_only=True
)
OUTPUT_TOKENS: Final = _counter("headway_output_tokens_total", "Tokens generated for clients", "tier")
TENANT_REQUESTS: Final = _counter(
    "headway_tenant_requests_total", "Requests by tenant; those beyond 50 share (other)", "tenant", "outcome"
)
TENANT_TOKENS: Final = _counter(
    "headway_tenant_tokens_total", "Tokens by tenant and kind: prompt, cached, output", "tenant", "kind"
)
# Routers: where the time goes
PREPARE: Final = _histogram(
    "headway_prepare_ms", "Router's own part of a request: body, text, tokens, quota", LEG_EDGES_MS
)
QUEUE_WAIT: Final = _histogram(
    "headway_queue_wait_ms", "In the router's queue, until a replica was chosen", WAIT_EDGES_MS, "tier"
)
REPLICA_TTFT: Final = _histogram(
    "headway_replica_ttft_ms", "From the choice of a replica to its first token", WAIT_EDGES_MS, "tier"
)
ENGINE_TO_FRAME: Final = _histogram(
    "headway_engine_to_frame_ms", "From the end of a step until its frame leaves the replica", LEG_EDGES_MS
)
FRAME_TO_ROUTER: Final = _histogram(
    "headway_frame_to_router_ms", "From there until the router has it, skew of clocks included", LEG_EDGES_MS
)
# Routers: queues, routing, quota
QUEUED: Final = _gauge("headway_queued_requests", "Requests that wait in the router", "tier")
QUEUE_AGE: Final = _gauge("headway_queue_age_s", "How long the one that came first has waited", "tier")
OPEN_REQUESTS: Final = _gauge("headway_open_requests", "Completions in progress in the router")
CONNECTED: Final = _gauge("headway_connected_replicas", "Replicas that the router can use")
ROUTED_TOKENS: Final = _counter("headway_routed_tokens_total", "Prompt tokens sent to replicas")
MATCHED_TOKENS: Final = _counter(
    "headway_matched_tokens_total", "Of those, expected in the chosen replica's cache", event_only=True
)
RESUMED: Final = _counter(
    "headway_resumed_total", "Requests that went on after losing their replica", event_only=True
)
WITHDRAWN: Final = _counter(
    "headway_withdrawn_total", "Requests asked back from a replica on which they waited", event_only=True
)
LEDGER_UP: Final = _gauge("headway_ledger_up", "1 while the ledger of quotas answers this router")
DROPPED_LINES: Final = _counter(
    "headway_access_lines_dropped_total", "Lines of the access log that were lost", event_only=True
)
# Replicas
STEP: Final = _histogram("headway_engine_step_ms", "Duration of engine steps", ITL_EDGES_MS)
ENGINE_ITL: Final = _histogram(
    "headway_engine_itl_ms", "Gaps between tokens of an output, inside the engine", ITL_EDGES_MS
)
CHUNK: Final = _histogram(
    "headway_engine_chunk_tokens", "Prompt tokens of steps that computed any", COUNT_EDGES
)
BATCH: Final = _histogram("headway_engine_batch_sequences", "Sequences of a step", COUNT_EDGES)
ENGINE_PROMPT: Final = _counter("headway_engine_prompt_tokens_total", "Prompt tokens accepted")
ENGINE_CACHED: Final = _counter(
    "headway_engine_cached_tokens_total", "Of those, not computed again", event_only=True
)
ENGINE_COMPUTED: Final = _counter(
    "headway_engine_computed_tokens_total", "Tokens through the model, recomputed ones included"
)
ENGINE_OUTPUT: Final = _counter("headway_engine_output_tokens_total", "Tokens sampled")
ENGINE_DRAFTED: Final = _counter(
    "headway_engine_draft_tokens_total", "Guessed tokens through the model", event_only=True
)
ENGINE_ACCEPTED: Final = _counter(
    "headway_engine_accepted_tokens_total", "Guessed tokens that were right", event_only=True
)
ENGINE_ENDED: Final = _counter(
    "headway_engine_ended_total", "Outputs that finished or failed, and aborted requests", "how"
)
PREEMPTIONS: Final = _counter(
    "headway_engine_preemptions_total", "Sequences that lost their blocks or seat", event_only=True
)
SCHEDULER_S: Final = _counter("headway_engine_scheduler_seconds_total", "Time in the scheduler")
RUNNER_S: Final = _counter("headway_engine_runner_seconds_total", "Time in the model")
REPLICA_S: Final = _counter("headway_replica_seconds_total", "Lifetime of the replica, ready", "device")
RUNNING: Final = _gauge("headway_running_sequences", "Sequences that hold a seat", "tier")
WAITING: Final = _gauge("headway_waiting_sequences", "Sequences that wait in the replica", "tier")
SEATS: Final = _gauge("headway_seats", "Sequences that may run at once")
KV_BLOCKS: Final = _gauge("headway_kv_blocks", "KV blocks of the pool")
KV_USED: Final = _gauge("headway_kv_used_blocks", "KV blocks that running sequences hold")
OVERLOADED: Final = _gauge("headway_engine_overloaded", "1 while prompts are computed at the least rate")
# Ledger
LEDGER_ROUTERS: Final = _gauge("headway_ledger_routers", "Routers with a session at the ledger")
QUOTA_LEFT: Final = _gauge(
    "headway_quota_left",
    "What nobody has leased of a tenant's limits, by limit: requests, tokens, slots; 50 tenants at most",
    *("tenant", "limit"),
    event_only=True,
)
# Autoscaler
TARGET_REPLICAS: Final = _gauge(
    "headway_autoscaling_target_replicas", "Replicas that the autoscaler wants", event_only=True
)
RUNNING_REPLICAS: Final = _gauge(
    "headway_autoscaling_running_replicas", "Replicas that serve, as it sees them", event_only=True
)
LOAD_REPLICAS: Final = _gauge(
    "headway_autoscaling_load_replicas",
    "Replicas that a signal (rate, queue, itl, kv) asks for",
    "signal",
    event_only=True,
)
SCALING_REASONS: Final = _counter(
    "headway_autoscaling_reasons_total", "Decisions by reason; one has several", "reason", event_only=True
)

METRICS: Final[tuple[Metric, ...]] = tuple(
    metric for metric in list(globals().values()) if isinstance(metric, Metric)
)
