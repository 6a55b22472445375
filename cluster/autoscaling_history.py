"""History: from cumulative counters, as routers report them, to what happened in a span of time. Pure.

A counter is only ever differenced with an earlier one of the same epoch: a restart is a new epoch, never
a negative rate, and a report that comes twice or out of order counts once. Latencies are counted in fixed
buckets, so that histograms of all routers may be added; percentiles may not.
"""

import bisect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from router.counters import ITL_EDGES_MS, TTFT_EDGES_MS, RouterCounters, TierCounters

SHORT_S: Final = 15.0
LONG_S: Final = 60.0
"""Both spans must show a violation before anything acts on it: one alone is a burst, or long over."""
FORGOTTEN_S: Final = 60.0
"""A router that has reported nothing new for so long is gone; until then it is only silent."""
EPSILON_S: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What happened in a tier within a span."""

    num_requests: int = 0
    num_rejected: int = 0
    input_tokens: int = 0
    """Prompt tokens, less those found in a prefix cache; >= 0."""
    output_tokens: int = 0
    ttft: tuple[int, ...] = ()
    itl: tuple[int, ...] = ()


NOTHING: Final = Tally()


def total(tallies: Sequence[Tally]) -> Tally:
    """Add tallies up. O(tallies * buckets)."""
    return Tally(
        num_requests=sum(tally.num_requests for tally in tallies),
        num_rejected=sum(tally.num_rejected for tally in tallies),
        input_tokens=sum(tally.input_tokens for tally in tallies),
        output_tokens=sum(tally.output_tokens for tally in tallies),
        ttft=tuple(map(sum, zip(*(tally.ttft for tally in tallies if tally.ttft), strict=True))),
        itl=tuple(map(sum, zip(*(tally.itl for tally in tallies if tally.itl), strict=True))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """What all routers counted between two looks at them."""

    at: float
    seconds: float
    """Since the look before."""
    tiers: Mapping[int, Tally]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRouter:
    """The latest report of a router, and when it was new."""

    counters: RouterCounters
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was reported lately."""

    at: float | None = None
    """Of the last look."""
    routers: Mapping[str, SeenRouter] = field(default_factory=dict)
    increments: tuple[Increment, ...] = ()
    """Oldest first."""

    def advanced(self, reports: Iterable[RouterCounters], now: float, kept_s: float) -> "History":
        """Take over reports, later ones of a router whatever their order; keep increments for `kept_s`."""
        seen = dict(self.routers)
        tiers: dict[int, Tally] = {}
        for report in reports:
            before = seen.get(report.router)
            if before is not None and not _is_later(report, before.counters):
                continue
            if before is not None:
                for tier, tally in _difference(before.counters, report).items():
                    tiers[tier] = total((tiers.get(tier, NOTHING), tally))
            seen[report.router] = SeenRouter(counters=report, at=now)
        kept = {name: router for name, router in seen.items() if now - router.at <= FORGOTTEN_S}
        increments = self.increments
        if self.at is not None and now > self.at:
            increments += (Increment(at=now, seconds=now - self.at, tiers=tiers),)
        return History(
            at=now,
            routers=kept,
            increments=tuple(i for i in increments if i.at > now - kept_s + EPSILON_S),
        )

    def silent(self, now: float, limit_s: float) -> tuple[str, ...]:
        """Routers that should report and have not for `limit_s`."""
        return tuple(name for name, router in self.routers.items() if now - router.at > limit_s)

    def within(self, now: float, span_s: float, age_s: float = 0.0) -> Iterable[Increment]:
        """The increments of the `span_s` seconds that ended `age_s` ago."""
        low, high = now - age_s - span_s + EPSILON_S, now - age_s + EPSILON_S
        return (increment for increment in self.increments if low < increment.at <= high)

    def tally(self, tier: int, now: float, span_s: float) -> Tally:
        return total([i.tiers[tier] for i in self.within(now, span_s) if tier in i.tiers])

    def now_waiting(self, tier: int) -> TierCounters:
        """What waits in all routers together; only the fields that describe this moment are set."""
        entries = [t for r in self.routers.values() for t in r.counters.tiers if t.tier == tier]
        return TierCounters(
            tier,
            queued_input_tokens=sum(entry.queued_input_tokens for entry in entries),
            queued_output_tokens=sum(entry.queued_output_tokens for entry in entries),
            num_stalled=sum(entry.num_stalled for entry in entries),
        )


def bucket(edges_ms: Sequence[float], value_ms: float) -> int:
    """The bucket that counts this latency: the first whose upper edge is not below it."""
    return bisect.bisect_left(edges_ms, value_ms)


def num_over(counts: Sequence[int], edges_ms: Sequence[float], target_ms: float) -> float:
    """How many are over the target; within the bucket that holds it they are taken as evenly spread."""
    place = bucket(edges_ms, target_ms)
    over = float(sum(counts[place + 1 :]))
    if place < min(len(counts), len(edges_ms)):
        low = edges_ms[place - 1] if place else 0.0
        over += counts[place] * (edges_ms[place] - target_ms) / (edges_ms[place] - low)
    return over


def problem(report: RouterCounters) -> str | None:
    """What is impossible in a report; None if nothing."""
    for tier in report.tiers:
        for name in TierCounters.__struct_fields__:
            value = getattr(tier, name)
            values = value if isinstance(value, tuple) else (value,)
            if any(not 0 <= number < 2**62 for number in values):
                return f"{name} of tier {tier.tier} is {value}"
        if len(tier.ttft) > len(TTFT_EDGES_MS) + 1 or len(tier.itl) > len(ITL_EDGES_MS) + 1:
            return f"a histogram of tier {tier.tier} has too many buckets"
    return None


def _is_later(report: RouterCounters, before: RouterCounters) -> bool:
    return (report.epoch, report.number) > (before.epoch, before.number)


def _difference(before: RouterCounters, report: RouterCounters) -> dict[int, Tally]:
    """What a router counted since its report before; since its epoch began where that is another."""
    base = {tier.tier: tier for tier in before.tiers} if before.epoch == report.epoch else {}
    return {tier.tier: _since(base.get(tier.tier), tier) for tier in report.tiers}


def _since(before: TierCounters | None, tier: TierCounters) -> Tally:
    base = before or TierCounters(tier.tier)
    num_requests = tier.num_requests - base.num_requests
    num_rejected = tier.num_rejected - base.num_rejected
    input_tokens = tier.input_tokens - base.input_tokens
    output_tokens = tier.output_tokens - base.output_tokens
    ttft = _risen(tier.ttft, base.ttft, len(TTFT_EDGES_MS) + 1)
    itl = _risen(tier.itl, base.itl, len(ITL_EDGES_MS) + 1)
    if min(num_requests, num_rejected, input_tokens, output_tokens, *ttft, *itl) < 0:
        return NOTHING  # a counter fell within an epoch: begin again from here
    # What was found in a cache is known only later than what was asked for.
    cached_tokens = max(0, tier.cached_tokens - base.cached_tokens)
    return Tally(
        num_requests=num_requests,
        num_rejected=num_rejected,
        input_tokens=max(0, input_tokens - cached_tokens),
        output_tokens=output_tokens,
        ttft=ttft,
        itl=itl,
    )


def _risen(now: tuple[int, ...], before: tuple[int, ...], num_buckets: int) -> tuple[int, ...]:
    """Differences of two histograms whose last buckets may be missing where they are empty; none of both
    remains none."""
    if not now and not before:
        return ()
    now += (0,) * (num_buckets - len(now))
    return tuple(map(operator.sub, now, before + (0,) * (num_buckets - len(before))))
