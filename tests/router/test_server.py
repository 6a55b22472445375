"""The application behind a real HTTP server: the openai client, raw sockets, real hang-ups."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pydantic
import pytest
import uvicorn

from replicas.api import TokenLogprobs
from router.app import build_app
from router.http import MAX_BODY_BYTES
from router.text import TextCodec
from tests.router.fake_backend import FakeBackend, FakeGeneration
from tests.router.tiny_tokenizers import app_token


class Server:
    """uvicorn on a free loopback port, on the test's own event loop."""

    def __init__(self, backend: FakeBackend, codec: TextCodec, **options: Any) -> None:
        self.backend = backend
        config = uvicorn.Config(
            build_app(backend, codec, **options), host="127.0.0.1", port=0, ws="none", log_level="critical"
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, send_buffer_bytes: int | None = None) -> None:
        config = self._server.config
        listener = config.bind_socket()
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self.port: int = listener.getsockname()[1]
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[listener])
        self._task = asyncio.create_task(self._server.main_loop())

    async def stop(self) -> None:
        assert self._task is not None
        self._server.should_exit = True
        await self._task
        await self._server.shutdown()

    async def raw(self, data: bytes) -> bytes:
        """Send bytes, read until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def server(backend: FakeBackend, byte_level: TextCodec) -> AsyncIterator[Server]:
    server = Server(backend, byte_level)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def post(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def test_the_openai_client_chats(server: Server, client: openai.AsyncOpenAI, say: Any) -> None:
    server.backend.script = say("Paris 😀")
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], temperature=0, seed=1, stop=["\n"]
    )
    assert answer.choices[0].message.content == "Paris 😀"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_the_openai_client_streams(server: Server, client: openai.AsyncOpenAI, say: Any) -> None:
    server.backend.script = say("Paris 😀\u2028!")
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        n=2,
    )
    texts = ["", ""]
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["Paris 😀\u2028!"] * 2
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_the_openai_client_reads_logprobs(server: Server, client: openai.AsyncOpenAI) -> None:
    def script(generation: FakeGeneration) -> None:
        generation.push([app_token(ord("a"))], logprobs=[TokenLogprobs(-0.5)])
        generation.stop()

    server.backend.script = script
    chat = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert [entry.logprob for entry in chat.choices[0].logprobs.content] == [-0.5]
    text = await client.completions.create(model="tiny", prompt="x", logprobs=1)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.tokens == ["a"]


async def test_the_openai_client_lists_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_the_openai_client_raises_what_the_status_means(
    server: Server, client: openai.AsyncOpenAI
) -> None:
    chat = client.chat.completions
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError):
        await chat.create(model="gpt-4", messages=messages)
    with pytest.raises(openai.BadRequestError) as refused:
        await chat.create(model="tiny", messages=messages, max_tokens=1000)
    assert refused.value.code == "context_length_exceeded"
    server.backend.card = None
    with pytest.raises(openai.InternalServerError) as failed:
        await chat.create(model="tiny", messages=messages)
    assert failed.value.status_code == 503


async def test_the_openai_client_sees_a_late_failure(server: Server, client: openai.AsyncOpenAI) -> None:
    stream = await _begin_stream(client, server)
    generation = server.backend.generations[0]
    generation.end()
    with pytest.raises(openai.APIError, match="ended by the server"):
        async for _ in stream:
            pass


async def test_closing_a_stream_aborts(server: Server, client: openai.AsyncOpenAI) -> None:
    stream = await _begin_stream(client, server)
    await stream.close()
    await server.backend.generations[0].aborted.wait()


async def test_closing_the_socket_aborts_an_answer_that_is_not_streamed(server: Server) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post("/v1/completions", f"Content-Length: {len(body)}") + body)
    generation = await server.backend.started()
    writer.close()
    await generation.aborted.wait()


async def test_a_body_announced_too_large_is_refused(server: Server) -> None:
    head = post("/v1/completions", f"Content-Length: {64 << 20}", "Connection: close")
    answer = await server.raw(head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


async def test_a_chunked_body_too_large_is_refused(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(post("/v1/completions", "Transfer-Encoding: chunked"))
    chunk = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
    for _ in range((MAX_BODY_BYTES >> 20) + 1):
        writer.write(chunk)
        await writer.drain()
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_other_requests_are_answered_while_a_large_one_is_read(
    server: Server, client: openai.AsyncOpenAI
) -> None:
    body = json.dumps({"prompt": "x" * (8 << 20)}).encode()
    large = asyncio.create_task(
        server.raw(post("/v1/completions", f"Content-Length: {len(body)}", "Connection: close") + body)
    )
    assert (await client.models.retrieve("tiny")).id == "tiny"
    assert b"context_length_exceeded" in await large


async def test_a_stream_is_chunked_and_its_connection_is_kept(server: Server, say: Any) -> None:
    server.backend.script = say("a")
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    request = post("/v1/completions", f"Content-Length: {len(body)}") + body
    last = post("/v1/completions", f"Content-Length: {len(body)}", "Connection: close") + body
    answer = await server.raw(request + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.lower().count(b"transfer-encoding: chunked") == 2
    assert answer.count(b"data: [DONE]\n\n") == 2


async def _begin_stream(client: openai.AsyncOpenAI, server: Server) -> Any:
    create = asyncio.create_task(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
    )
    generation = await server.backend.started()
    generation.push([app_token(ord("a"))])
    return await create


class Point(pydantic.BaseModel):
    x: int
    label: str | None = None


CALL = '<tool_call>\n{"name": "Point", "arguments": {"x": 3, "label": null}}\n</tool_call>'


async def test_the_openai_client_parses_a_model(server: Server, client: openai.AsyncOpenAI, say: Any) -> None:
    server.backend.script = say('{"x": 3, "label": "p"}')
    answer = await client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "hi"}], response_format=Point
    )
    assert answer.choices[0].message.parsed == Point(x=3, label="p")
    assert server.backend.generations[0].sampling.grammar


async def test_the_openai_client_parses_tool_calls(
    server: Server, client: openai.AsyncOpenAI, say: Any
) -> None:
    assert server.backend.card is not None
    server.backend.card = msgspec.structs.replace(server.backend.card, max_model_len=4096)
    server.backend.script = say(CALL)
    tool = openai.pydantic_function_tool(Point)
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.parse(model="tiny", messages=messages, tools=[tool])
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Point(x=3)
    async with client.chat.completions.stream(model="tiny", messages=messages, tools=[tool]) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Point(x=3)
    assert server.backend.generations[0].sampling.grammar


async def test_the_openai_client_asks_for_an_echo(
    server: Server, client: openai.AsyncOpenAI, say: Any
) -> None:
    server.backend.script = say("c")
    answer = await client.completions.create(model="tiny", prompt="ab", echo=True, best_of=1, max_tokens=1)
    assert answer.choices[0].text == "abc"


async def test_the_synchronous_openai_client_streams(server: Server, say: Any) -> None:
    server.backend.script = say("abc")

    def stream() -> str:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
            chunks = client.completions.create(model="tiny", prompt="x", stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)

    assert await asyncio.to_thread(stream) == "abc"


async def test_the_synchronous_openai_client_chats_and_calls_tools(server: Server, say: Any) -> None:
    """A whole round: the model calls, the client answers with the message it got, the model speaks."""
    backend = server.backend
    assert backend.card is not None
    backend.card = msgspec.structs.replace(backend.card, max_model_len=4096)
    tool: Any = openai.pydantic_function_tool(Point)
    messages: list[Any] = [{"role": "user", "content": "hi"}]

    def ask(client: openai.OpenAI, said: str, **fields: Any) -> Any:
        backend.script = say(said)
        return client.chat.completions.create(model="tiny", messages=messages, tools=[tool], **fields)

    def converse() -> tuple[Any, Any, str]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
            called = ask(client, CALL).choices[0]
            [asked] = called.message.tool_calls
            messages.append(called.message)
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": "done"})
            spoken = ask(client, "well", tool_choice="auto").choices[0]
            chunks = ask(client, CALL, stream=True, tool_choice="required")
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            streamed = "".join(
                call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ()
            )
            return called, spoken, streamed

    called, spoken, streamed = await asyncio.to_thread(converse)
    assert called.finish_reason == "tool_calls"
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"x": 3, "label": None}
    assert (spoken.finish_reason, spoken.message.content) == ("stop", "well")
    assert json.loads(streamed) == {"x": 3, "label": None}
    assert backend.generations[-1].sampling.grammar
