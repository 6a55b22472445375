"""QuotaClient on virtual time: what requests see of limits, and of a ledger that is late, away or new."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping

import pytest

from cluster.simulation.virtual_time import run
from router.errors import ApiError
from router.ledger import SETTLE_S, Ledger
from router.quota import Quota
from router.quota_client import PATIENCE_S, LedgerGoneError, QuotaClient, QuotaReservation
from router.quota_messages import CatalogueQuery, Exchange, Hello, decode_request, encode
from router.tenants import Catalogue, Tenant
from tests.router.quota_world import tenant

numbers = itertools.count(1)


class Link:
    """A ledger behind a wire of 5 ms that can be cut."""

    def __init__(self, *tenants: Tenant) -> None:
        self.cut = False
        self.num_calls = 0
        self.replace(*tenants)
        self.restart()

    def replace(self, *tenants: Tenant) -> None:
        self.catalogue = Catalogue(version=str(next(numbers)), tenants=tenants)

    def restart(self) -> None:
        self.ledger = Ledger(epoch=next(numbers), draw_session=lambda: next(numbers))
        self.ledger.replace_catalogue(self.catalogue, now())

    async def call(self, message: bytes) -> bytes:
        self.num_calls += 1
        await asyncio.sleep(0.0025)
        if self.cut:
            raise LedgerGoneError("cut")
        request = decode_request(message)
        match request:
            case CatalogueQuery():
                reply = encode(self.catalogue)
            case Hello():
                reply = encode(self.ledger.hello(request, now()))
            case Exchange():
                reply = encode(self.ledger.exchange(request, now()))
        await asyncio.sleep(0.0025)
        return reply


class Counters:
    def __init__(self) -> None:
        self.charged: dict[str, float] = {}
        self.foreign: dict[str, float] = {}

    def take_charges(self) -> Mapping[str, float]:
        charged, self.charged = self.charged, {}
        return charged

    def add_charges(self, charges: Mapping[str, float]) -> None:
        for name, charged in charges.items():
            self.foreign[name] = self.foreign.get(name, 0.0) + charged


def now() -> float:
    return asyncio.get_running_loop().time()


class Router:
    def __init__(self, link: Link) -> None:
        self.catalogues: list[Catalogue] = []
        self.counters = Counters()
        self.client = QuotaClient(
            link,
            Quota(f"router {next(numbers)}"),
            clock=now,
            uniform=lambda low, _: low,
            catalogue_changed=self.catalogues.append,
            service=self.counters,
        )
        self.task = asyncio.create_task(self.client.run())


async def refusal(reservation: Awaitable[QuotaReservation]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await reservation
    return caught.value


def scene(
    play: Callable[[Link, list[Router]], Awaitable[None]], *tenants: Tenant, num_routers: int = 1
) -> None:
    """Play on routers that have said hello to a ledger that has settled."""

    async def main() -> None:
        link = Link(*tenants)
        routers = [Router(link) for _ in range(num_routers)]
        await asyncio.sleep(SETTLE_S + 1.0)
        await play(link, routers)
        assert not [router.task for router in routers if router.task.done()]
        for router in routers:
            router.task.cancel()

    run(main())


def test_a_429_says_when_this_request_fits() -> None:
    acme = tenant(tpm=600)

    async def play(_: Link, routers: list[Router]) -> None:
        (router,) = routers
        await router.client.reserve(acme, 500)
        error = await refusal(router.client.reserve(acme, 350))
        assert (error.status, error.type, error.code) == (429, "rate_limit_exceeded", "rate_limit_exceeded")
        assert error.retry_after_s == 25  # 250 at 10 a second

    scene(play, acme)


def test_the_limits_of_those_who_ask_are_known_with_what_is_left() -> None:
    acme = tenant(tpm=600)

    async def play(_: Link, routers: list[Router]) -> None:
        (router,) = routers
        assert router.client.in_use() == []
        await router.client.reserve(acme, 500)
        (use,) = router.client.in_use()
        assert (use.name, use.rpm, use.requests_left, use.tpm) == (acme.name, None, None, 600)
        assert use.tokens_left == pytest.approx(100)

    scene(play, acme)


def test_what_can_never_fit_is_a_400_that_asks_nobody() -> None:
    acme = tenant(tpm=100)

    async def play(link: Link, routers: list[Router]) -> None:
        before = link.num_calls
        error = await refusal(routers[0].client.reserve(acme, 101))
        assert (error.status, error.retry_after_s, link.num_calls) == (400, None, before)

    scene(play, acme)


def test_a_tenant_without_limits_waits_for_nobody() -> None:
    async def play(link: Link, routers: list[Router]) -> None:
        link.cut = True
        for _ in range(1000):
            await routers[0].client.reserve(tenant(), 10**9)

    scene(play, tenant())


def test_the_headers_tell_what_is_left() -> None:
    acme = tenant(rpm=60, tpm=600)

    async def play(_: Link, routers: list[Router]) -> None:
        client = routers[0].client
        await client.reserve(acme, 150)
        assert dict(client.headers(acme)) == {
            b"x-ratelimit-limit-requests": b"60",
            b"x-ratelimit-remaining-requests": b"59",
            b"x-ratelimit-reset-requests": b"1s",
            b"x-ratelimit-limit-tokens": b"600",
            b"x-ratelimit-remaining-tokens": b"450",
            b"x-ratelimit-reset-tokens": b"15s",
        }
        assert client.headers(tenant()) == []

    scene(play, acme)


def test_requests_over_three_routers_share_one_limit() -> None:
    acme = tenant(tpm=1000)

    async def play(_: Link, routers: list[Router]) -> None:
        asked = [routers[i % 3].client.reserve(acme, 100) for i in range(100)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(end, QuotaReservation) for end in ended) == 10

    scene(play, acme, num_routers=3)


def test_a_request_that_is_given_up_while_it_waits_leaves_no_trace() -> None:
    acme = tenant(tpm=100)

    async def play(_: Link, routers: list[Router]) -> None:
        client = routers[0].client
        waiting = asyncio.create_task(client.reserve(acme, 100))
        await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.sleep(0.1)
        await client.reserve(acme, 100)

    scene(play, acme)


def test_without_the_ledger_what_is_held_is_served_and_then_a_503() -> None:
    acme = tenant(tpm=60_000)

    async def play(link: Link, routers: list[Router]) -> None:
        client = routers[0].client
        for _ in range(50):
            await client.reserve(acme, 100)
            await asyncio.sleep(0.1)
        link.cut = True
        await asyncio.sleep(1.0)
        assert client.is_down
        await client.reserve(acme, 100)
        error = await refusal(client.reserve(acme, 50_000))
        assert (error.status, error.code, error.retry_after_s) == (503, "quota_unavailable", PATIENCE_S)
        link.cut = False
        await asyncio.sleep(1.0)
        assert not client.is_down
        await client.reserve(acme, 5_000)

    scene(play, acme)


def test_a_new_ledger_is_greeted_and_remembers_what_was_used() -> None:
    acme = tenant(tpm=1000)

    async def play(link: Link, routers: list[Router]) -> None:
        first, second = routers
        await first.client.reserve(acme, 900)
        await asyncio.sleep(1.0)
        link.restart()
        await asyncio.sleep(SETTLE_S + 2.0)
        assert (await refusal(second.client.reserve(acme, 300))).status == 429
        await second.client.reserve(acme, 100)

    scene(play, acme, num_routers=2)


def test_a_changed_catalogue_reaches_every_router() -> None:
    acme, stricter = tenant(tpm=1000), tenant(tpm=100)

    async def play(link: Link, routers: list[Router]) -> None:
        link.replace(stricter)
        link.ledger.replace_catalogue(link.catalogue, now())
        await asyncio.sleep(1.0)
        for router in routers:
            assert [catalogue.tenants for catalogue in router.catalogues] == [(acme,), (stricter,)]
        asked = [router.client.reserve(stricter, 60) for router in routers]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(end, QuotaReservation) for end in ended) == 1

    scene(play, acme, num_routers=2)


def test_service_charged_by_one_router_reaches_the_other_within_two_ticks() -> None:
    async def play(_: Link, routers: list[Router]) -> None:
        first, second = routers
        first.counters.charged = {"acme": 7.0}
        second.counters.charged = {"acme": 1.0}
        await asyncio.sleep(0.25)
        second.counters.charged = {"other": 1.0}
        await asyncio.sleep(0.25)
        assert second.counters.foreign == {"acme": 7.0}

    scene(play, tenant(), num_routers=2)
