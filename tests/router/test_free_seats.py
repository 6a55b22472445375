"""A router never refuses while a seat is free, however little it has heard of it."""

import asyncio

import pytest

from router.backend import ReplicaBackend
from router.errors import ApiError
from router.tenants import Tier
from tests.router.test_backend import in_virtual_time, read
from tests.router.virtual_cluster import STEP_S, ask, several_serving

SEATS = 4
DELAY_S = STEP_S / 10
TIERS = (Tier(name="only", level=0, ttft_target_ms=200.0),)
LONG = 400
"""Tokens of an answer that takes 4 s: one seat becomes free per second."""


async def learn(backend: ReplicaBackend) -> None:
    """Let a router see how slowly seats become free."""
    generations = [ask(backend, LONG) for _ in range(SEATS)]
    for generation in generations:
        await read(generation)


@in_virtual_time
@pytest.mark.parametrize("asked", [0, 1])
async def test_as_many_requests_as_seats_are_free_are_taken_at_once(asked: int) -> None:
    async with several_serving(2, 1, seats=SEATS, tiers=TIERS, delay_s=DELAY_S) as (backends, _):
        for backend in backends:
            await learn(backend)
        await asyncio.sleep(2 * DELAY_S)
        started_at = asyncio.get_running_loop().time()
        for generation in [ask(backends[asked], LONG) for _ in range(SEATS)]:
            await read(generation)
        assert asyncio.get_running_loop().time() - started_at < (LONG + 5) * STEP_S


@in_virtual_time
async def test_a_router_hears_at_once_of_seats_that_another_one_leaves() -> None:
    async with several_serving(2, 1, seats=SEATS, tiers=TIERS, delay_s=DELAY_S) as ((other, mine), _):
        await learn(mine)
        busy = [ask(other, LONG) for _ in range(SEATS + 1)]
        for generation in busy:
            await read(generation)
        assert ask(mine, 1).connection is not None


@in_virtual_time
async def test_what_would_wait_for_taken_seats_is_refused() -> None:
    async with several_serving(2, 1, seats=SEATS, tiers=TIERS, delay_s=DELAY_S) as ((other, mine), _):
        await learn(mine)
        for _ in range(SEATS + 1):
            ask(other, LONG)
        await asyncio.sleep(1.5)
        with pytest.raises(ApiError, match="wait"):
            ask(mine, 1)
