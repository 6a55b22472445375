"""Keys: who is let in, who is not, and what the refusals give away."""

import pytest

from router.callers import Caller, KeyedCallers, check_use, everybody
from router.errors import ApiError
from router.keys import format_key, hash_key, key_id, matches, pepper_check, refuse_key_in_query
from router.tenants import (
    DEFAULT_TIERS,
    Catalogue,
    KeyRecord,
    Tenant,
    TenantError,
    Tier,
    check_tenants,
    check_tiers,
)

PEPPER = b"a pepper of the tests"
KEY = format_key("0123456789ab", "s" * 43)
ACME = Tenant(name="acme", tier="standard", models=("tiny",))


def record(key: str = KEY, tenant: str = "acme", expires_at: float | None = None) -> KeyRecord:
    found = key_id(key)
    assert found is not None
    return KeyRecord(
        id=found, tenant=tenant, hash=hash_key(key, PEPPER), created_at="2026-01-01", expires_at=expires_at
    )


def callers(*keys: KeyRecord, tenants: tuple[Tenant, ...] = (ACME,)) -> KeyedCallers:
    known = KeyedCallers(DEFAULT_TIERS, PEPPER, lambda: 100.0)
    known.replace(Catalogue(version="1", tenants=tenants, keys=keys or (record(),)))
    return known


def refusal(known: KeyedCallers, header: bytes | None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        known({} if header is None else {b"authorization": header})
    return caught.value


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def test_a_key_leads_to_its_tenant_tier_and_cache() -> None:
    caller = callers()(bearer(KEY))
    assert (caller.tenant, caller.key_id, caller.tier, caller.cache_salt) == (ACME, "0123456789ab", 1, "acme")


def test_a_shared_cache_has_no_salt() -> None:
    shared = Tenant(name="acme", tier="batch", cache="shared")
    caller = callers(tenants=(shared,))(bearer(KEY))
    assert (caller.tier, caller.cache_salt) == (2, "")


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic dXNlcjpwYXNz",
        b"Bearer " + format_key("0123456789ab", "t" * 43).encode(),
        b"Bearer " + format_key("ba9876543210", "s" * 43).encode(),
        b"Bearer " + KEY.encode() + b"x",
        b"Bearer " + KEY.encode() + b"\r\nX-Tenant: acme",
        b"Bearer " + KEY.encode() + b" " + KEY.encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + b"hw_" * 10_000,
        b"Bearer hw_0123456789ab_",
    ],
)
def test_anything_else_is_a_401(header: bytes | None) -> None:
    error = refusal(callers(), header)
    assert (error.status, error.code, error.type) == (401, "invalid_api_key", "invalid_request_error")
    assert KEY not in error.message


def test_a_wrong_secret_and_an_unknown_key_are_told_alike() -> None:
    wrong = refusal(callers(), b"Bearer " + format_key("0123456789ab", "t" * 43).encode())
    unknown = refusal(callers(), b"Bearer " + format_key("ba9876543210", "s" * 43).encode())
    assert wrong.message == unknown.message


def test_a_key_ends_at_its_time() -> None:
    assert callers(record(expires_at=100.5))(bearer(KEY)).tenant == ACME
    assert refusal(callers(record(expires_at=100.0)), b"Bearer " + KEY.encode()).status == 401


def test_a_key_without_a_tenant_is_a_403() -> None:
    assert refusal(callers(record(tenant="gone")), b"Bearer " + KEY.encode()).status == 403


def test_before_the_first_catalogue_nobody_is_let_in() -> None:
    error = refusal(KeyedCallers(DEFAULT_TIERS, PEPPER, lambda: 0.0), b"Bearer " + KEY.encode())
    assert (error.status, error.retry_after_s) == (503, 2)


def test_a_new_catalogue_replaces_the_old_one() -> None:
    known = callers()
    known.replace(Catalogue(version="2", tenants=(ACME,)))
    assert refusal(known, b"Bearer " + KEY.encode()).status == 401


def test_a_hundred_thousand_tenants_cost_a_lookup_nothing() -> None:
    tenants = tuple(Tenant(name=f"t{i}", tier="batch") for i in range(100_000))
    assert callers(record(tenant="t99999"), tenants=tenants)(bearer(KEY)).tenant.name == "t99999"


def test_a_model_that_the_tenant_may_not_use_is_a_403() -> None:
    check_use(Caller(tenant=ACME), "tiny")
    with pytest.raises(ApiError) as caught:
        check_use(Caller(tenant=ACME), "huge")
    assert (caught.value.status, caught.value.code, caught.value.param) == (403, "model_not_found", "model")


def test_without_keys_everybody_is_one_tenant_of_the_soonest_tier() -> None:
    tiers = (Tier(name="slow", level=7), Tier(name="fast", level=3))
    caller = everybody(tiers)({})
    assert (caller.tier, caller.tenant.name, caller.tenant.tier) == (3, "local", "fast")


def test_a_priority_is_the_level_of_a_tier_and_only_lowers() -> None:
    caller = callers()(bearer(KEY))
    assert [caller.level_for(priority) for priority in (None, 0, 1, 2)] == [1, 1, 1, 2]
    with pytest.raises(ApiError, match="0, 1, 2"):
        caller.level_for(3)


def test_another_pepper_makes_another_hash() -> None:
    assert matches(KEY, hash_key(KEY, PEPPER), PEPPER)
    assert not matches(KEY, hash_key(KEY, PEPPER), b"another pepper of the tests")
    assert pepper_check(PEPPER) != pepper_check(b"another pepper of the tests")


@pytest.mark.parametrize(
    "query",
    [
        b"api_key=x",
        b"key=1",
        b"a=b&access_token=",
        b"Authorization=Bearer%20x",
        b"q=" + KEY.encode(),
        b"API-KEY",
    ],
)
def test_a_key_in_the_url_is_refused(query: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        refuse_key_in_query(query)
    assert (caught.value.status, caught.value.code) == (400, "key_in_url")
    assert KEY not in caught.value.message


@pytest.mark.parametrize("query", [b"", b"limit=10&after=model", b"monkey=1", b"%ff=%fe"])
def test_other_queries_are_let_through(query: bytes) -> None:
    refuse_key_in_query(query)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ((), "at least one tier is needed"),
        ((Tier(name="a", level=0), Tier(name="a", level=1)), "two tiers have the name a"),
        ((Tier(name="a", level=4), Tier(name="b", level=4)), "two tiers have the level 4"),
    ],
)
def test_tiers_that_do_not_fit_together_are_refused(tiers: tuple[Tier, ...], message: str) -> None:
    with pytest.raises(TenantError, match=message):
        check_tiers(tiers)


def test_tenants_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TenantError, match="two tenants have the name acme"):
        check_tenants((ACME, ACME), DEFAULT_TIERS)
    with pytest.raises(TenantError, match="there is no tier gold; known: batch, interactive, standard"):
        check_tenants((Tenant(name="acme", tier="gold"),), DEFAULT_TIERS)
