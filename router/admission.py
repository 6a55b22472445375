"""Admission: may a request wait here, or is it refused at once with a time at which to come back? Pure.

A refusal after a long wait is the worst outcome, so the wait is predicted when a request arrives. What
counts is the wait before its own work begins: its own prompt takes as long as it takes on any replica.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from replicas.api import ReplicaLoad
from router.tenants import Tier

MAX_QUEUED_TOKENS: Final = 8_000_000
"""Prompt tokens that may wait in one router, all tiers together: some 300 MB."""
EXPLORATION: Final = 0.01
"""Share of the requests that is admitted against the prediction, so that a wrong one is found out."""
MIN_SHARE: Final = 0.05
"""Of the seats that become free, what the prediction lets a tier have at least: aging lets it through."""
LATE: Final = 2.0
"""A wait that was predicted to be within the target, and became so many times the target after all, is as
wrong as predictions are: the seat goes to a request that still comes in time."""
MAX_RETRY_AFTER_S: Final = 60
SPREAD: Final = (0.8, 1.3)
"""Retry-After is drawn from this range around the computed time: equal times make a wave of retries."""
RATE_WINDOW_S: Final = 30.0
PROOF_S: Final = 10.0
"""What better tiers take is counted as it is seen over about so long."""
DEFAULT_QUEUE: Final = 1000
DEFAULT_TTL_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """The request may start or wait."""

    predicted_wait_s: float | None
    """Before its own prompt is computed; None = not known yet."""
    predicted_ttft_s: float | None
    """Until its first token; None = not known yet."""
    queue_ttl_s: float
    """How long it may wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The request is refused."""

    reason: str
    """A short code: queue_full, queue_bytes, predicted_wait, queue_timeout."""
    message: str
    retry_after_s: int


class DrainRate:
    """How many outputs end per second, and how long they took, over an exponential window."""

    def __init__(self) -> None:
        self._events = 0.0
        self._seconds = 0.0
        self._saturated = 0.0  # events while others waited
        self._since: float | None = None
        self._updated_at = 0.0

    def note(self, now: float, seconds: float, *, is_saturated: bool) -> None:
        """An output ended that had been on its replica for so long; `is_saturated`: others waited then."""
        if self._since is None:
            self._since = self._updated_at = now
        left = self._left(now)
        self._events = self._events * left + 1
        self._seconds = self._seconds * left + seconds
        self._saturated = self._saturated * left + is_saturated
        self._updated_at = now

    def per_s(self, now: float) -> float | None:
        """None until there is something to go by."""
        if self._since is None or now - self._since < 1.0:
            return None
        seen = 1.0 - math.exp(-(now - self._since) / RATE_WINDOW_S)
        return self._events * self._left(now) / (RATE_WINDOW_S * seen)

    def proven_per_s(self, now: float) -> float:
        """The same, less in the first seconds: few events say little."""
        if self._since is None:
            return 0.0
        return (self.per_s(now) or 0.0) * (1.0 - math.exp(-(now - self._since) / PROOF_S))

    def possible_per_s(self, num_open: int, now: float) -> float | None:
        """How many can end while `num_open` are on replicas and others wait.

        What ends while nobody waits is what was asked for, not what is possible: there the outputs that are
        open now, over how long they stay, say more (Little's law).
        """
        rate = self.per_s(now)
        if rate is None or not self._seconds:
            return rate
        saturated = self._saturated / self._events
        return saturated * rate + (1 - saturated) * max(rate, num_open * self._events / self._seconds)

    def _left(self, now: float) -> float:
        return math.exp(-(now - self._updated_at) / RATE_WINDOW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What stands between a new request and its start."""

    num_outputs: int
    """Outputs in this router that go before it: of better tiers, and of its own as fairness has it."""
    num_better: int
    """Of those, the ones of better tiers."""
    num_sent: float
    """Outputs of its tier and better ones that wait on replicas: this router's share of them."""
    num_sent_better: float
    """Of those, the ones of better tiers."""
    num_open: int
    """Outputs of this router on replicas, all tiers."""
    num_requests: int
    """Requests of exactly its tier that wait in this router."""
    queued_tokens: int
    """Prompt tokens that wait in this router, all tiers."""
    has_room: bool
    """Some replica has room for its tier now."""
    has_seat: bool
    """Replicas seem to have more free seats for its tier than outputs wait here: credits may be on their
    way."""
    num_prompt_tokens: int
    """Its own, which the time to its first token includes."""


class Admission:
    """Decides by tier; keeps the rates at which outputs end."""

    def __init__(self, tiers: Iterable[Tier], draw: Random) -> None:
        self._tiers: Mapping[int, Tier] = {tier.level: tier for tier in tiers}
        self._draw = draw
        self._drain_rate = DrainRate()
        self._drain_rates: dict[int, DrainRate] = {}
        self.num_rejected: Counter[int] = Counter()
        """By tier: work that was refused is demand too."""

    def note_end(self, tier: int, seconds: float, now: float, *, is_saturated: bool) -> None:
        """An output ended that had been on its replica for so long, while others waited or not."""
        for rate in (self._drain_rate, self._drain_rates.setdefault(tier, DrainRate())):
            rate.note(now, seconds, is_saturated=is_saturated)

    def decide(self, tier: int, ahead: Ahead, loads: Iterable[ReplicaLoad], now: float) -> Admit | Reject:
        """Decide on a request that has just arrived. O(replicas)."""
        settings = self._tiers.get(tier)
        ttl_s = DEFAULT_TTL_S if settings is None else settings.queue_ttl_s
        max_queue = DEFAULT_QUEUE if settings is None else settings.max_queue
        loads = tuple(loads)
        own_s = _own_prompt_s(loads, ahead.num_prompt_tokens)
        if ahead.has_seat:
            wait_s: float | None = _prompts_ahead_s(loads, tier)
        else:
            wait_s = self.predict_wait_s(tier, ahead, loads, now)
        if ahead.has_room:
            # A free seat serves it whatever the books say.
            return Admit(predicted_wait_s=wait_s, predicted_ttft_s=_sum(wait_s, own_s), queue_ttl_s=ttl_s)
        if not loads:
            wait_s = None  # the rates of replicas that are gone tell nothing of the one that is asked for
        if ahead.num_requests >= max_queue:
            return self._reject(tier, "queue_full", "too many requests are waiting", wait_s, ttl_s)
        if ahead.queued_tokens >= MAX_QUEUED_TOKENS:
            return self._reject(tier, "queue_bytes", "too many prompt tokens are waiting", wait_s, ttl_s)
        limit_s = ttl_s
        if settings is not None and settings.ttft_target_ms is not None:
            limit_s = min(limit_s, settings.ttft_target_ms / 1e3)
        if wait_s is not None and wait_s > limit_s and self._draw.random() >= EXPLORATION:
            message = f"the wait would be longer than the {limit_s:g} s allowed for this tier"
            return self._reject(tier, "predicted_wait", message, wait_s, limit_s)
        return Admit(predicted_wait_s=wait_s, predicted_ttft_s=_sum(wait_s, own_s), queue_ttl_s=ttl_s)

    def comes_too_late(self, tier: int, waited_s: float, loads: Iterable[ReplicaLoad]) -> bool:
        """Predict again for a request that may start now: is it beyond LATE times its tier's target?"""
        settings = self._tiers.get(tier)
        if settings is None or settings.ttft_target_ms is None:
            return False
        return waited_s + _prompts_ahead_s(tuple(loads), tier) > LATE * settings.ttft_target_ms / 1e3

    def expired(self, tier: int, ahead: Ahead, loads: Iterable[ReplicaLoad], now: float) -> Reject:
        """Refuse a request that has waited as long as it may."""
        wait_s = self.predict_wait_s(tier, ahead, loads, now)
        message = "the request has waited as long as its tier allows"
        return self._reject(tier, "queue_timeout", message, wait_s, 0.0)

    def predict_wait_s(
        self, tier: int, ahead: Ahead, loads: Iterable[ReplicaLoad], now: float
    ) -> float | None:
        """Predict seconds until a seat is free for it, at the rate at which outputs end.

        Better tiers that come later go first, too: what they take of the seats now is not counted on.
        """
        rate = self._drain_rate.possible_per_s(ahead.num_open, now)
        if rate is None:
            return None
        # In the beginning the difference of two rates is mostly chance, and a refusal would be, too.
        better = sum(r.proven_per_s(now) for level, r in self._drain_rates.items() if level < tier)
        left = max(rate - better, MIN_SHARE * rate, 1e-3)
        num_better = ahead.num_better + ahead.num_sent_better
        num_own = ahead.num_outputs + ahead.num_sent - num_better + 1
        seats_s = num_own / left + num_better / max(rate, 1e-3)
        return seats_s + min((_step_s(load) / 2 for load in loads), default=0.0)

    def _reject(self, tier: int, reason: str, message: str, wait_s: float | None, limit_s: float) -> Reject:
        self.num_rejected[tier] += 1
        excess_s = 1.0 if wait_s is None else max(1.0, wait_s - limit_s)
        spread = self._draw.uniform(*SPREAD)
        retry_after_s = min(MAX_RETRY_AFTER_S, math.ceil(math.ceil(excess_s) * spread))
        return Reject(reason=reason, message=message, retry_after_s=retry_after_s)


def _prompts_ahead_s(loads: Sequence[ReplicaLoad], tier: int) -> float:
    """Time for what a replica computes before a prompt of this tier that has a seat there.

    The mean over those with a free seat, for routing chooses by cached prefix, too. The step under way
    counts whole: a moment is more likely to fall into a long step than into a short one.
    """
    ready = [load for load in loads if load.num_running + load.num_waiting < load.max_num_seqs]
    times = [_step_s(load) + _queued_s(load, tier) for load in ready or loads]
    return sum(times) / len(times) if times else 0.0


def _step_s(load: ReplicaLoad) -> float:
    """How long the step under way takes, if there is one."""
    return load.step_ms / 1e3 if load.num_running else 0.0


def _queued_s(load: ReplicaLoad, tier: int) -> float:
    if not load.prefill_tokens_per_s:
        return 0.0
    tokens = sum(entry.queued_tokens for entry in load.tiers if entry.tier <= tier)
    return tokens / load.prefill_tokens_per_s


def _own_prompt_s(loads: Iterable[ReplicaLoad], num_tokens: int) -> float | None:
    """Time to compute a prompt and sample its first token, uncached; None = not known yet."""
    times = [
        max(load.step_ms / 1e3, num_tokens / load.prefill_tokens_per_s)
        for load in loads
        if load.prefill_tokens_per_s
    ]
    return min(times, default=None)


def _sum(first_s: float | None, second_s: float | None) -> float | None:
    return None if first_s is None or second_s is None else first_s + second_s
