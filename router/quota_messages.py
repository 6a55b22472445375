"""The contract between a router and the ledger: everything that crosses the wire, and nothing else.

Stop and wait: a router has one numbered exchange under way and sends the same bytes again until it is
answered; the ledger answers a repeated number with the answer it gave. So every exchange happens once,
whatever the carrier loses, repeats or delays. A ledger that does not know the session (it restarted, or
gave the router up) says so, and the router begins again with a Hello that tells what it holds.
"""

import enum

import msgspec

from router.tenants import Catalogue


class Limit(enum.StrEnum):
    """What a tenant can run out of."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


class Amounts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """So much of each limit; zero where the tenant has no such limit."""

    requests: int = 0
    tokens: int = 0
    slots: int = 0


class Levels(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the ledger has left for a tenant; zero where it has no such limit."""

    requests: float = 0.0
    tokens: float = 0.0
    slots: int = 0


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A router begins a session."""

    router: str
    """Unique to a router process."""
    number: int
    """1, 2, 3, ... of this router: a late repeat must not end the session of a later one."""
    epoch: int = 0
    """The ledger it knew last; 0 = none."""
    slots: dict[str, int] = {}
    """Per tenant the slots it holds, used or not."""
    remembered: dict[str, Levels] = {}
    """Per tenant the levels it was told last."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The session of a Hello."""

    epoch: int
    session: int
    ready_in_s: float
    """The ledger grants nothing before: it may have restarted and must hear from the other routers."""
    catalogue_version: str


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """What a router returns of a tenant's slice and what it wants."""

    tenant: str
    returned: Amounts
    needs: tuple[int, ...] = ()
    """Tokens of each waiting request; each also takes one request and one slot."""
    prefetch: Amounts = Amounts()
    """For requests to come."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True, tag="exchange"):
    """A router's report; also the sign that it lives."""

    session: int
    number: int
    """1, 2, 3, ... within the session."""
    asks: tuple[Ask, ...] = ()
    service: dict[str, float] = {}
    """Per counter (router.service_tally) the service charged here since the last exchange."""


class Verdict(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer to one need."""

    refused_by: Limit | None = None
    """None = granted."""
    wait_s: float = 0.0
    """When refused: until it would fit."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an Ask."""

    tenant: str
    verdicts: tuple[Verdict, ...]
    """In the order of the needs."""
    prefetched: Amounts
    left: Levels


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to an Exchange."""

    session: int
    number: int
    num_routers: int
    shares: tuple[Share, ...]
    service: dict[str, float]
    """Per counter the service that other routers charged since the last reply."""
    catalogue_version: str


class UnknownSession(msgspec.Struct, frozen=True, kw_only=True, tag="unknown"):
    """The answer to an Exchange of a session that is no more."""

    session: int


class CatalogueQuery(msgspec.Struct, frozen=True, kw_only=True, tag="catalogue"):
    """Ask for the catalogue; the answer is a Catalogue."""


Request = Hello | Exchange | CatalogueQuery
Answer = Welcome | Reply | UnknownSession

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_CATALOGUES = msgspec.msgpack.Decoder(Catalogue)


def encode(message: Request | Answer | Catalogue) -> bytes:
    return _ENCODER.encode(message)


def decode_request(data: bytes) -> Request:
    return _REQUESTS.decode(data)


def decode_answer(data: bytes) -> Answer:
    return _ANSWERS.decode(data)


def decode_catalogue(data: bytes) -> Catalogue:
    return _CATALOGUES.decode(data)
