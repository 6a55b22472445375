"""Failures and hang-ups while an answer is being generated."""

import asyncio
import logging
from typing import Any

import pytest

from replicas.api import FinishReason
from router.app import App
from tests.router.asgi_client import CHAT, HI, TEXT, Call, begin, call
from tests.router.fake_backend import FakeBackend, FakeGeneration
from tests.router.tiny_tokenizers import app_token


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_has_its_status(
    app: App, backend: FakeBackend, stream: bool
) -> None:
    backend.script = lambda generation: generation.push(finish=FinishReason.ERROR, error="replica gone")
    failed = await call(app, CHAT, HI | {"stream": stream})
    assert failed.status == 500
    assert failed.error["message"] == "replica gone"


async def test_a_stream_that_is_refused_has_its_status(app: App, backend: FakeBackend) -> None:
    refused = await call(app, CHAT, HI | {"n": 0, "stream": True})
    assert (refused.status, refused.error["param"]) == (400, "n")
    assert refused.response_headers["content-type"] == "application/json"
    assert not backend.generations


async def test_a_failure_after_the_first_byte_is_one_event_and_the_end(
    app: App, backend: FakeBackend
) -> None:
    run = begin(app, CHAT, HI | {"stream": True})
    generation = await backend.started()
    for char in b"abc":
        generation.push([app_token(char)])
        await run.next_chunk()
    generation.push(finish=FinishReason.ERROR, error="replica gone")
    await run.finish()
    assert run.complete
    last = run.raw.decode().split("\n\n")[-2]
    assert last.startswith('data: {"error":{"message":"replica gone"')
    assert "[DONE]" not in run.raw.decode()


async def test_one_failed_output_ends_the_others(app: App, backend: FakeBackend) -> None:
    run = begin(app, TEXT, {"prompt": ["a", "b"]})
    first, second = await backend.started(), await backend.started()
    first.push(finish=FinishReason.ERROR, error="gone")
    assert (await run.finish()).status == 500
    assert second.aborted.is_set()


@pytest.mark.parametrize("finish", [FinishReason.ABORT, None])
async def test_a_generation_that_ends_unfinished_is_no_clean_end(
    app: App, backend: FakeBackend, finish: FinishReason | None
) -> None:
    def script(generation: FakeGeneration) -> None:
        generation.push([app_token(ord("a"))])
        if finish is None:
            generation.end()
        else:
            generation.push(finish=finish)

    backend.script = script
    assert (await call(app, CHAT, HI)).status == 500
    streamed = await call(app, CHAT, HI | {"stream": True})
    assert streamed.status == 200
    assert b"generation_failed" in streamed.raw
    assert b"[DONE]" not in streamed.raw


async def test_a_bug_is_a_500_that_says_nothing_and_logs_the_id(
    app: App, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    def script(_: FakeGeneration) -> None:
        raise ZeroDivisionError("secret")

    backend.script = script
    with caplog.at_level(logging.ERROR):
        failed = await call(app, CHAT, HI, headers={"x-request-id": "abc"})
    assert failed.status == 500
    assert b"secret" not in failed.raw
    assert "abc" in caplog.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_hang_up_aborts_at_once(
    app: App, backend: FakeBackend, stream: bool, num_tokens: int
) -> None:
    run = begin(app, CHAT, HI | {"stream": stream, "n": 4})
    generation = await backend.started()
    for _ in range(num_tokens):
        generation.push([app_token(ord("a"))])
        if stream:
            await run.next_chunk()
    num_chunks = len(run.chunks)
    run.hang_up()
    await generation.aborted.wait()
    await run.finish()
    assert len(run.chunks) == num_chunks
    assert run.status == (200 if stream and num_tokens else None)


async def test_a_hang_up_aborts_all_prompts(app: App, backend: FakeBackend) -> None:
    run = begin(app, TEXT, {"prompt": ["a", "b"], "stream": True})
    generations = [await backend.started(), await backend.started()]
    run.hang_up()
    await run.finish()
    assert all(generation.aborted.is_set() for generation in generations)


async def test_a_hang_up_during_the_body_starts_nothing(app: App, backend: FakeBackend) -> None:
    run = Call(app, "POST", CHAT, b"", {"content-type": "application/json"})
    run.hang_up()
    await run.start().finish()
    assert run.status is None
    assert not backend.generations


async def test_a_connection_that_fails_while_sending_is_a_hang_up(
    app: App, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise OSError

    run = begin(app, CHAT, HI | {"stream": True})
    generation = await backend.started()
    monkeypatch.setattr(run, "_send", broken)
    generation.push([app_token(ord("a"))])
    run.hang_up()
    await run.finish()
    assert generation.aborted.is_set()


async def test_a_cancelled_handler_aborts(app: App, backend: FakeBackend) -> None:
    run = begin(app, CHAT, HI)
    generation = await backend.started()
    assert run.task is not None
    run.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.finish()
    assert generation.aborted.is_set()


async def test_a_complete_answer_aborts_nothing(app: App, backend: FakeBackend, say: Any) -> None:
    backend.script = say("x")
    await call(app, CHAT, HI)
    assert not backend.generations[0].aborted.is_set()
