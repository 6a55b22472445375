"""Requests that wait where there is no replica, and who hears of it."""

import asyncio

import pytest

from replicas.api import FinishReason
from router.errors import ApiError, NoReplicaError
from router.transport import ReplicaGoneError
from router.waker import CALL_S, Waker
from tests.router.fake_transport import STEP_S, FakeReplica, serving
from tests.router.test_backend import finishes, generate, in_virtual_time, read


class Door:
    """Whom a router calls for a replica."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_waiting = 0
        self.failures: list[Exception] = []

    async def knock(self) -> None:
        self.num_calls += 1
        if self.failures:
            raise self.failures.pop()
        self.num_waiting += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.num_waiting -= 1


@in_virtual_time
async def test_a_request_waits_for_the_replica_that_it_calls_for() -> None:
    door = Door()
    async with serving("a", wake=door.knock) as (backend, transport):
        transport.list_candidates()
        await asyncio.sleep(1)
        generation = generate(backend)
        await asyncio.sleep(45)
        assert door.num_waiting == 1
        transport.replicas["b"] = FakeReplica(2)
        running = asyncio.ensure_future(transport.replicas["b"].run())
        transport.list_candidates("b")
        assert finishes(await read(generation)) == [FinishReason.LENGTH]
        assert door.num_waiting == 0
        running.cancel()


@in_virtual_time
async def test_nobody_calls_while_nobody_waits() -> None:
    door = Door()
    async with serving("a", wake=door.knock) as (backend, transport):
        transport.list_candidates()
        await asyncio.sleep(30)
        assert door.num_calls == 0
        generate(backend).abort()
        await asyncio.sleep(CALL_S + 1)
        assert door.num_waiting == 0


@in_virtual_time
async def test_a_router_that_has_never_seen_the_model_calls_until_it_has() -> None:
    door = Door()
    async with serving(wake=door.knock) as (_, transport):
        await asyncio.sleep(25)
        assert door.num_waiting == 1
        transport.replicas["a"] = FakeReplica(1)
        running = asyncio.ensure_future(transport.replicas["a"].run())
        transport.list_candidates("a")
        await asyncio.sleep(1)
        assert door.num_waiting == 0
        transport.list_candidates()
        await asyncio.sleep(25)
        assert door.num_waiting == 0
        running.cancel()


@in_virtual_time
async def test_a_request_that_waited_in_vain_is_refused() -> None:
    door = Door()
    async with serving("a", wake=door.knock) as (backend, transport):
        transport.list_candidates()
        await asyncio.sleep(1)
        generation = generate(backend)
        await read(generation)
        assert isinstance(generation.refusal, ApiError)


@in_virtual_time
async def test_without_a_door_a_request_is_refused_at_once() -> None:
    async with serving("a") as (backend, transport):
        transport.list_candidates()
        await asyncio.sleep(1)
        with pytest.raises(NoReplicaError):
            generate(backend)


@in_virtual_time
async def test_a_call_that_meets_a_replica_on_its_way_out_is_made_again() -> None:
    door = Door()
    door.failures = [ReplicaGoneError("a"), ReplicaGoneError("a")]
    waker = Waker(door.knock, lambda: True)
    waker.check()
    waker.check()
    await asyncio.sleep(2)
    assert (door.num_calls, door.num_waiting) == (3, 1)
    waker.close()
    await asyncio.sleep(STEP_S)
    assert door.num_waiting == 0
