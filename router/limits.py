"""What the HTTP side needs of the tenants' limits. Kept by router.quota_client, and absent in tests."""

from typing import Protocol

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


class Limits(Protocol):
    """Reserves for requests before they start."""

    async def reserve(self, tenant: Tenant, tokens: int) -> Reservation:
        """Reserve a request of at most `tokens` tokens, prompt and output. Raises ApiError 400, 429, 503."""
        ...

    def headers(self, tenant: Tenant) -> list[Header]:
        """Return the x-ratelimit headers of an answer; none for what the tenant has no limit of."""
        ...


class NoLimits:
    """Limits for a server without tenants."""

    async def reserve(self, tenant: Tenant, tokens: int) -> Reservation:  # noqa: ARG002 - a Limits
        return _Nothing()

    def headers(self, tenant: Tenant) -> list[Header]:  # noqa: ARG002 - a Limits
        return []


class _Nothing:
    def settle(self, used_tokens: int) -> None:
        """Nothing was reserved."""

    def cancel(self) -> None:
        """Nothing was reserved."""
