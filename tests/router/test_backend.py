import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from itertools import pairwise
from typing import Any

import pytest

from cluster.simulation.virtual_time import run
from replicas.api import LEASE_GRACE_S, LEASE_S, PING_INTERVAL_S, FinishReason, SamplingParams, TokenDelta
from router.backend import ReplicaBackend, ReplicaGeneration
from router.connection import RETRY_S
from router.errors import NoReplicaError
from router.streams import ACK_FRAMES
from tests.router.fake_transport import STEP_S, serving
from tests.wire_world import expected_token


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return run_test


def generate(backend: ReplicaBackend, max_tokens: int = 5, n: int = 1) -> ReplicaGeneration:
    return backend.generate(prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=max_tokens), n=n)


async def read(generation: ReplicaGeneration) -> list[TokenDelta]:
    return [delta async for delta in generation]


def token_ids(deltas: list[TokenDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def finishes(deltas: list[TokenDelta]) -> list[FinishReason]:
    return [delta.finish_reason for delta in deltas if delta.finish_reason is not None]


def expected(generation: ReplicaGeneration, num_tokens: int, index: int = 0) -> list[int]:
    request_id = generation.request.request_id
    return [expected_token(request_id, 0, index, position) for position in range(num_tokens)]


@in_virtual_time
async def test_a_generation_brings_its_tokens_and_one_finish() -> None:
    async with serving("a") as (backend, _):
        generation = generate(backend, max_tokens=5)
        deltas = await read(generation)
        assert token_ids(deltas) == expected(generation, 5)
        assert finishes(deltas) == [FinishReason.LENGTH]
        assert backend.num_generations == 0


@in_virtual_time
async def test_all_outputs_of_a_generation_end_before_it_ends() -> None:
    async with serving("a") as (backend, _):
        generation = generate(backend, max_tokens=3, n=2)
        deltas = await read(generation)
        for index in (0, 1):
            assert token_ids(deltas, index) == expected(generation, 3, index)
        assert finishes(deltas) == [FinishReason.LENGTH] * 2


@in_virtual_time
async def test_without_replicas_there_is_no_card_and_nothing_starts() -> None:
    async with serving() as (backend, _):
        assert (backend.card, backend.ready()) == (None, False)
        with pytest.raises(NoReplicaError):
            generate(backend)


@in_virtual_time
async def test_a_connected_replica_shows_its_card_and_its_load() -> None:
    async with serving("a") as (backend, _):
        assert backend.card is not None
        assert (backend.card.name, backend.ready()) == ("m", True)
        generation = generate(backend)
        await anext(generation)
        assert backend.loads()["a"].num_running == 1


@in_virtual_time
async def test_submits_of_one_loop_tick_travel_in_one_batch() -> None:
    async with serving("a") as (backend, transport):
        transport.batches.clear()
        for _ in range(3):
            generate(backend)
        await asyncio.sleep(STEP_S)
        assert [len(batch.commands) for _, batch in transport.batches] == [3]


@in_virtual_time
async def test_requests_spread_over_the_least_busy_replicas() -> None:
    async with serving("a", "b") as (backend, transport):
        for _ in range(6):
            generate(backend, max_tokens=100)
        await asyncio.sleep(2 * STEP_S)
        assert [len(replica.engine.requests) for replica in transport.replicas.values()] == [3, 3]


@in_virtual_time
async def test_an_abort_ends_the_iteration_and_the_work() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend, max_tokens=1000)
        await anext(generation)
        reader = asyncio.create_task(read(generation))
        await asyncio.sleep(0)
        generation.abort()
        generation.abort()
        assert await reader == []
        await asyncio.sleep(STEP_S)
        assert transport.replicas["a"].engine.requests == {}
        assert backend.num_generations == 0


@in_virtual_time
async def test_an_abort_after_the_end_sends_nothing() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend, max_tokens=1)
        await read(generation)
        transport.batches.clear()
        generation.abort()
        await asyncio.sleep(STEP_S)
        assert transport.batches == []


@in_virtual_time
async def test_an_aborted_output_ends_alone_and_the_last_one_ends_the_generation() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend, max_tokens=1000, n=3)
        await anext(generation)
        generation.abort(1)
        generation.abort(1)
        await asyncio.sleep(STEP_S)
        ((_, positions),) = transport.replicas["a"].engine.requests.values()
        assert positions.keys() == {0, 2}
        generation.abort(0)
        reader = asyncio.create_task(read(generation))
        await asyncio.sleep(2 * STEP_S)
        generation.abort(2)
        assert {delta.index for delta in await reader} == {2}
        await asyncio.sleep(STEP_S)
        assert transport.replicas["a"].engine.requests == {}
        assert backend.num_generations == 0


@in_virtual_time
async def test_an_output_whose_finish_was_not_read_can_be_aborted() -> None:
    async with serving("a") as (backend, _):
        generation = generate(backend, max_tokens=2, n=2)
        await asyncio.sleep(5 * STEP_S)
        generation.abort(0)
        assert {delta.index for delta in await read(generation)} == {1}


@in_virtual_time
async def test_a_slow_reader_finds_its_tokens_coalesced() -> None:
    async with serving("a") as (backend, _):
        generation = generate(backend, max_tokens=50)
        await asyncio.sleep(60 * STEP_S)
        (delta,) = await read(generation)
        assert delta.token_ids == expected(generation, 50)


@in_virtual_time
async def test_fast_frames_are_acknowledged_between_pings() -> None:
    async with serving("a") as (backend, transport):
        await read(generate(backend, max_tokens=400))
        acked = [batch.acked_frame for _, batch in transport.batches]
        assert max(later - earlier for earlier, later in pairwise(acked)) == ACK_FRAMES


@in_virtual_time
async def test_a_lost_batch_is_sent_again_at_once() -> None:
    def lose_once(_: str) -> None:
        transport.on_send = lambda _: None
        raise TimeoutError

    async with serving("a") as (backend, transport):
        transport.on_send = lose_once
        started_at = asyncio.get_running_loop().time()
        generation = generate(backend)
        assert token_ids(await read(generation)) == expected(generation, 5)
        assert asyncio.get_running_loop().time() - started_at < PING_INTERVAL_S / 2


@in_virtual_time
async def test_a_lost_reply_changes_nothing_for_the_stream() -> None:
    async with serving("a") as (backend, transport):
        transport.num_sends_to_lose = 2
        generation = generate(backend)
        assert token_ids(await read(generation)) == expected(generation, 5)


@in_virtual_time
@pytest.mark.parametrize("num_breaks", [1, 3])
async def test_a_broken_subscription_loses_nothing(num_breaks: int) -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend, max_tokens=20)
        await anext(generation)
        for _ in range(num_breaks):
            transport.streams[-1].put(None)
            await asyncio.sleep(2 * STEP_S)
        assert token_ids([TokenDelta(0, 0, 0, expected(generation, 1)), *await read(generation)]) == expected(
            generation, 20
        )
        assert [stream.is_cancelled for stream in transport.streams] == [True] * num_breaks + [False]


@in_virtual_time
async def test_pings_keep_the_lease_of_a_router_that_only_waits() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend, max_tokens=2)
        await asyncio.sleep(0)
        transport.replicas["a"].engine.step = dict  # type: ignore[method-assign,assignment]  # no progress
        await asyncio.sleep(10 * (LEASE_S + LEASE_GRACE_S))
        del transport.replicas["a"].engine.step
        assert token_ids(await read(generation)) == expected(generation, 2)


@in_virtual_time
async def test_an_epoch_that_the_replica_ended_is_followed_by_the_next() -> None:
    async with serving("a") as (backend, transport):
        transport.replicas["a"].carry_out(
            transport.replicas["a"].sessions.expire(asyncio.get_running_loop().time() + 100)
        )
        await asyncio.sleep(3 * RETRY_S)
        generation = generate(backend)
        assert token_ids(await read(generation)) == expected(generation, 5)


@in_virtual_time
async def test_a_carrier_that_raises_something_else_does_not_take_the_replica_out_of_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def break_once(_: str) -> None:
        transport.on_send = lambda _: None
        raise ValueError("surprise")

    async with serving("a") as (backend, transport):
        transport.on_send = break_once
        with caplog.at_level(logging.ERROR):
            assert finishes(await read(generate(backend))) == [FinishReason.LENGTH]
        assert "surprise" in caplog.text


@in_virtual_time
async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has() -> None:
    async with serving("a", "b") as (backend, transport):
        generations = [generate(backend, max_tokens=50) for _ in range(2)]
        await asyncio.sleep(2 * STEP_S)
        transport.list_candidates("b")
        for _ in range(4):
            generate(backend, max_tokens=10)
        await asyncio.sleep(2 * STEP_S)
        assert len(transport.replicas["a"].engine.requests) == 1
        for generation in generations:
            assert finishes(await read(generation)) == [FinishReason.LENGTH]


@in_virtual_time
async def test_a_drained_replica_loses_its_subscription() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend)
        transport.list_candidates()
        await read(generation)
        await asyncio.sleep(STEP_S)
        assert [stream.is_cancelled for stream in transport.streams] == [True]
        assert backend.loads() == {}


@in_virtual_time
async def test_a_replica_is_drained_when_its_last_abort_has_arrived() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend, max_tokens=1000)
        await anext(generation)
        transport.list_candidates()
        generation.abort()
        await asyncio.sleep(STEP_S)
        assert transport.replicas["a"].engine.requests == {}
        assert backend.loads() == {}


@in_virtual_time
async def test_a_replica_that_comes_back_while_draining_is_used_again() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend)
        transport.list_candidates()
        assert not backend.ready()
        transport.list_candidates("a")
        assert finishes(await read(generation)) == [FinishReason.LENGTH]
        assert finishes(await read(generate(backend))) == [FinishReason.LENGTH]


@in_virtual_time
async def test_a_replica_that_comes_back_after_its_drain_is_connected_anew() -> None:
    async with serving("a") as (backend, transport):
        transport.list_candidates()
        transport.list_candidates("a")
        await asyncio.sleep(STEP_S)
        assert finishes(await read(generate(backend))) == [FinishReason.LENGTH]


@in_virtual_time
async def test_closing_ends_everything() -> None:
    async with serving("a") as (backend, transport):
        generation = generate(backend, max_tokens=1000)
        await anext(generation)
        await backend.close()
        assert finishes(await read(generation)) == [FinishReason.ERROR]
        assert transport.streams[-1].is_cancelled
        assert (backend.ready(), backend.loads()) == (False, {})


@in_virtual_time
async def test_the_carrier_is_called_outside_the_context_of_the_request() -> None:
    request_id = contextvars.ContextVar("request_id", default="none")
    seen = []
    async with serving("a") as (backend, transport):
        transport.on_send = lambda _: seen.append(request_id.get())
        request_id.set("mine")
        await read(generate(backend))
    assert set(seen) == {"none"}
