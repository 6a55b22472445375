"""Dispatcher: the requests that wait in this router, and which of them goes next. Pure.

Late binding: a request waits here until a replica can start it soon, so that priority and fairness are
decided as late as possible and over all replicas. Order: (effective tier, the tier that has starved
longest, resumed ones first, virtual token counter of the tenant, arrival); effective tier = tier -
floor(starved / aging).

A tier starves from its last dispatch on, or from when it began to wait. So the lowest tier gets on at
least once per `tier * aging_s` under any load, but a long queue of aged requests cannot flood the better
ones, as it would if every request aged for itself.
"""

import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from replicas.api import TierDemand
from router.fairness import FairQueue

MAX_PASSED: Final = 16
"""Requests without room that one round of dispatching passes by, to look for a smaller one."""
PATIENCE_S: Final = 2.0
"""A request that smaller ones have passed for so long goes to a replica whose blocks do not suffice yet:
there nobody passes it, while the other replicas serve the rest."""


class Verdict(enum.Enum):
    """What came of an attempt to place a request."""

    PLACED = "placed"
    NO_SEAT = "no seat"
    """No replica takes anything of its tier now."""
    NO_ROOM = "no room"
    """There are seats, but none with enough blocks, or none that may go on with it."""
    REFUSED = "refused"
    """It waits no more: starting it now would come too late."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A request in the queue."""

    key: int
    tenant: str
    tier: int
    num_outputs: int
    num_tokens: int
    """Of its prompt and what it resumes."""
    max_tokens: int
    """Most tokens of each output."""
    queued_at: float
    weight: float = 1.0
    """Of its tenant."""
    passed_since: float | None = None
    """When it was first passed by for want of room."""

    def is_impatient(self, now: float) -> bool:
        return self.passed_since is not None and now - self.passed_since > PATIENCE_S


@dataclass(frozen=True, slots=True)
class QueueState:
    """What waits in one tier."""

    num_requests: int
    oldest_s: float
    """How long the one that came first has waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request that is next, and why."""

    waiting: Waiting
    starved_s: float
    """How long its tier has starved."""
    effective_tier: int
    """As good as which tier its own has become by that; not below 0."""


Place = Callable[[Turn], Verdict]
"""Try to give a request to a replica."""


@dataclass(slots=True)
class _TierQueue:
    tier: int
    starving_since: float
    first: OrderedDict[int, Waiting] = field(default_factory=OrderedDict)
    """Interrupted requests, which were served before: they come before all others."""
    fair: FairQueue[Waiting] = field(default_factory=FairQueue)
    num_outputs: int = 0
    passed: set[int] = field(default_factory=set)
    """In this round: interrupted requests passed by."""
    passed_tenants: set[str] = field(default_factory=set)
    """In this round: tenants whose oldest request was passed by."""

    def __len__(self) -> int:
        return len(self.first) + len(self.fair)

    def head(self) -> Waiting | None:
        for waiting in self.first.values():
            if waiting.key not in self.passed:
                return waiting
        head = self.fair.head(self.passed_tenants)
        return None if head is None else head.item

    def pass_by(self, waiting: Waiting) -> None:
        if waiting.key in self.first:
            self.passed.add(waiting.key)
        else:
            self.passed_tenants.add(waiting.tenant)


class Dispatcher:
    """Tier queues of one router. No clock, no I/O.

    Adding, removing and dispatching a request cost O(tiers + log tenants) each.
    """

    def __init__(self, aging_s: Mapping[int, float], default_aging_s: float = 30.0) -> None:
        """`aging_s` by tier, where it differs from the default."""
        self._aging_s = aging_s
        self._default_aging_s = default_aging_s
        self._tiers: dict[int, _TierQueue] = {}
        self._waiting: dict[int, Waiting] = {}
        self.queued_tokens = 0
        """Tokens of all that waits."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """All requests that wait, the longest first."""
        return iter(self._waiting.values())

    def num_waiting(self, tier: int) -> int:
        """Requests of exactly this tier."""
        queue = self._tiers.get(tier)
        return 0 if queue is None else len(queue)

    def queues(self, now: float) -> dict[int, QueueState]:
        """Describe the tiers in which something waits, by level. O(waiting)."""
        states: dict[int, QueueState] = {}
        for waiting in self._waiting.values():  # the longest waiting first
            if waiting.tier not in states:
                queue = self._tiers[waiting.tier]
                states[waiting.tier] = QueueState(len(queue), now - waiting.queued_at)
        return states

    def num_ahead(self, tier: int) -> int:
        """Outputs that wait in this tier and the better ones."""
        return sum(queue.num_outputs for queue in self._tiers.values() if queue.tier <= tier)

    def num_before(self, tier: int, tenant: str, weight: float = 1.0) -> int:
        """Outputs of exactly this tier that probably go before a new request of this tenant."""
        queue = self._tiers.get(tier)
        if queue is None or not len(queue):
            return 0
        num_requests = len(queue.first) + queue.fair.num_before(tenant, weight)
        return math.ceil(num_requests * queue.num_outputs / len(queue))

    def demand(self, num_replicas: int) -> tuple[TierDemand, ...]:
        """One replica's part of the outputs that wait, by tier."""
        return tuple(
            TierDemand(queue.tier, -(-queue.num_outputs // max(1, num_replicas)))
            for queue in self._tiers.values()
            if queue.num_outputs
        )

    def is_outranked(self, tier: int, starved_s: float) -> bool:
        """Whether a request of a better tier waits than one that was placed after `starved_s`."""
        effective = tier - math.floor(starved_s / self._aging_s.get(tier, self._default_aging_s))
        return any(len(queue) and queue.tier < effective for queue in self._tiers.values())

    def starves_since(self, tier: int, since: float) -> None:
        """Undo what placing a request did to its tier's aging: it came back. `since` as it was before."""
        queue = self._tiers[tier]
        queue.starving_since = min(queue.starving_since, since)

    def add(self, waiting: Waiting) -> None:
        """Queue a new request behind those of its tenant."""
        self._enter(waiting).fair.push(waiting.tenant, waiting.key, waiting, waiting.weight)

    def add_first(self, waiting: Waiting) -> None:
        """Queue a request that was interrupted: it is next within its tier."""
        self._enter(waiting).first[waiting.key] = waiting

    def remove(self, key: int) -> bool:
        """Take a request out, placed or not wanted any more. False if it does not wait."""
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return False
        queue = self._tiers[waiting.tier]
        queue.num_outputs -= waiting.num_outputs
        self.queued_tokens -= waiting.num_tokens
        if queue.first.pop(key, None) is None:
            queue.fair.remove(waiting.tenant, key)
        return True

    def charge(self, tier: int, tenant: str, amount: float, weight: float = 1.0) -> None:
        """Add service (router.fairness.service) that a tenant got in a tier; negative = a refund."""
        queue = self._tiers.get(tier)
        if queue is not None:
            queue.fair.charge(tenant, amount, weight)

    def dispatch(self, now: float, place: Place) -> None:
        """Place requests, best first, until nothing more can be placed now."""
        for queue in self._tiers.values():
            queue.passed.clear()
            queue.passed_tenants.clear()
        blocked_tier = math.inf
        num_passed = 0
        while num_passed < MAX_PASSED and (best := self._best(now, blocked_tier)) is not None:
            queue = self._tiers[best.tier]
            verdict = place(self._turn(best, queue, now))
            if verdict is Verdict.PLACED:
                self.remove(best.key)
                queue.starving_since = now
            elif verdict is Verdict.NO_SEAT:
                blocked_tier = best.tier
            elif verdict is Verdict.NO_ROOM:
                queue.pass_by(best)
                num_passed += 1
                if best.passed_since is None:
                    best.passed_since = now

    def _best(self, now: float, below: float) -> Waiting | None:
        """The request that is next among the tiers better than `below`."""
        queues = [queue for queue in self._tiers.values() if len(queue) and queue.tier < below]
        # Of equal ones the one that has starved: a better tier that always has work would keep it waiting
        # for one more aging bound.
        queues.sort(key=lambda queue: (self._effective_tier(queue, now), queue.starving_since, queue.tier))
        heads = (queue.head() for queue in queues)
        return next((head for head in heads if head is not None), None)

    def _turn(self, waiting: Waiting, queue: _TierQueue, now: float) -> Turn:
        effective_tier = max(0, self._effective_tier(queue, now))
        return Turn(waiting=waiting, starved_s=now - queue.starving_since, effective_tier=effective_tier)

    def _effective_tier(self, queue: _TierQueue, now: float) -> int:
        aging_s = self._aging_s.get(queue.tier, self._default_aging_s)
        return queue.tier - math.floor((now - queue.starving_since) / aging_s)

    def _enter(self, waiting: Waiting) -> _TierQueue:
        queue = self._tiers.get(waiting.tier)
        if queue is None:
            queue = self._tiers[waiting.tier] = _TierQueue(waiting.tier, waiting.queued_at)
        elif not len(queue):
            queue.starving_since = waiting.queued_at
        queue.num_outputs += waiting.num_outputs
        self.queued_tokens += waiting.num_tokens
        self._waiting[waiting.key] = waiting
        return queue
