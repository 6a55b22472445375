"""Slice: what one router holds of one tenant's limits, and who waits for more. Pure."""

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from router.quota_messages import Amounts, Ask, Levels, Limit, Verdict
from router.rate_limit import PERIOD_S
from router.tenants import Tenant

USE_WINDOW_S: Final = 1.0
"""Use is averaged over about this long, and so much is kept in stock."""
MIN_STOCK_RATE: Final = 2.0
"""Requests a second below which no stock is kept: it would be missing elsewhere more often than used here."""
SLOT_GRACE_S: Final = 0.3
"""A client's next request may come to another router sooner than its last one's slot: so long it waits."""
MAX_NEEDS: Final = 1000
"""Waiting requests of one tenant in one exchange; the others go with the next."""


class TicketState(enum.Enum):
    WAITING = enum.auto()
    GRANTED = enum.auto()
    REFUSED = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's reservation."""

    tenant: Tenant
    tokens: int
    since: float
    state: TicketState = TicketState.WAITING
    verdict: Verdict | None = None
    """Why, when refused."""


@dataclass(slots=True)
class _Stock:
    """One limit's part of a slice."""

    idle: int = 0
    used: int = 0
    """Since the last exchange was composed."""
    rate: float = 0.0
    """Units a second, averaged."""

    def average(self, elapsed_s: float) -> None:
        weight = 1.0 - math.exp(-elapsed_s / USE_WINDOW_S)
        self.rate += (self.used / max(elapsed_s, 1e-3) - self.rate) * weight
        self.used = 0

    def target(self, left: float, num_routers: int) -> int:
        return int(min(self.rate * USE_WINDOW_S, left / (2 * num_routers)))

    def give_back(self, target: int, *, everything: bool) -> int:
        """Take out of the stock what is to be returned."""
        returned = self.idle if everything else self.idle - target if self.idle > 2 * target else 0
        self.idle -= returned
        return returned

    def shortage(self, target: int) -> int:
        return target - self.idle if self.idle < target / 2 else 0


@dataclass(slots=True)
class Slice:
    """What this router holds for one tenant."""

    tenant: Tenant
    told_at: float
    left: Levels
    """What the ledger had left at `told_at`."""
    composed_at: float
    requests: _Stock = field(default_factory=_Stock)
    tokens: _Stock = field(default_factory=_Stock)
    idle_slots: int = 0
    used_slots: int = 0
    waiting: deque[Ticket] = field(default_factory=deque)
    asked: list[Ticket] = field(default_factory=list)

    def fits(self, ticket: Ticket) -> bool:
        tenant = ticket.tenant  # as it was when the ticket was made: limits may have changed since
        return (
            (tenant.rpm is None or self.requests.idle >= 1)
            and (tenant.tpm is None or self.tokens.idle >= ticket.tokens)
            and (tenant.max_concurrent is None or self.idle_slots >= 1)
        )

    def take(self, ticket: Ticket) -> None:
        """Grant a ticket from the stock; it must fit."""
        self.requests.idle -= ticket.tenant.rpm is not None
        self.tokens.idle -= ticket.tokens if ticket.tenant.tpm is not None else 0
        self.idle_slots -= ticket.tenant.max_concurrent is not None
        self.begin(ticket)

    def begin(self, ticket: Ticket) -> None:
        """Count a ticket for which all has been taken."""
        ticket.state = TicketState.GRANTED
        self.requests.used += 1
        self.tokens.used += ticket.tokens if ticket.tenant.tpm is not None else 0
        self.used_slots += ticket.tenant.max_concurrent is not None

    def end(self, ticket: Ticket, refund: Amounts) -> None:
        """Take back what a granted ticket did not use."""
        ticket.state = TicketState.CLOSED
        self.requests.idle += refund.requests if ticket.tenant.rpm is not None else 0
        self.tokens.idle += refund.tokens if ticket.tenant.tpm is not None else 0
        if ticket.tenant.max_concurrent is not None:
            self.used_slots -= 1
            self.idle_slots += 1

    def decide(self, ticket: Ticket, verdict: Verdict, now: float) -> bool:
        """Take the ledger's word; False if nobody waits for it, or the ticket waits on for a slot."""
        if ticket.state is not TicketState.WAITING:
            if verdict.refused_by is None:
                self.begin(ticket)
                self.end(ticket, Amounts(1, ticket.tokens))
            return False
        if verdict.refused_by is None:
            self.begin(ticket)
        elif verdict.refused_by is Limit.CONCURRENCY and now - ticket.since < SLOT_GRACE_S:
            self.waiting.append(ticket)
            return False
        else:
            ticket.state = TicketState.REFUSED
            ticket.verdict = verdict
        return True

    def next_waiting(self) -> Ticket | None:
        """The oldest ticket that still waits; drops those given up on the way."""
        while self.waiting and self.waiting[0].state is not TicketState.WAITING:
            self.waiting.popleft()
        return self.waiting[0] if self.waiting else None

    def levels(self, now: float) -> Levels:
        """What the ledger has left now, if no other router took anything since."""
        since_s = max(0.0, now - self.told_at)
        rpm, tpm = self.tenant.rpm or 0, self.tenant.tpm or 0
        return Levels(
            min(rpm, self.left.requests + rpm * since_s / PERIOD_S),
            min(tpm, self.left.tokens + tpm * since_s / PERIOD_S),
            self.left.slots,
        )

    def ask(self, num_routers: int, now: float) -> Ask | None:
        """Compose the entry for the next exchange; None = nothing to say."""
        elapsed_s = max(0.0, now - self.composed_at)
        self.composed_at = now
        self.requests.average(elapsed_s)
        self.tokens.average(elapsed_s)
        left = self.levels(now)
        is_busy = self.requests.rate >= MIN_STOCK_RATE
        target_requests = self.requests.target(left.requests, num_routers) if is_busy else 0
        target_tokens = self.tokens.target(left.tokens, num_routers) if is_busy else 0
        while self.next_waiting() is not None and len(self.asked) < MAX_NEEDS:
            self.asked.append(self.waiting.popleft())
        # A need is granted whole by the ledger, so the ledger must have all that is idle.
        everything = bool(self.asked)
        returned_slots = max(0, self.idle_slots - (0 if everything else left.slots // (2 * num_routers)))
        self.idle_slots -= returned_slots
        ask = Ask(
            self.tenant.name,
            Amounts(
                self.requests.give_back(target_requests, everything=everything),
                self.tokens.give_back(target_tokens, everything=everything),
                returned_slots,
            ),
            tuple(ticket.tokens for ticket in self.asked),
            Amounts(self.requests.shortage(target_requests), self.tokens.shortage(target_tokens)),
        )
        return ask if ask.needs or ask.returned != Amounts() or ask.prefetch != Amounts() else None

    def is_at_rest(self) -> bool:
        """There is nothing to tell the ledger, now or later."""
        stocked = self.requests.idle or self.requests.used or self.tokens.idle or self.tokens.used
        return not (stocked or self.idle_slots or self.waiting or self.asked)

    def is_worthless(self, now: float) -> bool:
        """Nothing is held, and what was used has been refilled: a new slice would be the same."""
        tenant = self.tenant
        levels = self.levels(now)
        return (
            self.is_at_rest()
            and not self.used_slots
            and levels.requests >= (tenant.rpm or 0)
            and levels.tokens >= (tenant.tpm or 0)
        )
