"""QuotaClient: keeps a router's Quota in step with the ledger, and reserves for requests."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from router.errors import ApiError
from router.http import Header
from router.limits import TenantUse
from router.quota import Quota
from router.quota_messages import (
    CatalogueQuery,
    Hello,
    Limit,
    Reply,
    Request,
    Welcome,
    decode_answer,
    decode_catalogue,
    encode,
)
from router.quota_slice import Ticket, TicketState
from router.rate_limit import PERIOD_S, retry_after_s
from router.tenants import Catalogue, Tenant

TICK_S: Final = 0.1
"""Reports and returns go at least so often; needs go at once."""
CALL_TIMEOUT_S: Final = 1.0
CATALOGUE_TIMEOUT_S: Final = 10.0
"""It has some 150 bytes per tenant and key."""
RETRY_S: Final = 0.1
PATIENCE_S: Final = 2.0
"""Longest wait of a request for the ledger."""
_log: Final = logging.getLogger(__name__)


class LedgerGoneError(Exception):
    """The ledger cannot be reached now, or died during the call."""


class LedgerLink(Protocol):
    """Carries encoded messages (router/quota_messages.py) to the ledger."""

    async def call(self, message: bytes) -> bytes:
        """Raises LedgerGoneError."""
        ...


class ServiceCounters(Protocol):
    """Whoever keeps the fairness counters of this router."""

    def take_charges(self) -> Mapping[str, float]:
        """Return the service charged here since the last call, by counter."""
        ...

    def add_charges(self, charges: Mapping[str, float]) -> None:
        """Count service that other routers charged."""
        ...


class QuotaReservation:
    """A Reservation against the quota."""

    def __init__(self, quota: Quota, ticket: Ticket) -> None:
        self._quota = quota
        self._ticket = ticket

    def settle(self, used_tokens: int) -> None:
        self._quota.settle(self._ticket, used_tokens)

    def cancel(self) -> None:
        self._quota.cancel(self._ticket)


class QuotaClient:
    """The Limits of a router: reserves against its slices and renews them. One event loop."""

    def __init__(
        self,
        link: LedgerLink,
        quota: Quota,
        *,
        clock: Callable[[], float],
        uniform: Callable[[float, float], float],
        catalogue_changed: Callable[[Catalogue], None],
        service: ServiceCounters | None = None,
    ) -> None:
        """`clock` is monotonic, in seconds. `catalogue_changed` gets the first catalogue too."""
        self._link = link
        self._quota = quota
        self._clock = clock
        self._uniform = uniform
        self._catalogue_changed = catalogue_changed
        self._service = service
        self._version: str | None = None
        self._wake = asyncio.Event()
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._is_down = False

    @property
    def is_down(self) -> bool:
        """The ledger does not answer: limited tenants are served from what this router holds."""
        return self._is_down

    async def run(self) -> None:
        """Exchange with the ledger for ever. For a task without a Serve request in its context."""
        while True:
            try:
                await self._turn()
            except (LedgerGoneError, TimeoutError, msgspec.DecodeError) as error:
                self._note_down(error)
                await asyncio.sleep(RETRY_S)

    async def reserve(self, tenant: Tenant, tokens: int) -> QuotaReservation:
        if tenant.tpm is not None and tokens > tenant.tpm:
            raise _never_fits(tokens, tenant.tpm)
        ticket = self._quota.reserve(tenant, tokens, self._clock())
        if ticket.state is TicketState.WAITING:
            await self._decision(ticket)
        if ticket.state is TicketState.REFUSED:
            raise self._refusal(ticket)
        return QuotaReservation(self._quota, ticket)

    def headers(self, tenant: Tenant) -> list[Header]:
        remaining = self._quota.remaining(tenant, self._clock())
        headers: list[Header] = []
        for name, limit, left in (
            (b"requests", tenant.rpm, remaining.requests),
            (b"tokens", tenant.tpm, remaining.tokens),
        ):
            if limit is not None:
                reset_s = (limit - left) / limit * PERIOD_S
                headers += [
                    (b"x-ratelimit-limit-" + name, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(0, int(left))),
                    (b"x-ratelimit-reset-" + name, _duration(reset_s).encode()),
                ]
        return headers

    def in_use(self) -> list[TenantUse]:
        return [self._use(tenant) for tenant in self._quota.tenants()]

    def _use(self, tenant: Tenant) -> TenantUse:
        remaining = self._quota.remaining(tenant, self._clock())
        return TenantUse(
            name=tenant.name,
            tier=tenant.tier,
            rpm=tenant.rpm,
            requests_left=None if tenant.rpm is None else max(0.0, remaining.requests),
            tpm=tenant.tpm,
            tokens_left=None if tenant.tpm is None else max(0.0, remaining.tokens),
            max_concurrent=tenant.max_concurrent,
        )

    async def _turn(self) -> None:
        if not self._quota.has_session:
            await self._greet()
        await self._wait()
        charges = self._service.take_charges() if self._service else {}
        message = self._quota.message(charges, self._clock())
        if message is None:
            return
        answer = decode_answer(await self._call(message))
        if not isinstance(answer, Reply):
            await self._greet()
            return
        for ticket in self._quota.apply(answer, self._clock()):
            if waiting := self._waiting.pop(ticket, None):
                waiting.set_result(None)
        if self._service and answer.service:
            self._service.add_charges(answer.service)
        if answer.catalogue_version != self._version:
            await self._read_catalogue()
            # Limits that came or went: the session counts slots only of tenants that had a limit.
            await self._greet()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    async def _greet(self) -> None:
        hello: Hello = self._quota.hello(self._clock())
        answer = decode_answer(await self._call(hello))
        assert isinstance(answer, Welcome), type(answer)
        self._quota.welcome(answer, self._clock())
        if answer.catalogue_version != self._version:
            await self._read_catalogue()

    async def _read_catalogue(self) -> None:
        catalogue = decode_catalogue(await self._call(CatalogueQuery()))
        self._catalogue_changed(catalogue)
        self._version = catalogue.version

    async def _call(self, message: Request) -> bytes:
        timeout_s = CATALOGUE_TIMEOUT_S if isinstance(message, CatalogueQuery) else CALL_TIMEOUT_S
        async with asyncio.timeout(timeout_s):
            answer = await self._link.call(encode(message))
        if self._is_down:
            self._is_down = False
            _log.warning("the ledger answers again")
        return answer

    def _note_down(self, error: BaseException) -> None:
        if not self._is_down:
            self._is_down = True
            reason = str(error) or type(error).__name__
            _log.warning("the ledger does not answer (%s): serving from the quota held here", reason)

    async def _decision(self, ticket: Ticket) -> None:
        """Wait until the ledger has decided. Raises ApiError 503 when it does not."""
        decided = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._wake.set()
        try:
            async with asyncio.timeout(0 if self._is_down else PATIENCE_S):
                await decided
        except TimeoutError:
            self._quota.cancel(ticket)
            raise self._unavailable() from None
        except asyncio.CancelledError:
            self._quota.cancel(ticket)
            raise
        finally:
            self._waiting.pop(ticket, None)

    def _unavailable(self) -> ApiError:
        return ApiError(
            503,
            "the quota of this key cannot be checked now",
            type="server_error",
            code="quota_unavailable",
            retry_after_s=retry_after_s(PATIENCE_S, self._uniform),
        )

    def _refusal(self, ticket: Ticket) -> ApiError:
        verdict = ticket.verdict
        assert verdict is not None
        assert verdict.refused_by is not None
        return ApiError(
            429,
            _REASONS[verdict.refused_by](ticket),
            type="rate_limit_exceeded",
            code="rate_limit_exceeded",
            retry_after_s=retry_after_s(verdict.wait_s, self._uniform),
        )


_REASONS: Final[Mapping[Limit, Callable[[Ticket], str]]] = {
    Limit.REQUESTS: lambda ticket: f"rate limit reached: {ticket.tenant.rpm} requests per minute",
    Limit.TOKENS: lambda ticket: (
        f"rate limit reached: {ticket.tenant.tpm} tokens per minute; this request may use {ticket.tokens}"
    ),
    Limit.CONCURRENCY: lambda ticket: (
        f"rate limit reached: {ticket.tenant.max_concurrent} requests at one time"
    ),
}


def _never_fits(tokens: int, tpm: int) -> ApiError:
    return ApiError(
        400,
        f"this request may use {tokens} tokens (prompt and longest answer), which is more than the {tpm} "
        "tokens per minute of this key; shorten the prompt or set a smaller max_tokens",
        code="request_exceeds_limit",
    )


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    ms = max(0, math.ceil(seconds * 1000))
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    return f"{ms // 60_000}m{ms % 60_000 / 1000:g}s"
