"""Tier, Tenant and the catalogue of both with their keys: who may ask for how much, and how soon.

One scale for all priorities: smaller levels are served sooner.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""Also safe in a header, a log line and a metric's label."""
Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class TenantError(Exception):
    """Tiers, tenants and keys that do not fit together; one line."""


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of service."""

    name: Name
    level: Annotated[int, msgspec.Meta(ge=0)]
    """Smaller = sooner; no two tiers share one."""
    ttft_target_ms: PositiveFloat | None = None
    """Promised time to the first token; None = no promise."""
    itl_target_ms: PositiveFloat | None = None
    """Promised gap between two tokens; None = what the engine's own setting says."""
    aging_s: PositiveFloat = 30.0
    """A waiting request counts as one level sooner per this many seconds."""
    max_queue: Positive = 1000
    """Requests that may wait in one router; further ones are refused."""
    queue_ttl_s: PositiveFloat = 120.0
    """A request that has waited for so long is refused."""


DEFAULT_TIERS: Final = (
    Tier(name="interactive", level=0, ttft_target_ms=2_000.0),
    Tier(name="standard", level=1, ttft_target_ms=10_000.0),
    Tier(name="batch", level=2, queue_ttl_s=600.0),
)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A customer: what it may use. None = without limit."""

    name: Name
    tier: Name
    weight: PositiveFloat = 1.0
    """Share of the service among the tenants of a tier that have work."""
    rpm: Positive | None = None
    """Requests per minute; as many may come at once after a quiet minute."""
    tpm: Positive | None = None
    """Tokens per minute, prompt and output together; likewise."""
    max_concurrent: Positive | None = None
    """Requests in progress at one time. A stream counts until it ends."""
    models: tuple[str, ...] | None = None
    """The models it may use; None = all."""
    cache: Literal["isolated", "shared"] = "isolated"
    """`isolated`: shares prefix blocks with nobody, so that no timing tells what others ask."""
    admin: bool = False
    """Its keys may watch the whole server on the live page, and start demo loads there."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as stored: enough to recognise it, not enough to use it."""

    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    tenant: Name
    hash: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """router.keys.hash_key of the whole key."""
    created_at: str
    """UTC, ISO 8601."""
    expires_at: float | None = None
    """Seconds since 1970; None = never."""


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """All tenants and keys at one moment."""

    version: str
    """Differs whenever anything else does."""
    tenants: tuple[Tenant, ...] = ()
    keys: tuple[KeyRecord, ...] = ()


def local_tenant(tiers: Iterable[Tier]) -> Tenant:
    """Return the tenant of everybody, for a server without keys: the soonest tier, no limits, admin."""
    return Tenant(name="local", tier=min(tiers, key=lambda tier: tier.level).name, cache="shared", admin=True)


def check_tiers(tiers: Iterable[Tier]) -> None:
    """Raise TenantError unless there is a tier and their names and levels are unique."""
    tiers = tuple(tiers)
    if not tiers:
        raise TenantError("at least one tier is needed")
    for field in ("name", "level"):
        value, count = Counter(getattr(tier, field) for tier in tiers).most_common(1)[0]
        if count > 1:
            raise TenantError(f"two tiers have the {field} {value}")


def check_tenants(tenants: Iterable[Tenant], tiers: Iterable[Tier]) -> None:
    """Raise TenantError unless names are unique and every tenant's tier exists."""
    known = {tier.name for tier in tiers}
    seen: set[str] = set()
    for tenant in tenants:
        if tenant.name in seen:
            raise TenantError(f"two tenants have the name {tenant.name}")
        seen.add(tenant.name)
        if tenant.tier not in known:
            raise TenantError(
                f"tenant {tenant.name}: there is no tier {tenant.tier}; known: {', '.join(sorted(known))}"
            )


def levels(tiers: Iterable[Tier]) -> Mapping[str, int]:
    """Return the level of every tier by name."""
    return {tier.name: tier.level for tier in tiers}
