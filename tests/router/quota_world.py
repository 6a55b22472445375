"""Routers' quotas and a ledger over a carrier that loses, repeats and delays, on a clock of the test's."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from router.ledger import SETTLE_S, Ledger
from router.quota import Quota
from router.quota_messages import (
    Answer,
    Exchange,
    Hello,
    Reply,
    Welcome,
    decode_answer,
    decode_request,
    encode,
)
from router.quota_slice import Ticket, TicketState
from router.rate_limit import PERIOD_S
from router.tenants import Catalogue, Tenant

Fate = Literal["arrives", "request lost", "reply lost", "repeated"]


def tenant(
    name: str = "acme", *, rpm: int | None = None, tpm: int | None = None, max_concurrent: int | None = None
) -> Tenant:
    return Tenant(name=name, tier="standard", rpm=rpm, tpm=tpm, max_concurrent=max_concurrent)


@dataclass(eq=False)
class Router:
    quota: Quota
    tickets: list[Ticket] = field(default_factory=list)
    """Granted and not yet ended."""


class QuotaWorld:
    """One tenant's limits, used by several routers. Counts what passes."""

    def __init__(self, limits: Tenant, num_routers: int) -> None:
        self.limits = limits
        self.now = 0.0
        self.passed_tokens = 0
        """Used or still reserved."""
        self.passed_requests = 0
        self.sent: list[Hello | Exchange] = []
        """Every message, so that it can come again, late."""
        self._numbers = itertools.count(1)
        self.ledger = self._new_ledger()
        self.routers = [self._new_router() for _ in range(num_routers)]

    def _new_ledger(self) -> Ledger:
        numbers = self._numbers
        ledger = Ledger(epoch=next(numbers), draw_session=lambda: next(numbers))
        ledger.replace_catalogue(Catalogue(version="1", tenants=(self.limits,)), self.now)
        return ledger

    def _new_router(self) -> Router:
        return Router(Quota(f"router {next(self._numbers)}"))

    def start(self) -> None:
        """Let every router say hello, and the ledger settle."""
        for router in self.routers:
            self.pump(router)
        self.now += SETTLE_S

    def reserve(self, router: Router, tokens: int) -> Ticket:
        ticket = router.quota.reserve(self.limits, tokens, self.now)
        if ticket.state is TicketState.GRANTED:
            self._passes(router, ticket)
        return ticket

    def _passes(self, router: Router, ticket: Ticket) -> None:
        router.tickets.append(ticket)
        self.passed_tokens += ticket.tokens
        self.passed_requests += 1

    def settle(self, router: Router, used: int) -> None:
        ticket = router.tickets.pop(0)
        self.passed_tokens -= ticket.tokens - used
        router.quota.settle(ticket, used)

    def cancel(self, router: Router) -> None:
        ticket = router.tickets.pop(0)
        self.passed_tokens -= ticket.tokens
        self.passed_requests -= 1
        router.quota.cancel(ticket)

    def pump(
        self, router: Router, fate: Fate = "arrives", service: Mapping[str, float] | None = None
    ) -> Mapping[str, float]:
        """One message of a router and its answer; returns the service that others charged."""
        if not router.quota.has_session:
            hello = router.quota.hello(self.now)
            welcome = self._carry(hello, fate)
            if isinstance(welcome, Welcome):
                router.quota.welcome(welcome, self.now)
            return {}
        message = router.quota.message(service or {}, self.now)
        if message is None:
            return {}
        reply = self._carry(message, fate)
        if reply is None:
            return {}
        if not isinstance(reply, Reply):
            router.quota.hello(self.now)
            return {}
        for ticket in router.quota.apply(reply, self.now):
            if ticket.state is TicketState.GRANTED:
                self._passes(router, ticket)
        return reply.service

    def repeat_late(self, index: int) -> None:
        """Deliver an old message again; nobody waits for the answer."""
        self._deliver(self.sent[index % len(self.sent)])

    def _deliver(self, message: Hello | Exchange) -> Answer:
        if isinstance(message, Hello):
            return self.ledger.hello(message, self.now)
        return self.ledger.exchange(message, self.now)

    def _carry(self, message: Hello | Exchange, fate: Fate) -> Answer | None:
        self.sent.append(message)
        if fate == "request lost":
            return None
        for _ in range(2 if fate == "repeated" else 1):
            request = decode_request(encode(message))
            assert isinstance(request, Hello | Exchange)
            answer = self._deliver(request)
        return None if fate == "reply lost" else decode_answer(encode(answer))

    def advance(self, seconds: float) -> None:
        """Let time pass; routers give signs of life."""
        while seconds > 0:
            step = min(seconds, 1.0)
            self.now += step
            seconds -= step
            for router in self.routers:
                self.pump(router)

    def kill_router(self, index: int) -> None:
        """It dies with its streams; another takes its place."""
        self.routers[index] = self._new_router()
        self.pump(self.routers[index])

    def restart_ledger(self) -> None:
        """All that live say hello to the new one while it settles."""
        self.ledger = self._new_ledger()
        for router in self.routers:
            router.quota.hello(self.now)
            self.pump(router)

    def change_limits(self, limits: Tenant) -> None:
        """Reload the catalogue, everywhere at once."""
        self.limits = limits
        self.ledger.replace_catalogue(Catalogue(version="2", tenants=(limits,)), self.now)

    def left_tokens(self) -> float:
        left = self.ledger.left(self.limits.name, self.now)
        assert left is not None
        return left.tokens

    def allowed_tokens(self) -> float:
        assert self.limits.tpm is not None
        return self.limits.tpm * (1 + self.now / PERIOD_S)
