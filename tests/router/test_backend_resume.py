"""What becomes of the streams of a replica that is lost."""

import asyncio

import pytest

from replicas.api import FinishReason
from router.backend import MAX_LOSSES, ReplicaBackend
from router.connection import RETRY_S
from router.fleet import DRAIN_PATIENCE_S
from router.replica_generation import ReplicaGeneration
from router.transport import ReplicaGoneError
from tests.router.fake_transport import STEP_S, FakeReplica, FakeTransport, serving
from tests.router.test_backend import finishes, generate, in_virtual_time, read, token_ids
from tests.wire_world import expected_token

WAIT_S = 20.0


def continued(generation: ReplicaGeneration, num_tokens: int, index: int = 0) -> list[int]:
    """The tokens of a generation that was resumed once: each tells by which attempt it was made."""
    request = generation.request
    assert request.attempt == 1, "it was not resumed"
    resumed = request.resumed_output_ids
    cut = len(resumed[request.indexes.index(index)]) if resumed else 0
    assert cut < num_tokens
    return [
        expected_token(request.request_id, int(position >= cut), index, position)
        for position in range(num_tokens)
    ]


def busy(transport: FakeTransport) -> FakeReplica:
    """The one replica that has work."""
    (replica,) = (r for r in transport.replicas.values() if not r.is_dead and r.engine.requests)
    return replica


async def interrupted(backend: ReplicaBackend, n: int = 1) -> ReplicaGeneration:
    """A generation in the middle of its outputs."""
    generation = generate(backend, max_tokens=20, n=n)
    await asyncio.sleep(4.5 * STEP_S)
    return generation


@in_virtual_time
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_goes_on_elsewhere_without_gap_duplicate_or_second_finish(n: int) -> None:
    async with serving("a", "b") as (backend, transport):
        generation = await interrupted(backend, n)
        busy(transport).die()
        deltas = await read(generation)
        for index in range(n):
            assert token_ids(deltas, index) == continued(generation, 20, index=index)
        assert finishes(deltas) == [FinishReason.LENGTH] * n
        assert backend.num_generations == 0


@in_virtual_time
async def test_outputs_that_had_finished_are_not_repeated() -> None:
    async with serving("a", "b") as (backend, transport):
        generation = await interrupted(backend, n=2)
        replica = busy(transport)
        ((_, positions),) = replica.engine.requests.values()
        positions[0] = 19  # its next token is its last
        await asyncio.sleep(STEP_S)
        replica.die()
        deltas = await read(generation)
        assert token_ids(deltas, 1) == continued(generation, 20, index=1)
        assert 0 not in generation.request.indexes
        assert finishes(deltas) == [FinishReason.LENGTH] * 2


@in_virtual_time
async def test_an_output_aborted_while_its_request_waits_is_not_resumed() -> None:
    async with serving("a") as (backend, transport):
        generation = await interrupted(backend, n=2)
        transport.replicas["a"].die()
        await asyncio.sleep(RETRY_S / 2)
        generation.abort(0)
        transport.replicas["a"] = FakeReplica(epoch=99)
        async with asyncio.TaskGroup() as group:
            group.create_task(transport.replicas["a"].run())
            deltas = await read(generation)
            assert {delta.index for delta in deltas} == {1}
            assert token_ids(deltas, 1) == continued(generation, 20, index=1)
            transport.replicas["a"].die()


@in_virtual_time
async def test_a_lost_submit_starts_afresh_elsewhere() -> None:
    async with serving("a", "b") as (backend, transport):
        generation = generate(backend)
        assert generation.connection is not None
        transport.replicas[generation.connection.replica].die()
        assert token_ids(await read(generation)) == continued(generation, 5)


@in_virtual_time
async def test_a_replica_that_starts_anew_goes_on_with_its_streams() -> None:
    async with serving("a") as (backend, transport):
        generation = await interrupted(backend)
        transport.replicas["a"].die()
        await asyncio.sleep(RETRY_S / 2)
        transport.replicas["a"] = FakeReplica(epoch=99)
        async with asyncio.TaskGroup() as group:
            group.create_task(transport.replicas["a"].run())
            assert token_ids(await read(generation)) == continued(generation, 20)
            transport.replicas["a"].die()


@in_virtual_time
async def test_without_a_replica_in_time_each_output_ends_with_one_error() -> None:
    async with serving("a", resume_wait_s=WAIT_S) as (backend, transport):
        generation = await interrupted(backend, n=2)
        transport.replicas["a"].die()
        started_at = asyncio.get_running_loop().time()
        deltas = await read(generation)
        assert asyncio.get_running_loop().time() - started_at == pytest.approx(WAIT_S, abs=1)
        assert finishes(deltas) == [FinishReason.ERROR] * 2
        assert all(delta.error for delta in deltas if delta.finish_reason)
        assert (backend.ready(), backend.num_generations) == (False, 0)


@in_virtual_time
async def test_a_stream_never_goes_on_with_other_weights() -> None:
    async with serving("a", resume_wait_s=WAIT_S) as (backend, transport):
        generation = await interrupted(backend)
        transport.fingerprints["b"] = "other"
        transport.replicas["b"] = FakeReplica(epoch=50)
        async with asyncio.TaskGroup() as group:
            group.create_task(transport.replicas["b"].run())
            transport.list_candidates("b")
            await asyncio.sleep(STEP_S)
            transport.replicas["a"].die()
            assert finishes(await read(generation)) == [FinishReason.ERROR]
            assert finishes(await read(generate(backend))) == [FinishReason.LENGTH]
            transport.replicas["b"].die()


@in_virtual_time
async def test_a_request_that_outlives_too_many_replicas_is_given_up() -> None:
    names = [str(i) for i in range(MAX_LOSSES + 1)]
    async with serving(*names) as (backend, transport):
        generation = generate(backend, max_tokens=1000)
        for _ in range(MAX_LOSSES):
            await asyncio.sleep(2 * STEP_S)
            busy(transport).die()
        assert finishes(await read(generation)) == [FinishReason.ERROR]
        assert sum(replica.is_dead for replica in transport.replicas.values()) == MAX_LOSSES


@in_virtual_time
async def test_a_hung_replica_is_left_and_its_late_awakening_ignored() -> None:
    async with serving("a", "b") as (backend, transport):
        generation = await interrupted(backend)
        hung = busy(transport)
        hung.failure = "a step has been running for 10 s"
        deltas = await read(generation)
        assert token_ids(deltas) == continued(generation, 20)
        hung.failure = None
        await asyncio.sleep(5 * RETRY_S)
        assert hung.engine.requests == {}
        assert [finishes(await read(generate(backend))) for _ in range(8)] == [[FinishReason.LENGTH]] * 8


@in_virtual_time
async def test_a_hung_replica_gets_nothing_new_until_it_says_that_it_is_well() -> None:
    async with serving("a") as (backend, transport):
        transport.replicas["a"].failure = "a step has been running for 10 s"
        generation = generate(backend)
        await asyncio.sleep(5 * RETRY_S)
        num_submits = sum(len(batch.commands) for _, batch in transport.batches)
        assert num_submits <= 1
        transport.replicas["a"].failure = None
        assert finishes(await read(generation)) == [FinishReason.LENGTH]


@in_virtual_time
async def test_a_request_aborted_while_it_waits_is_forgotten() -> None:
    async with serving("a") as (backend, transport):
        generation = await interrupted(backend)
        transport.replicas["a"].die()
        await asyncio.sleep(STEP_S)
        generation.abort()
        assert await read(generation) == []
        assert backend.num_generations == 0


@in_virtual_time
async def test_a_replica_that_dies_while_it_drains_hands_its_streams_on() -> None:
    async with serving("a", "b") as (backend, transport):
        generation = await interrupted(backend)
        replica = busy(transport)
        transport.list_candidates(*(name for name, r in transport.replicas.items() if r is not replica))
        replica.die()
        assert token_ids(await read(generation)) == continued(generation, 20)


@in_virtual_time
async def test_a_long_stream_moves_from_a_draining_replica_that_then_is_free() -> None:
    async with serving("a", "b") as (backend, transport):
        num_tokens = int(2 * DRAIN_PATIENCE_S / STEP_S)
        generation = generate(backend, max_tokens=num_tokens)
        await asyncio.sleep(STEP_S)
        leaving = busy(transport)
        transport.list_candidates(*(name for name, r in transport.replicas.items() if r is not leaving))
        reader = asyncio.create_task(read(generation))
        await asyncio.sleep(DRAIN_PATIENCE_S + 2 * STEP_S)
        assert leaving.engine.requests == {}
        assert len(backend.loads()) == 1
        deltas = await reader
        assert token_ids(deltas) == continued(generation, num_tokens)
        assert finishes(deltas) == [FinishReason.LENGTH]


@in_virtual_time
async def test_a_stream_stays_on_a_draining_replica_while_no_other_can_take_it() -> None:
    async with serving("a") as (backend, transport):
        num_tokens = int(2 * DRAIN_PATIENCE_S / STEP_S)
        generation = generate(backend, max_tokens=num_tokens)
        transport.list_candidates()
        deltas = await read(generation)
        assert (generation.request.attempt, len(token_ids(deltas))) == (0, num_tokens)


@in_virtual_time
async def test_requests_that_start_while_an_epoch_ends_are_served_in_the_next() -> None:
    async with serving("a") as (backend, transport):
        transport.streams[-1].put(ReplicaGoneError("for a moment"))
        started = []
        while backend.ready():
            started.append(generate(backend))
            await asyncio.sleep(0)
        for generation in started:
            assert finishes(await read(generation)) == [FinishReason.LENGTH]
        assert transport.replicas["a"].engine.requests == {}


@in_virtual_time
async def test_a_replica_that_never_answers_is_given_up() -> None:
    async with serving("a", resume_wait_s=WAIT_S) as (backend, transport):
        transport.is_silent = True
        assert finishes(await read(generate(backend))) == [FinishReason.ERROR]
