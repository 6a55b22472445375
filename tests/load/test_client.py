import asyncio
import contextlib

import pytest

from load.answer import Answer, Failure
from load.client import Client
from load.connection import Target
from tests.load.raw_server import Writer, accepting, head, sending, serving, sized

TOKEN = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


async def ask(target: Target, timeout_s: float = 5.0, **kwargs: int) -> Answer:
    async with Client(target, request_timeout_s=timeout_s) as client:
        return await client.post("/v1/chat/completions", b"{}", **kwargs)  # type: ignore[arg-type]


async def test_a_whole_stream() -> None:
    async with serving(sending(head(), ROLE, TOKEN, TOKEN, LAST, USAGE, DONE)) as target:
        answer = await ask(target)
    assert answer.failure is None
    assert len(answer.output_at) == 2
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)


async def test_output_is_stamped_in_order_after_sending() -> None:
    async with serving(sending(head(), TOKEN, TOKEN, LAST, DONE)) as target:
        answer = await ask(target)
    assert answer.sent_at < answer.output_at[0] <= answer.output_at[1] <= answer.done_at


async def test_done_without_finish_reason_is_complete() -> None:
    async with serving(sending(head(), TOKEN, DONE)) as target:
        assert (await ask(target)).failure is None


async def test_done_ends_a_stream_whose_connection_stays_open() -> None:
    async def stay(writer: Writer) -> None:
        writer.write(head() + TOKEN + DONE)
        await writer.drain()
        await released.wait()

    released = asyncio.Event()
    async with serving(stay) as target:
        answer = await ask(target, timeout_s=60.0)
        released.set()
    assert answer.failure is None


async def test_finish_reason_without_done_is_complete() -> None:
    async with serving(sending(head(), TOKEN, LAST)) as target:
        assert (await ask(target)).failure is None


async def test_a_stream_cut_short() -> None:
    async with serving(sending(head(), TOKEN, TOKEN)) as target:
        answer = await ask(target)
    assert answer.failure is Failure.TRUNCATED
    assert len(answer.output_at) == 2


async def test_a_chunked_stream_cut_short_after_its_finish_reason() -> None:
    chunk = b"%x\r\n%b\r\n" % (len(TOKEN + LAST), TOKEN + LAST)
    async with serving(sending(head(extra="Transfer-Encoding: chunked\r\n"), chunk)) as target:
        assert (await ask(target)).failure is Failure.TRUNCATED


async def test_a_stream_without_output() -> None:
    async with serving(sending(head(), ROLE, LAST, DONE)) as target:
        assert (await ask(target)).failure is Failure.EMPTY


async def test_html_instead_of_a_stream() -> None:
    async with serving(sending(sized(b"<html>hello", "text/html", "200 OK"))) as target:
        answer = await ask(target)
    assert answer.failure is Failure.NOT_SSE
    assert "text/html" in answer.detail


async def test_an_error_status_with_its_message() -> None:
    body = b'{"error":{"message":"no such key","code":"invalid_api_key"}}'
    async with serving(sending(sized(body, "application/json", "401 Unauthorized"))) as target:
        answer = await ask(target)
    assert (answer.failure, answer.status, answer.detail) == (Failure.HTTP_STATUS, 401, "no such key")


async def test_an_error_event_inside_the_stream() -> None:
    async with serving(sending(head(), TOKEN, b'data: {"error":{"message":"out of luck"}}\n\n')) as target:
        answer = await ask(target)
    assert (answer.failure, answer.detail) == (Failure.ERROR_EVENT, "out of luck")


async def test_an_event_that_is_not_json() -> None:
    async with serving(sending(head(), b"data: <p>\n\n", DONE)) as target:
        assert (await ask(target)).failure is Failure.BAD_EVENT


async def test_a_response_that_is_not_http() -> None:
    async with serving(sending(b"SSH-2.0-OpenSSH_9.6\r\n")) as target:
        assert (await ask(target)).failure is Failure.NOT_HTTP


async def test_a_connection_closed_before_the_response() -> None:
    async with serving(sending()) as target:
        assert (await ask(target)).failure is Failure.RESET


async def test_nobody_listens() -> None:
    async with serving(sending()) as target:
        pass
    answer = await ask(target)
    assert answer.failure is Failure.CONNECT


async def test_an_answer_that_never_comes_is_given_up() -> None:
    async def never(_: Writer) -> None:
        await released.wait()

    released = asyncio.Event()
    async with serving(never) as target:
        answer = await ask(target, timeout_s=0.01)
        released.set()
    assert answer.failure is Failure.TIMEOUT


async def test_hanging_up_midway_is_no_failure() -> None:
    async with serving(sending(head(), TOKEN, TOKEN, TOKEN, LAST, DONE)) as target:
        answer = await ask(target, stop_after=1)
    assert answer.is_cancelled
    assert answer.failure is None
    assert len(answer.output_at) >= 1


async def test_retry_after_is_read() -> None:
    refusal = sized(b"{}", "application/json", "429 Too Many Requests", "Retry-After: 7\r\n")
    async with serving(sending(refusal)) as target:
        assert (await ask(target)).retry_after_s == 7.0


@pytest.mark.parametrize("value", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan", "soon"])
async def test_a_retry_after_that_is_no_number_is_none(value: str) -> None:
    refusal = sized(b"{}", "application/json", "429 Too Many Requests", f"Retry-After: {value}\r\n")
    async with serving(sending(refusal)) as target:
        assert (await ask(target)).retry_after_s is None


async def test_the_queue_wait_is_read_from_its_header() -> None:
    async with serving(sending(head(extra="X-Queue-Wait-Ms: 12.5\r\n"), TOKEN, DONE)) as target:
        assert (await ask(target)).queue_wait_ms == 12.5


async def test_a_connection_is_used_again() -> None:
    body = TOKEN + DONE
    num_connections = 0

    async def twice(reader: asyncio.StreamReader, writer: Writer) -> None:
        nonlocal num_connections
        num_connections += 1
        for _ in range(2):
            await reader.readuntil(b"{}")
            writer.write(sized(body, "text/event-stream", "200 OK"))

    async with accepting(twice) as target, Client(target, request_timeout_s=5.0) as client:
        for _ in range(2):
            assert (await client.post("/", b"{}")).failure is None
    assert num_connections == 1


async def test_an_idle_connection_the_server_closed_is_replaced() -> None:
    """The first connection promises keep-alive, and closes when the second request comes."""
    whole = sized(TOKEN + DONE, "text/event-stream", "200 OK")

    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        await reader.readuntil(b"{}")
        writer.write(whole)
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"{}")

    async with accepting(serve) as target, Client(target, request_timeout_s=5.0) as client:
        for _ in range(2):
            assert (await client.post("/", b"{}")).failure is None


async def test_stop_gives_up_what_is_in_flight() -> None:
    async def begin(writer: Writer) -> None:
        writer.write(head() + TOKEN)
        await writer.drain()
        begun.set()
        await released.wait()

    begun, released = asyncio.Event(), asyncio.Event()
    async with serving(begin) as target, Client(target, request_timeout_s=60.0) as client:
        asking = asyncio.create_task(client.post("/", b"{}"))
        await begun.wait()
        while client.num_output_events_in_flight == 0:  # noqa: ASYNC110 - the client has no event for it
            await asyncio.sleep(0)
        client.stop()
        answer = await asking
        released.set()
    assert answer.failure is Failure.STOPPED
    assert len(answer.output_at) == 1
