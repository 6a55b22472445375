"""A server that streams fixed tokens at a given pace: the ruler against which the load tool is measured.

It knows nothing but time: no model, no queue. `max_tokens` of the request is the length of the answer.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any, Final, cast

import httptools
import msgspec
import uvloop

from load.errors import LoadError

MODEL: Final = "echo"


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are timed."""

    ttft_ms: float
    itl_ms: float
    jitter: float = 0.0
    """Sigma of a lognormal factor of mean 1 on TTFT and every gap; 0 = constant."""
    seed: int = 0

    def draw(self, mean_ms: float, rng: random.Random) -> float:
        """Return one time around `mean_ms`."""
        if not self.jitter:
            return mean_ms
        return mean_ms * rng.lognormvariate(-self.jitter * self.jitter / 2, self.jitter)


class _Body(msgspec.Struct):
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(value: dict[str, Any]) -> bytes:
    head = {"id": "echo-1", "created": 0, "model": MODEL}
    return b"data: " + msgspec.json.encode(head | value) + b"\n\n"


class _Stream:
    """One answer on its way out."""

    __slots__ = ("chunk", "due_at", "end", "left", "rng", "transport")

    def __init__(self, transport: asyncio.Transport, chunk: bytes, end: bytes, left: int, rng: random.Random):
        self.transport = transport
        self.chunk = chunk
        self.end = end
        self.left = left
        self.rng = rng
        self.due_at = 0.0


class EchoProtocol(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, one request at a time on each connection."""

    def __init__(self, pace: Pace, numbers: Callable[[], int]) -> None:
        """`numbers` gives each answer a seed of its own."""
        self._pace = pace
        self._numbers = numbers
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface but not the base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._url = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        if path == b"/v1/models":
            self._respond({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "echo"}]})
        elif path.endswith(b"completions"):
            self._complete(msgspec.json.decode(b"".join(self._body), type=_Body), path)
        else:
            self._respond({"status": "ok"})

    def _respond(self, value: dict[str, Any]) -> None:
        assert self._transport is not None
        body = msgspec.json.encode(value)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    def _complete(self, body: _Body, path: bytes) -> None:
        assert self._transport is not None
        num_tokens = body.max_completion_tokens or body.max_tokens or 16
        is_chat = b"chat" in path
        usage = {"prompt_tokens": _num_words(body), "completion_tokens": num_tokens}
        usage["total_tokens"] = sum(usage.values())
        if not body.stream:
            text = " word" * num_tokens
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            self._respond({"id": "echo-1", "model": MODEL, "choices": [choice], "usage": usage})
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        word = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        token = _event({"object": kind, "choices": [{"index": 0, **word, "finish_reason": None}]})
        end = _event({"object": kind, "choices": [{"index": 0, **last, "finish_reason": "length"}]})
        end += _event({"object": kind, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        rng = random.Random(self._numbers())
        stream = _Stream(self._transport, _chunk(token), _chunk(end) + b"0\r\n\r\n", num_tokens, rng)
        stream.due_at = self._loop.time() + self._pace.draw(self._pace.ttft_ms, rng) / 1e3
        self._loop.call_at(stream.due_at, self._emit, stream)

    def _emit(self, stream: _Stream) -> None:
        if stream.transport.is_closing():
            return
        stream.left -= 1
        if stream.left == 0:
            stream.transport.write(stream.chunk + stream.end)
            return
        stream.transport.write(stream.chunk)
        stream.due_at += self._pace.draw(self._pace.itl_ms, stream.rng) / 1e3
        self._loop.call_at(stream.due_at, self._emit, stream)


def _num_words(body: _Body) -> int:
    if body.messages is not None:
        return sum(len(str(message.get("content", "")).split()) for message in body.messages)
    return len(str(body.prompt or "").split())


def run_echo(pace: Pace, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve until the process ends; `ready` gets the port. Raises LoadError when it is taken."""

    async def serve() -> None:
        try:
            server = await serve_echo(pace, host, port)
        except (OSError, OverflowError) as error:
            raise LoadError(f"cannot listen on {host}:{port}: {error}") from error
        ready(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


async def serve_echo(pace: Pace, host: str, port: int) -> asyncio.Server:
    """Listen; port 0 takes a free one."""
    loop = asyncio.get_running_loop()
    seeds = itertools.count(pace.seed * 1_000_000)
    return await loop.create_server(lambda: EchoProtocol(pace, seeds.__next__), host, port, backlog=4096)
