import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from replicas.api import (
    Abort,
    BatchReply,
    CommandBatch,
    FinishReason,
    FrameBatch,
    GenerateRequest,
    ModelCard,
    StepOutputs,
    Submit,
    Subscribe,
    TokenDelta,
)
from replicas.pump import EnginePump
from replicas.step import Step, StepResult
from tests.replicas.fake_runner import FakeRunner, engine, expected_output, request

CARD = ModelCard(
    name="fake",
    fingerprint="f",
    vocab_size=1000,
    max_model_len=256,
    eos_token_ids=(0,),
    num_blocks=128,
    block_size=4,
    max_num_seqs=4,
    replica_epoch=77,
)
SUBSCRIBE = msgspec.msgpack.encode(Subscribe(router_id="r", router_epoch=1, number=1))


def batch(first_number: int, *commands: Submit | Abort) -> bytes:
    return msgspec.msgpack.encode(
        CommandBatch(router_id="r", router_epoch=1, first_number=first_number, commands=commands)
    )


@pytest.fixture
def pump_and_runner() -> Iterator[tuple[EnginePump, FakeRunner]]:
    built, runner = engine()
    pump = EnginePump(built, CARD)
    pump.start()
    yield pump, runner
    pump.stop()


async def deltas_until_finished(batches: AsyncIterator[FrameBatch], count: int = 1) -> list[TokenDelta]:
    """Read frames until so many outputs have finished."""
    deltas: list[TokenDelta] = []
    async for batch in batches:
        assert batch.delay_s >= 0
        for frame in batch.frames:
            deltas += msgspec.msgpack.decode(frame, type=StepOutputs).deltas
        if sum(delta.finish_reason is not None for delta in deltas) == count:
            break
    return deltas


async def test_a_request_goes_in_and_its_tokens_come_out(
    pump_and_runner: tuple[EnginePump, FakeRunner],
) -> None:
    pump, _ = pump_and_runner
    frames = pump.stream(SUBSCRIBE)
    wanted = request(1, 5, max_tokens=6)
    reply = msgspec.msgpack.decode(pump.apply(batch(1, Submit(wanted))), type=BatchReply)
    assert (reply.replica_epoch, reply.applied_through) == (77, 1)
    deltas = await asyncio.wait_for(deltas_until_finished(frames), 10)
    assert [t for delta in deltas for t in delta.token_ids] == expected_output(wanted.prompt_ids, 6)
    await frames.aclose()


async def test_a_request_that_cannot_run_is_refused_with_one_error_per_output(
    pump_and_runner: tuple[EnginePump, FakeRunner],
) -> None:
    pump, _ = pump_and_runner
    frames = pump.stream(SUBSCRIBE)
    pump.apply(batch(1, Submit(request(1, 500, indexes=(0, 1))), Submit(request(2, 5, max_tokens=1))))
    deltas = await asyncio.wait_for(deltas_until_finished(frames, count=3), 10)
    errors = {(d.request_id, d.index): d.error for d in deltas if d.finish_reason is FinishReason.ERROR}
    assert set(errors) == {(1, 0), (1, 1)}
    assert "the prompt has 500 tokens" in (errors[1, 0] or "")
    assert pump.failure() is None


async def test_stop_ends_streams_and_the_thread() -> None:
    built, _ = engine()
    pump = EnginePump(built, CARD)
    pump.start()
    frames = pump.stream(SUBSCRIBE)
    reader = asyncio.create_task(deltas_until_finished(frames))
    await asyncio.sleep(0)
    pump.stop()
    assert await asyncio.wait_for(reader, 10) == []
    assert not any(thread.name == "headway-engine" and thread.is_alive() for thread in threading.enumerate())


async def test_a_bug_in_the_engine_ends_the_streams_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    built, _ = engine()

    def broken(_now: float) -> Step:
        raise AssertionError("books do not balance")

    built.scheduler.schedule = broken  # type: ignore[method-assign]
    pump = EnginePump(built, CARD)
    pump.start()
    frames = pump.stream(SUBSCRIBE)
    pump.apply(batch(1, Submit(request(1, 5))))
    assert await asyncio.wait_for(deltas_until_finished(frames), 10) == []
    assert pump.failure() == "the engine stopped: AssertionError: books do not balance"
    assert "the engine stopped" in caplog.text
    pump.stop()


async def test_abort_frees_the_blocks_while_the_engine_runs() -> None:
    built, runner = engine()
    execute = runner.execute
    entered, go_on = threading.Event(), threading.Event()

    def gated(step: Step) -> StepResult:
        entered.set()
        assert go_on.wait(10)
        return execute(step)

    runner.execute = gated  # type: ignore[method-assign]
    pump = EnginePump(built, CARD)
    pump.start()
    frames = pump.stream(SUBSCRIBE)
    keeper: GenerateRequest = request(2, 5, max_tokens=3)
    pump.apply(batch(1, Submit(request(1, 5, max_tokens=200)), Submit(keeper)))
    assert await asyncio.to_thread(entered.wait, 10)
    pump.apply(batch(3, Abort(1, 0)))
    go_on.set()
    deltas = await asyncio.wait_for(deltas_until_finished(frames), 10)
    assert {delta.request_id for delta in deltas} == {2}
    assert built.load().free_blocks == 128
    pump.stop()
