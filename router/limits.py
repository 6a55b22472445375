"""What the HTTP side needs of the tenants' limits. Kept by router.quota_client, and absent in tests."""

from typing import Protocol

import msgspec

from router.http import Header
from router.tenants import Tenant


class Reservation(Protocol):
    """A request's share of its tenant's limits. Ends once, with either call; later calls do nothing."""

    def settle(self, used_tokens: int) -> None:
        """The request has ended; what it reserved and did not use serves others, and its slot."""
        ...

    def cancel(self) -> None:
        """The request was not served; it costs nothing."""
        ...


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may use, and has left, as far as this router knows. None = no limit."""

    name: str
    tier: str
    rpm: int | None
    requests_left: float | None
    tpm: int | None
    tokens_left: float | None
    max_concurrent: int | None


class Limits(Protocol):
    """Reserves for requests before they start."""

    async def reserve(self, tenant: Tenant, tokens: int) -> Reservation:
        """Reserve a request of at most `tokens` tokens, prompt and output. Raises ApiError 400, 429, 503."""
        ...

    def headers(self, tenant: Tenant) -> list[Header]:
        """Return the x-ratelimit headers of an answer; none for what the tenant has no limit of."""
        ...

    def in_use(self) -> list[TenantUse]:
        """Return the tenants that asked within the last minutes."""
        ...


class NoLimits:
    """Limits for a server without tenants."""

    async def reserve(self, tenant: Tenant, tokens: int) -> Reservation:  # noqa: ARG002 - a Limits
        return _Nothing()

    def headers(self, tenant: Tenant) -> list[Header]:  # noqa: ARG002 - a Limits
        return []

    def in_use(self) -> list[TenantUse]:
        return []


class _Nothing:
    def settle(self, used_tokens: int) -> None:
        """Nothing was reserved."""

    def cancel(self) -> None:
        """Nothing was reserved."""
