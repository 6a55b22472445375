"""Quota: a router's slices of the tenants' limits, and the requests that wait for more. Pure.

The common path touches the slice alone. A request that does not fit waits for the next exchange with the
ledger; one that the ledger refuses is refused. Slices follow the use of the last second, and what is no
longer used goes back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from router.quota_messages import Amounts, Ask, Exchange, Hello, Levels, Reply, Share, Welcome
from router.quota_slice import Slice, Ticket, TicketState
from router.tenants import Tenant

HEARTBEAT_S: Final = 0.5
SWEEP_S: Final = 5.0


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
        self._slices: dict[str, Slice] = {}
        self._active: dict[str, Slice] = {}
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

    def tenants(self) -> list[Tenant]:
        """Those that asked within the last minutes."""
        return [part.tenant for part in self._slices.values()]

    def reserve(self, tenant: Tenant, tokens: int, now: float) -> Ticket:
        """Reserve a request of at most `tokens` tokens; the ticket may have to wait for an exchange."""
        ticket = Ticket(tenant, tokens, now)
        if not is_limited(tenant):
            ticket.state = TicketState.GRANTED
            return ticket
        part = self._slices.get(tenant.name)
        if part is None:
            full = Levels(tenant.rpm or 0, tenant.tpm or 0, tenant.max_concurrent or 0)
            part = self._slices[tenant.name] = Slice(tenant, now, full, now)
        part.tenant = tenant
        self._active[tenant.name] = part
        if not part.waiting and part.fits(ticket):
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
        else:
            ticket.state = TicketState.CLOSED

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

    def _take_share(self, part: Slice, share: Share, now: float) -> list[Ticket]:
        asked, part.asked = part.asked, []
        part.left = share.left
        part.told_at = now
        part.requests.idle += share.prefetched.requests
        part.tokens.idle += share.prefetched.tokens
        decided: list[Ticket] = []
        for ticket, verdict in zip(asked, share.verdicts, strict=True):
            if part.decide(ticket, verdict, now):
                decided.append(ticket)
        while (fitting := part.next_waiting()) is not None and part.fits(fitting):
            part.waiting.popleft()
            part.take(fitting)
            decided.append(fitting)
        return decided


def is_limited(tenant: Tenant) -> bool:
    return (tenant.rpm, tenant.tpm, tenant.max_concurrent) != (None, None, None)
