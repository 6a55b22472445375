"""Quota: a router's slices of the tenants' limits, and the requests that wait for more. Pure.

The common path touches the slice alone. A request that does not fit waits for the next exchange with the
ledger; one that the ledger refuses is refused. Slices follow the use of the last second, and what is no
longer used goes back.
"""

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from router.quota_messages import (
    Amounts,
    Ask,
    Exchange,
    Hello,
    Levels,
    Limit,
    Reply,
    Share,
    Verdict,
    Welcome,
)
from router.rate_limit import PERIOD_S
from router.tenants import Tenant

HEARTBEAT_S: Final = 0.5
USE_WINDOW_S: Final = 1.0
"""Use is averaged over about this long, and so much is kept in stock."""
MIN_STOCK_RATE: Final = 2.0
"""Requests a second below which no stock is kept: it would be missing elsewhere more often than used here."""
SWEEP_S: Final = 5.0
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
class _Slice:
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

    def fits(self, tokens: int) -> bool:
        tenant = self.tenant
        return (
            (tenant.rpm is None or self.requests.idle >= 1)
            and (tenant.tpm is None or self.tokens.idle >= tokens)
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
        while self.waiting and len(self.asked) < MAX_NEEDS:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What a tenant has left, as far as this router knows."""

    requests: float
    tokens: float


class Quota:
    """All slices of a router. Not for concurrent use."""

    def __init__(self, router: str) -> None:
        """`router` is unique to this process."""
        self._router = router
        self._slices: dict[str, _Slice] = {}
        self._active: dict[str, _Slice] = {}
        """Those not at rest: an exchange costs nothing for the others."""
        self._swept_at = -math.inf
        self._session: int | None = None
        self._num_hellos = 0
        self._epoch = 0
        self._number = 0
        self._under_way: Exchange | None = None
        self._composed_at = -math.inf
        self._num_routers = 1
        self._quiet_until = -math.inf
        self._service: dict[str, float] = {}

    @property
    def has_session(self) -> bool:
        return self._session is not None

    @property
    def num_slices(self) -> int:
        """Tenants of whom anything is known: those that asked within the last minutes."""
        return len(self._slices)

    def reserve(self, tenant: Tenant, tokens: int, now: float) -> Ticket:
        """Reserve a request of at most `tokens` tokens; the ticket may have to wait for an exchange."""
        ticket = Ticket(tenant, tokens, now)
        if not is_limited(tenant):
            ticket.state = TicketState.GRANTED
            return ticket
        part = self._slices.get(tenant.name)
        if part is None:
            full = Levels(tenant.rpm or 0, tenant.tpm or 0, tenant.max_concurrent or 0)
            part = self._slices[tenant.name] = _Slice(tenant, now, full, now)
        part.tenant = tenant
        self._active[tenant.name] = part
        if not part.waiting and part.fits(tokens):
            part.take(ticket)
        else:
            part.waiting.append(ticket)
        return ticket

    def settle(self, ticket: Ticket, used_tokens: int) -> None:
        """End a granted ticket: what it did not use can be used by others at once. Idempotent."""
        self._end(ticket, Amounts(0, max(0, ticket.tokens - used_tokens)))

    def cancel(self, ticket: Ticket) -> None:
        """End a ticket in any state as if it had never been. Idempotent."""
        if ticket.state is TicketState.GRANTED:
            self._end(ticket, Amounts(1, ticket.tokens))
            return
        ticket.state = TicketState.CLOSED
        part = self._slices.get(ticket.tenant.name)
        if part is not None and ticket in part.waiting:
            part.waiting.remove(ticket)

    def _end(self, ticket: Ticket, refund: Amounts) -> None:
        if ticket.state is not TicketState.GRANTED:
            return
        ticket.state = TicketState.CLOSED
        if part := self._slices.get(ticket.tenant.name):
            part.end(ticket, refund)
            self._active[ticket.tenant.name] = part

    def remaining(self, tenant: Tenant, now: float) -> Remaining:
        """What is left of the tenant's limits; full where it has none or did not ask lately."""
        part = self._slices.get(tenant.name)
        if part is None:
            return Remaining(requests=tenant.rpm or 0, tokens=tenant.tpm or 0)
        levels = part.levels(now)
        return Remaining(
            requests=min(tenant.rpm or 0, levels.requests + part.requests.idle),
            tokens=min(tenant.tpm or 0, levels.tokens + part.tokens.idle),
        )

    def hello(self, now: float) -> Hello:
        """Begin a session anew: after the start, or when the ledger does not know it."""
        self._session = None
        self._num_hellos += 1
        self._under_way = None
        for part in self._slices.values():
            part.waiting.extendleft(reversed([t for t in part.asked if t.state is TicketState.WAITING]))
            part.asked = []
        held = {name: part.used_slots + part.idle_slots for name, part in self._slices.items()}
        return Hello(
            router=self._router,
            number=self._num_hellos,
            epoch=self._epoch,
            slots={name: slots for name, slots in held.items() if slots},
            remembered={name: part.levels(now) for name, part in self._slices.items()},
        )

    def welcome(self, welcome: Welcome, now: float) -> None:
        """Take the answer to the last hello."""
        self._session = welcome.session
        self._epoch = welcome.epoch
        self._number = 0
        self._quiet_until = now + welcome.ready_in_s

    def message(self, service: Mapping[str, float], now: float) -> Exchange | None:
        """Return the exchange to send now, the same one until it is answered; None = nothing to say.

        `service` is what was charged since the last call. Needs a session.
        """
        assert self._session is not None
        for name, charged in service.items():
            self._service[name] = self._service.get(name, 0.0) + charged
        if self._under_way is not None:
            return self._under_way
        asks = () if now < self._quiet_until else tuple(self._asks(now))
        if not asks and not self._service and 0.0 <= now - self._composed_at < HEARTBEAT_S:
            return None
        self._composed_at = now
        self._number += 1
        self._under_way = Exchange(
            session=self._session, number=self._number, asks=asks, service=self._service
        )
        self._service = {}
        return self._under_way

    def _asks(self, now: float) -> list[Ask]:
        self._sweep(now)
        asks = []
        for name, part in list(self._active.items()):
            ask = part.ask(self._num_routers, now)
            if ask is not None:
                asks.append(ask)
            elif part.is_at_rest():
                del self._active[name]
        return asks

    def _sweep(self, now: float) -> None:
        if 0.0 <= now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        worthless = [name for name, part in self._slices.items() if part.is_worthless(now)]
        for name in worthless:
            del self._slices[name]
            self._active.pop(name, None)

    def apply(self, reply: Reply, now: float) -> list[Ticket]:
        """Take the answer to the exchange under way; returns the tickets that are decided now.

        Another answer (late, repeated) changes nothing.
        """
        sent = self._under_way
        if sent is None or (reply.session, reply.number) != (sent.session, sent.number):
            return []
        self._under_way = None
        self._num_routers = max(1, reply.num_routers)
        decided: list[Ticket] = []
        for share in reply.shares:
            decided += self._take_share(self._slices[share.tenant], share, now)
        return decided

    def _take_share(self, part: _Slice, share: Share, now: float) -> list[Ticket]:
        asked, part.asked = part.asked, []
        part.left = share.left
        part.told_at = now
        part.requests.idle += share.prefetched.requests
        part.tokens.idle += share.prefetched.tokens
        decided: list[Ticket] = []
        for ticket, verdict in zip(asked, share.verdicts, strict=True):
            is_wanted = ticket.state is TicketState.WAITING
            if verdict.refused_by is None:
                part.begin(ticket)
                if not is_wanted:
                    part.end(ticket, Amounts(1, ticket.tokens))
            elif is_wanted and verdict.refused_by is Limit.CONCURRENCY and now - ticket.since < SLOT_GRACE_S:
                part.waiting.append(ticket)
                continue
            elif is_wanted:
                ticket.state = TicketState.REFUSED
                ticket.verdict = verdict
            if is_wanted:
                decided.append(ticket)
        while part.waiting and part.fits(part.waiting[0].tokens):
            ticket = part.waiting.popleft()
            part.take(ticket)
            decided.append(ticket)
        return decided


def is_limited(tenant: Tenant) -> bool:
    return (tenant.rpm, tenant.tpm, tenant.max_concurrent) != (None, None, None)
