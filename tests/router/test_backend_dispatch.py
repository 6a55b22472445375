"""Where requests wait, and which goes first, over real replica sessions on virtual time."""

import asyncio

import pytest

from replicas.api import FinishReason, SamplingParams
from router.backend import ReplicaBackend
from router.errors import ApiError
from router.replica_generation import ReplicaGeneration
from router.tenants import Tier
from tests.router.fake_transport import STEP_S, serving
from tests.router.test_backend import finishes, in_virtual_time, read
from tests.wire_world import CAPACITY

SEATS = CAPACITY.max_open


def ask(backend: ReplicaBackend, max_tokens: int = 50, tier: int = 0, tenant: str = "t") -> ReplicaGeneration:
    sampling = SamplingParams(max_tokens=max_tokens)
    return backend.generate(prompt_ids=(1, 2), sampling=sampling, tier=tier, tenant=tenant)


@in_virtual_time
async def test_what_a_replica_has_no_room_for_waits_in_the_router_and_is_served() -> None:
    async with serving("a") as (backend, transport):
        generations = [ask(backend) for _ in range(3 * SEATS)]
        most = 0
        for _ in range(20):
            await asyncio.sleep(STEP_S)
            most = max(most, len(transport.replicas["a"].engine.requests))
        assert most == SEATS
        assert [finishes(await read(g)) for g in generations] == [[FinishReason.LENGTH]] * len(generations)


@in_virtual_time
async def test_a_seat_that_becomes_free_goes_to_the_best_tier_that_waits() -> None:
    async with serving("a") as (backend, _):
        for _ in range(SEATS - 1):
            ask(backend, max_tokens=2000)
        short = ask(backend, max_tokens=10)
        late, soon = ask(backend, tier=2), ask(backend, tier=0)
        await read(short)
        await asyncio.sleep(2 * STEP_S)
        assert (soon.connection is not None, late.connection) == (True, None)


@in_virtual_time
async def test_replicas_that_go_next_are_given_work_when_the_others_are_busier() -> None:
    async with serving("a", "b", "c", next_to_go=("a", "b")) as (backend, _):
        connections = [ask(backend, max_tokens=2000).connection for _ in range(4)]
        chosen = [c.replica for c in connections if c is not None]
        assert (chosen[:2], len(chosen)) == (["c", "c"], 4)
        assert set(chosen[2:]) & {"a", "b"}


@in_virtual_time
async def test_a_better_tier_is_sent_to_where_a_worse_one_runs() -> None:
    async with serving("a") as (backend, _):
        for _ in range(SEATS):
            ask(backend, max_tokens=2000, tier=2)
        await asyncio.sleep(STEP_S)
        assert ask(backend, tier=2).connection is None
        assert ask(backend, tier=0).connection is not None


@in_virtual_time
async def test_a_flood_does_not_keep_another_tenant_waiting() -> None:
    async with serving("a") as (backend, _):
        flood = [ask(backend, tenant="flood") for _ in range(5 * SEATS)]
        await asyncio.sleep(STEP_S)
        single = ask(backend, max_tokens=1, tenant="single")
        await read(single)
        assert sum(generation.connection is None for generation in flood) >= 3 * SEATS


@in_virtual_time
async def test_a_request_that_waited_as_long_as_it_may_is_refused_with_a_time_to_come_back() -> None:
    tier = Tier(name="only", level=0, queue_ttl_s=5.0)
    async with serving("a", tiers=(tier,)) as (backend, _):
        for _ in range(SEATS):
            ask(backend, max_tokens=100_000)
        waiting = ask(backend)
        assert finishes(await read(waiting)) == [FinishReason.ERROR]
        assert waiting.refusal is not None
        assert (waiting.refusal.status, waiting.refusal.code) == (429, "queue_timeout")
        assert waiting.refusal.retry_after_s is not None
        assert backend.num_generations == SEATS


@in_virtual_time
async def test_a_seat_goes_to_one_that_comes_in_time_and_the_last_that_waits_is_served() -> None:
    tier = Tier(name="only", level=0, ttft_target_ms=1000.0)
    async with serving("a", tiers=(tier,)) as (backend, _):
        for _ in range(SEATS):
            ask(backend, max_tokens=int(3.0 / STEP_S))
        late = [ask(backend) for _ in range(3)]
        await asyncio.sleep(2.0)
        timely = ask(backend)
        assert finishes(await read(timely)) == [FinishReason.LENGTH]
        assert [finishes(await read(g)) for g in late] == [[FinishReason.ERROR]] * 3
        assert all(g.refusal is not None and g.refusal.code == "queue_timeout" for g in late)


@in_virtual_time
async def test_one_that_nobody_waits_behind_is_served_however_late() -> None:
    tier = Tier(name="only", level=0, ttft_target_ms=1000.0)
    async with serving("a", tiers=(tier,)) as (backend, _):
        for _ in range(SEATS):
            ask(backend, max_tokens=int(3.0 / STEP_S))
        assert finishes(await read(ask(backend))) == [FinishReason.LENGTH]


@in_virtual_time
async def test_a_full_queue_refuses_at_once() -> None:
    tier = Tier(name="only", level=0, max_queue=2)
    async with serving("a", tiers=(tier,)) as (backend, _):
        for _ in range(SEATS + 2):
            ask(backend, max_tokens=10_000)
        with pytest.raises(ApiError) as caught:
            ask(backend)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")


@in_virtual_time
async def test_prompts_with_a_common_beginning_meet_on_one_replica() -> None:
    async with serving("a", "b") as (backend, _):
        names = set()
        for _ in range(10):
            generation = backend.generate(
                prompt_ids=tuple(range(50)) * 10, sampling=SamplingParams(max_tokens=3)
            )
            assert generation.connection is not None
            names.add(generation.connection.replica)
            await read(generation)
        assert len(names) == 1
