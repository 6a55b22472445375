"""Requests that wait on a replica and come back: real engines and sessions on virtual time."""

import asyncio

from replicas.api import SamplingParams
from router.backend import ReplicaBackend
from router.fairness import service
from router.replica_generation import ReplicaGeneration
from tests.router.test_backend import in_virtual_time, read
from tests.router.virtual_cluster import PROMPT_TOKENS, STEP_S, ask, serving


def place(generation: ReplicaGeneration) -> str | None:
    return None if generation.connection is None else generation.connection.replica


async def behind_a_long_one(backend: ReplicaBackend) -> tuple[ReplicaGeneration, ReplicaGeneration]:
    """A request that runs long, and one that waits behind it while the other replica is busy as well."""
    ask(backend, 500)
    await asyncio.sleep(3 * STEP_S)
    short = ask(backend, 20)
    await asyncio.sleep(3 * STEP_S)
    first, second = ask(backend, 5, tenant="moved"), ask(backend, 5, tenant="other")
    await asyncio.sleep(3 * STEP_S)
    (waiting,) = (g for g in (first, second) if place(g) != place(short))
    return short, waiting


@in_virtual_time
async def test_a_request_that_waits_on_a_busy_replica_starts_on_the_one_that_becomes_free() -> None:
    async with serving(2) as (backend, _):
        short, waiting = await behind_a_long_one(backend)
        assert not waiting.has_begun
        started_at = asyncio.get_running_loop().time()
        deltas = await read(waiting)
        assert place(waiting) == place(short)
        assert sum(len(delta.token_ids) for delta in deltas) == 5
        assert asyncio.get_running_loop().time() - started_at < 100 * STEP_S
        assert waiting.request.attempt == 1


@in_virtual_time
async def test_a_request_that_has_started_is_not_taken_back() -> None:
    async with serving(1) as (backend, replicas):
        running = ask(backend, 20)
        await asyncio.sleep(2.5 * STEP_S)
        assert running.connection is not None
        running.connection.withdraw(running.request.request_id)
        deltas = await read(running)
        assert sum(len(delta.token_ids) for delta in deltas) == 20
        assert running.request.attempt == 0
        assert replicas["a"].engine.counters.output_tokens == 20


@in_virtual_time
async def test_where_no_seat_is_taken_a_waiting_request_makes_way_for_a_better_tier() -> None:
    async with serving(1, preemption=False) as (backend, _):
        running = ask(backend, 30)
        late = ask(backend, 5, tier=2)
        await asyncio.sleep(3 * STEP_S)
        assert place(late) == "a"
        soon = ask(backend, 5, tier=0)
        assert place(soon) is None
        await read(running)
        await read(soon)
        assert not late.has_begun
        assert sum(len(delta.token_ids) for delta in await read(late)) == 5


@in_virtual_time
async def test_a_tenant_is_charged_once_for_a_request_that_moved() -> None:
    async with serving(2) as (backend, _):
        short, waiting = await behind_a_long_one(backend)
        await read(short)
        await read(waiting)
        assert waiting.request.attempt == 1
        charges = backend.service.take_charges()
        assert charges[f"0 {waiting.client.tenant}"] == service(PROMPT_TOKENS, 5)


@in_virtual_time
async def test_a_request_given_up_after_it_came_back_costs_nothing() -> None:
    async with serving(1, preemption=False) as (backend, _):
        ask(backend, 100)
        late = ask(backend, 5, tier=2, tenant="late")
        await asyncio.sleep(3 * STEP_S)
        ask(backend, 5)
        await asyncio.sleep(3 * STEP_S)
        assert (late.request.attempt, place(late)) == (1, None)
        late.abort()
        assert backend.service.take_charges()["2 late"] == 0


@in_virtual_time
async def test_several_outputs_get_no_refund_for_what_their_sibling_computed() -> None:
    async with serving(1) as (backend, _):
        generation = backend.generate(
            prompt_ids=(3,) * PROMPT_TOKENS, sampling=SamplingParams(max_tokens=4, ignore_eos=True), n=3
        )
        await read(generation)
        assert sum(backend.service.take_charges().values()) == service(PROMPT_TOKENS, 12)
