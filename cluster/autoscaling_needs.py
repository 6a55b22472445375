"""Needs: how many replicas each signal asks for, as real numbers, and where a promise is broken. Pure.

The law and its sources: docs/autoscaling.md. Work is measured in seconds of one replica.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from cluster.autoscaling_history import LONG_S, SHORT_S, History, Tally, num_over
from cluster.autoscaling_policy import Policy
from router.counters import ITL_EDGES_MS, TTFT_EDGES_MS
from router.tenants import Tier

ALLOWED_OVER: Final = 0.01
"""A target is a P99: so many of the latencies may be over it."""
MIN_GAPS: Final = 500
MIN_FIRST_TOKENS: Final = 100
"""Fewer in a span say nothing about a P99."""
MIN_REQUESTS: Final = 10
"""Fewer say nothing about the mean prompt."""
NUM_DEMAND_SPANS: Final = 3
MIN_COVERED_S: Final = 10.0
"""A rate over less time would be that of a burst."""
MIN_SLACK: Final = 0.1
"""Of a TTFT target: what its queue is given at least, however long the prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What one running replica says of itself; 0 = not known yet."""

    replica: str
    input_tokens_per_s: float = 0.0
    """How fast it computes prompts when nothing else runs."""
    output_tokens_per_s: float = 0.0
    """How fast it decodes with `max_batch` sequences."""
    max_batch: float = 0.0
    """Sequences that it can decode at once within the ITL target."""
    step_s: float = 0.0
    """A decode step of one sequence alone: no gap is shorter."""
    num_running: float = 0.0
    kv_tokens: float = 0.0
    """Size of its KV pool."""
    kv_wanted_tokens: float = 0.0
    """What its running and waiting sequences hold and need to start."""
    is_at_floor: bool = False
    """Prompts get the least possible chunk, and steps still take longer than the ITL target."""
    queued_tokens: Mapping[int, float] = field(default_factory=dict)
    """By tier: prompt tokens that it holds and has not computed."""
    cold_start_s: float = 0.0
    """How long it took from its construction until it served."""

    def problem(self) -> str | None:
        """What is impossible in it; None if nothing."""
        for name in _NUMBERS:
            if not 0 <= getattr(self, name) < math.inf:
                return f"{name} is {getattr(self, name)}"
        for tier, number in self.queued_tokens.items():
            if not 0 <= number < math.inf:
                return f"queued_tokens of tier {tier} is {number}"
        return None


_NUMBERS: Final = tuple(entry.name for entry in fields(ReplicaReport) if entry.type is float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one replica can do: the mean of those that last knew; 0 = nobody has known yet."""

    input_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    max_batch: float = 0.0
    step_s: float = 0.0
    kv_tokens: float = 0.0
    cold_start_s: float = 0.0

    def updated(self, reports: Sequence[ReplicaReport]) -> "Capacity":
        """Take over what is known now; keep the rest. A starting replica's ignorance is no news."""

        def mean(name: str) -> float:
            known: list[float] = [value for report in reports if (value := getattr(report, name)) > 0]
            before: float = getattr(self, name)
            return sum(known) / len(known) if known else before

        return Capacity(**{entry.name: mean(entry.name) for entry in fields(self)})

    def work_s(self, input_tokens: float, output_tokens: float) -> float | None:
        """Seconds of one replica for so many tokens; None while its speed is not known."""
        seconds = 0.0
        for tokens, speed in (
            (input_tokens, self.input_tokens_per_s),
            (output_tokens, self.output_tokens_per_s),
        ):
            if tokens and not speed:
                return None
            seconds += tokens / speed if tokens else 0.0
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Each signal in replicas that it would keep busy; None = not known."""

    rate: float | None
    """Demand over what a replica can take of it."""
    queue: float | None
    """Work that waits over the time in which it must have begun."""
    itl: float
    """Decoding sequences over the largest batch within the ITL target."""
    kv: float


def signals(known: Loads | None) -> dict[str, float]:
    """Return the loads that are known, by name."""
    by_name = {} if known is None else {s.name: getattr(known, s.name) for s in fields(known)}
    return {name: load for name, load in by_name.items() if load is not None}


def loads(
    history: History, capacity: Capacity, reports: Sequence[ReplicaReport], policy: Policy, now: float
) -> Loads:
    """Return what the signals ask for now. O(increments * tiers + replicas)."""
    rate = demand(history, capacity, policy, now)
    running = sum(report.num_running for report in reports)
    waiting = [history.now_waiting(tier.level) for tier in policy.tiers]
    wanted = sum(report.kv_wanted_tokens for report in reports)
    wanted += sum(entry.queued_input_tokens + entry.queued_output_tokens for entry in waiting)
    return Loads(
        rate=None if rate is None else rate / policy.utilisation,
        queue=_queue_load(history, capacity, reports, policy, now),
        itl=running / capacity.max_batch if capacity.max_batch else 0.0,
        kv=wanted / (policy.kv_utilisation * capacity.kv_tokens) if capacity.kv_tokens else 0.0,
    )


def demand(history: History, capacity: Capacity, policy: Policy, now: float) -> float | None:
    """Seconds of work asked for per second, refused work included: the highest of the last spans."""
    span_s = policy.demand_span_s
    rates = []
    for i in range(NUM_DEMAND_SPANS):
        increments = tuple(history.within(now, span_s, i * span_s))
        covered_s = sum(increment.seconds for increment in increments)
        tallies = [tally for increment in increments for tally in increment.tiers.values()]
        total_s = capacity.work_s(
            sum(tally.input_tokens for tally in tallies), sum(tally.output_tokens for tally in tallies)
        )
        if total_s is None:
            return None
        rates.append(total_s / max(covered_s, min(MIN_COVERED_S, span_s)))
    return max(rates)


def own_prefill_s(history: History, capacity: Capacity, tier: Tier, now: float) -> float:
    """Time to the first token of the tier's mean prompt on an idle replica; 0 = not known."""
    tally = history.tally(tier.level, now, LONG_S)
    if tally.num_requests < MIN_REQUESTS or not capacity.input_tokens_per_s:
        return 0.0
    return tally.input_tokens / tally.num_requests / capacity.input_tokens_per_s


def _queue_load(
    history: History, capacity: Capacity, reports: Sequence[ReplicaReport], policy: Policy, now: float
) -> float | None:
    """What waits, tier by tier from the best: each with all that goes before it. Tiers without a TTFT
    target ask for nothing by waiting."""
    ahead_s = load = 0.0
    for tier in sorted(policy.tiers, key=lambda tier: tier.level):
        waiting = history.now_waiting(tier.level)
        on_replicas = sum(report.queued_tokens.get(tier.level, 0.0) for report in reports)
        work_s = capacity.work_s(waiting.queued_input_tokens + on_replicas, waiting.queued_output_tokens)
        if work_s is None:
            return None
        ahead_s += work_s
        if tier.ttft_target_ms is not None:
            target_s = tier.ttft_target_ms / 1e3
            slack_s = target_s - own_prefill_s(history, capacity, tier, now)
            load = max(load, ahead_s / max(slack_s, MIN_SLACK * target_s))
    return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A tier whose promise is broken more often than a P99 may be, in the short and the long span."""

    tier: str
    kind: str
    """`ttft`, `itl` or `refused`: who is refused has no first token at all."""
    text: str

    @property
    def promise(self) -> str:
        """Which target of which tier, as `infeasible` names it."""
        return f"{self.tier}.itl" if self.kind == "itl" else f"{self.tier}.ttft"


def violations(history: History, policy: Policy, now: float) -> tuple[Violation, ...]:
    """Return the promises that are broken now; a stream that stalls counts before its gap has ended."""
    short = {tier.level: history.tally(tier.level, now, SHORT_S) for tier in policy.tiers}
    long = {tier.level: history.tally(tier.level, now, LONG_S) for tier in policy.tiers}
    found = []
    for tier in policy.tiers:
        found += _refused(tier.name, short[tier.level], long[tier.level])
        spans = (short[tier.level], long[tier.level])
        if tier.ttft_target_ms is not None:
            found += _violated(tier.name, "ttft", tier.ttft_target_ms, spans, 0)
        if tier.itl_target_ms is not None:
            num_stalled = history.now_waiting(tier.level).num_stalled
            found += _violated(tier.name, "itl", tier.itl_target_ms, spans, num_stalled)
    return tuple(found)


def _refused(tier: str, short: Tally, long: Tally) -> list[Violation]:
    """Refusals, if they are too many in both spans."""
    is_enough = long.num_requests >= MIN_FIRST_TOKENS
    shares = [tally.num_rejected / max(1, tally.num_requests) for tally in (short, long)]
    if not is_enough or min(shares) <= ALLOWED_OVER:
        return []
    text = f"tier {tier}: {shares[0]:.1%} of the requests refused"
    return [Violation(tier=tier, kind="refused", text=text)]


def _violated(
    tier: str, kind: str, target_ms: float, spans: Iterable[Tally], num_stalled: int
) -> list[Violation]:
    edges_ms, least = (TTFT_EDGES_MS, MIN_FIRST_TOKENS) if kind == "ttft" else (ITL_EDGES_MS, MIN_GAPS)
    shares = []
    for tally in spans:
        counts = tally.ttft if kind == "ttft" else tally.itl
        total = sum(counts)
        is_enough = total >= least or num_stalled
        over = num_over(counts, edges_ms, target_ms) + num_stalled
        shares.append(over / (total + num_stalled) if is_enough else 0.0)
    if min(shares) <= ALLOWED_OVER:
        return []
    text = f"tier {tier}: {shares[0]:.1%} of the {kind.upper()} over {target_ms:g} ms"
    return [Violation(tier=tier, kind=kind, text=text)]


def infeasible(history: History, capacity: Capacity, policy: Policy, now: float) -> dict[str, str]:
    """Return the targets that not even an idle replica meets, by a key of each, with the number why."""
    found = {}
    for tier in policy.tiers:
        step_ms = capacity.step_s * 1e3
        if tier.itl_target_ms is not None and step_ms > tier.itl_target_ms:
            found[f"{tier.name}.itl"] = (
                f"tier {tier.name}: an ITL of {tier.itl_target_ms:g} ms cannot be kept: one step of an idle "
                f"replica takes {step_ms:.1f} ms; no number of replicas helps"
            )
        own_ms = own_prefill_s(history, capacity, tier, now) * 1e3
        if tier.ttft_target_ms is not None and own_ms > tier.ttft_target_ms:
            found[f"{tier.name}.ttft"] = (
                f"tier {tier.name}: a TTFT of {tier.ttft_target_ms:g} ms cannot be kept: the mean prompt "
                f"takes {own_ms:.0f} ms on an idle replica; no number of replicas helps"
            )
    return found
