"""Ledger: the one owner of every tenant's limits, of which the routers lease slices. Pure.

What a router may spend has been taken from the bucket before, so nothing is ever granted twice. A router
that dies takes its slice with it: too little passes until the bucket has refilled, never too much. Slots
of a router that is silent for ROUTER_TTL_S are free again.

A ledger that restarts remembers nothing. It waits SETTLE_S for the routers, and begins every tenant at
the lowest level that any of them was told. Overshoot is then possible only where a router is lost
together with the ledger, or is cut off for longer than SETTLE_S: at most what that router took since the
others were told.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from router.quota_messages import (
    Amounts,
    Ask,
    CatalogueQuery,
    Exchange,
    Hello,
    Levels,
    Limit,
    Reply,
    Share,
    UnknownSession,
    Verdict,
    Welcome,
    decode_request,
    encode,
)
from router.rate_limit import CONCURRENCY_RETRY_S, TokenBucket
from router.tenants import Catalogue, Tenant

ROUTER_TTL_S: Final = 10.0
SETTLE_S: Final = 2.0
"""Longer than a router takes to notice a new ledger: a heartbeat and a call's timeout."""
SWEEP_S: Final = 5.0


@dataclass(slots=True)
class _Account:
    """One tenant's limits; a full account without held slots equals a new one."""

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    max_concurrent: int | None = None
    slots_held: int = 0

    def adopt(self, tenant: Tenant, now: float) -> None:
        self.requests = _resized(self.requests, tenant.rpm, now)
        self.tokens = _resized(self.tokens, tenant.tpm, now)
        self.max_concurrent = tenant.max_concurrent

    def recall(self, levels: Levels) -> None:
        """Go down to what a router was told by an earlier ledger."""
        if self.requests is not None:
            self.requests.level = min(self.requests.level, levels.requests)
        if self.tokens is not None:
            self.tokens.level = min(self.tokens.level, levels.tokens)

    @property
    def slots_free(self) -> int:
        return 0 if self.max_concurrent is None else max(0, self.max_concurrent - self.slots_held)

    def judge(self, tokens: int, now: float) -> Verdict:
        """Take a request of so many tokens, or say what it must wait for."""
        wait_requests = self.requests.wait_s(1, now) if self.requests else 0.0
        wait_tokens = self.tokens.wait_s(tokens, now) if self.tokens else 0.0
        if max(wait_requests, wait_tokens) > 0.0:
            limit = Limit.REQUESTS if wait_requests >= wait_tokens else Limit.TOKENS
            # A need that can never fit is refused by the router; a limit may have sunk since it asked.
            wait_s = min(max(wait_requests, wait_tokens), 3600.0)
            return Verdict(limit, wait_s)
        if self.max_concurrent is not None:
            if not self.slots_free:
                return Verdict(Limit.CONCURRENCY, CONCURRENCY_RETRY_S)
            self.slots_held += 1
        if self.requests:
            self.requests.take(1, now)
        if self.tokens:
            self.tokens.take(tokens, now)
        return Verdict()

    def give(self, amounts: Amounts) -> None:
        if self.requests:
            self.requests.give(amounts.requests)
        if self.tokens:
            self.tokens.give(amounts.tokens)

    def prefetch(self, wanted: Amounts, num_routers: int, now: float) -> Amounts:
        """Take what is wanted, but leave enough that no router runs dry because of another's stock."""
        return Amounts(
            _take_share(self.requests, wanted.requests, num_routers, now),
            _take_share(self.tokens, wanted.tokens, num_routers, now),
        )

    def left(self, now: float) -> Levels:
        return Levels(
            self.requests.advance(now) if self.requests else 0.0,
            self.tokens.advance(now) if self.tokens else 0.0,
            self.slots_free,
        )

    def is_fresh(self, now: float) -> bool:
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.slots_held and all(bucket.advance(now) >= bucket.capacity for bucket in buckets)


@dataclass(slots=True)
class _Session:
    hello: Hello
    welcome: Welcome
    seen_at: float
    number: int = 0
    reply: Reply | None = None
    slots: dict[str, int] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    """What other routers charged and this one has not been told."""


class Ledger:
    """All accounts, and the sessions of the routers. Not for concurrent use."""

    def __init__(self, epoch: int, draw_session: Callable[[], int]) -> None:
        """`epoch` tells this ledger from earlier ones; `draw_session` never repeats itself."""
        self._epoch = epoch
        self._draw_session = draw_session
        self._tenants: dict[str, Tenant] = {}
        self._version = ""
        self._accounts: dict[str, _Account] = {}
        self._sessions: dict[int, _Session] = {}
        self._ready_at: float | None = None
        self._swept_at = -math.inf

    @property
    def num_routers(self) -> int:
        return len(self._sessions)

    @property
    def num_accounts(self) -> int:
        """Tenants that used something within the last minutes."""
        return len(self._accounts)

    def active_tenants(self) -> Iterator[Tenant]:
        """Yield the tenants that used something within the last minutes."""
        return (self._tenants[name] for name in self._accounts)

    def left(self, tenant: str, now: float) -> Levels | None:
        """What nobody has leased of a tenant's limits; None for an unknown tenant."""
        account = self._account(tenant, now)
        return None if account is None else account.left(now)

    def replace_catalogue(self, catalogue: Catalogue, now: float) -> None:
        """Take new tenants and limits; what was used stays used."""
        self._version = catalogue.version
        self._tenants = {tenant.name: tenant for tenant in catalogue.tenants}
        for name in list(self._accounts):
            if name in self._tenants:
                self._accounts[name].adopt(self._tenants[name], now)
            else:
                del self._accounts[name]
                for session in self._sessions.values():
                    session.slots.pop(name, None)

    def hello(self, message: Hello, now: float) -> Welcome:
        """Open a session; ends an earlier one of the same router. A repeat gets the same answer."""
        self._sweep(now)
        for key, earlier in list(self._sessions.items()):
            if earlier.hello.router == message.router:
                if earlier.hello.number >= message.number:
                    return earlier.welcome
                self._end(key)
        if self._ready_at is None:
            self._ready_at = now + SETTLE_S
        if message.epoch not in (0, self._epoch):
            for name, levels in message.remembered.items():
                if account := self._account(name, now):
                    account.recall(levels)
        welcome = Welcome(
            epoch=self._epoch,
            session=self._draw_session(),
            ready_in_s=max(0.0, self._ready_at - now),
            catalogue_version=self._version,
        )
        session = self._sessions[welcome.session] = _Session(message, welcome, now)
        for name, held in message.slots.items():
            if account := self._account(name, now):
                account.slots_held += _note_slots(session, name, held)
        return welcome

    def exchange(self, message: Exchange, now: float) -> Reply | UnknownSession:
        """Book what a router reports and grant what it may have; a repeat gets the same answer."""
        self._sweep(now)
        session = self._sessions.get(message.session)
        if session is None:
            return UnknownSession(session=message.session)
        session.seen_at = now
        if session.reply is not None and message.number <= session.number:
            return session.reply
        session.number = message.number
        self._spread(message.service, but=session)
        told, session.service = session.service, {}
        session.reply = Reply(
            session=message.session,
            number=message.number,
            num_routers=len(self._sessions),
            shares=tuple(self._share(session, ask, now) for ask in message.asks),
            service=told,
            catalogue_version=self._version,
        )
        return session.reply

    def _share(self, session: _Session, ask: Ask, now: float) -> Share:
        account = self._account(ask.tenant, now)
        if account is None:  # gone from the catalogue; the router will know in a moment
            refused = (Verdict(Limit.REQUESTS, 1.0),) * len(ask.needs)
            return Share(ask.tenant, refused, Amounts(), Levels())
        account.give(ask.returned)
        account.slots_held += _note_slots(session, ask.tenant, -ask.returned.slots)
        if self._ready_at is not None and now < self._ready_at:
            refused = (Verdict(Limit.REQUESTS, self._ready_at - now),) * len(ask.needs)
            return Share(ask.tenant, refused, Amounts(), account.left(now))
        before = account.slots_held
        verdicts = tuple(account.judge(tokens, now) for tokens in ask.needs)
        _note_slots(session, ask.tenant, account.slots_held - before)
        prefetched = account.prefetch(ask.prefetch, len(self._sessions), now)
        return Share(ask.tenant, verdicts, prefetched, account.left(now))

    def _spread(self, service: dict[str, float], but: _Session) -> None:
        for session in self._sessions.values():
            if session is not but:
                for name, charged in service.items():
                    session.service[name] = session.service.get(name, 0.0) + charged

    def _account(self, name: str, now: float) -> _Account | None:
        """The account of a tenant; None if the catalogue has no such tenant."""
        account = self._accounts.get(name)
        if account is None and name in self._tenants:
            account = self._accounts[name] = _Account()
            account.adopt(self._tenants[name], now)
        return account

    def _sweep(self, now: float) -> None:
        """Give up silent routers, and forget accounts that equal new ones."""
        if 0.0 <= now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for key in [k for k, s in self._sessions.items() if now - s.seen_at > ROUTER_TTL_S]:
            self._end(key)
        self._accounts = {n: account for n, account in self._accounts.items() if not account.is_fresh(now)}

    def _end(self, key: int) -> None:
        for name, held in self._sessions.pop(key).slots.items():
            if name in self._accounts:
                self._accounts[name].slots_held -= held


def answer(ledger: Ledger, catalogue: Catalogue, message: bytes, now: float) -> bytes:
    """Take an encoded Request of router/quota_messages.py, return the encoded answer."""
    request = decode_request(message)
    match request:
        case CatalogueQuery():
            return encode(catalogue)
        case Hello():
            return encode(ledger.hello(request, now))
        case Exchange():
            return encode(ledger.exchange(request, now))


def _note_slots(session: _Session, name: str, change: int) -> int:
    """Change what a session holds, to no less than nothing; returns the true change."""
    held = session.slots.get(name, 0)
    after = max(0, held + change)
    if after:
        session.slots[name] = after
    else:
        session.slots.pop(name, None)
    return after - held


def _resized(bucket: TokenBucket | None, limit: int | None, now: float) -> TokenBucket | None:
    if limit is None:
        return None
    if bucket is None:
        return TokenBucket.full(limit, now)
    bucket.advance(now)
    bucket.resize(limit)
    return bucket


def _take_share(bucket: TokenBucket | None, wanted: int, num_routers: int, now: float) -> int:
    if bucket is None or wanted <= 0:
        return 0
    taken = min(wanted, int(bucket.advance(now) / (2 * num_routers)))
    return taken if taken > 0 and bucket.take(taken, now) else 0
