"""Who asks: from request headers to a Caller."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from router.errors import ApiError, bad_value
from router.keys import bearer, key_id, matches, unauthorized
from router.tenants import DEFAULT_TIERS, Catalogue, KeyRecord, Tenant, Tier, levels, local_tenant

NOT_READY_RETRY_AFTER_S: Final = 2
LOCAL_TENANT: Final = local_tenant(DEFAULT_TIERS)
DEFAULT_LEVELS: Final = frozenset(levels(DEFAULT_TIERS).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a request may do, derived from its headers alone."""

    tier: int = 0
    """Level of its tier; smaller = sooner."""
    cache_salt: str = ""
    """Prefix blocks are shared only between callers of equal salt."""
    tenant: Tenant = LOCAL_TENANT
    key_id: str = ""
    """The public part of its key."""
    levels: Collection[int] = DEFAULT_LEVELS
    """Of all tiers there are."""

    def level_for(self, priority: int | None) -> int:
        """Return the level at which a request runs that names this one: never a sooner one than its tier's.

        Raises ApiError 400 when no tier has it.
        """
        if priority is None:
            return self.tier
        if priority not in self.levels:
            known = ", ".join(map(str, sorted(self.levels)))
            raise bad_value("priority", f"priority must be the level of a tier: {known}")
        return max(self.tier, priority)

    def may_use(self, model: str) -> bool:
        return self.tenant.models is None or model in self.tenant.models


Identify = Callable[[Mapping[bytes, bytes]], Caller]
"""Request headers (lower-case names) -> caller. Raises ApiError 401, 403 or 503."""


def check_use(caller: Caller, model: str) -> None:
    """Raise ApiError 403 unless the caller may use the served model of this name."""
    if not caller.may_use(model):
        raise ApiError(403, "this key has no access to this model", param="model", code="model_not_found")


def check_admin(caller: Caller) -> None:
    """Raise ApiError 403 unless the caller may see and do what concerns the whole server."""
    if not caller.tenant.admin:
        raise ApiError(
            403, "this needs the key of a tenant that is marked `admin: true`", code="admin_required"
        )


def anybody(headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG001 - an Identify
    """Accept every request."""
    return Caller()


def everybody(tiers: Sequence[Tier]) -> Identify:
    """Return the Identify of a server without keys: one tenant, the soonest tier."""
    tenant = local_tenant(tiers)
    known = levels(tiers)
    caller = Caller(tier=known[tenant.tier], tenant=tenant, levels=frozenset(known.values()))
    return lambda _headers: caller


class KeyedCallers:
    """An Identify over the current catalogue. One event loop."""

    def __init__(self, tiers: Iterable[Tier], pepper: bytes, now: Callable[[], float]) -> None:
        """`now`: seconds since 1970, for keys that expire."""
        self._levels = levels(tiers)
        self._pepper = pepper
        self._now = now
        self._keys: dict[str, KeyRecord] = {}
        self._tenants: dict[str, Tenant] | None = None

    def replace(self, catalogue: Catalogue) -> None:
        """Take a new catalogue, whole: requests that run keep the tenant they began with."""
        self._keys = {record.id: record for record in catalogue.keys}
        self._tenants = {tenant.name: tenant for tenant in catalogue.tenants}

    def __call__(self, headers: Mapping[bytes, bytes]) -> Caller:
        if self._tenants is None:
            raise ApiError(
                503,
                "the server does not know its keys yet",
                type="server_error",
                code="not_ready",
                retry_after_s=NOT_READY_RETRY_AFTER_S,
            )
        key = bearer(headers)
        if key is None:
            raise unauthorized("a key is needed: send the header 'Authorization: Bearer KEY'")
        record = self._keys.get(key_id(key) or "")
        # The same work for an unknown id as for a wrong secret.
        is_right = matches(key, record.hash if record else "0" * 64, self._pepper)
        if record is None or not is_right or self._has_expired(record):
            raise unauthorized("the key is not valid")
        tenant = self._tenants.get(record.tenant)
        if tenant is None:
            raise ApiError(403, "the key belongs to no tenant of this server", code="tenant_not_found")
        return self._caller(tenant, record.id)

    def _has_expired(self, record: KeyRecord) -> bool:
        return record.expires_at is not None and self._now() >= record.expires_at

    def _caller(self, tenant: Tenant, key: str) -> Caller:
        # Tenant names cannot be empty: no salt of a tenant is the shared one.
        salt = "" if tenant.cache == "shared" else tenant.name
        return Caller(
            tier=self._levels[tenant.tier],
            cache_salt=salt,
            tenant=tenant,
            key_id=key,
            levels=self._levels.values(),
        )
