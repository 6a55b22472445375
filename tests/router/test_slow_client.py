"""Clients that do not read what they asked for: given up in time, at nobody else's cost."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from replicas.api import FinishReason, TokenLogprobs, TopLogprob
from router import replica_generation
from router.access_log import AccessLine
from router.http import PIECE_BYTES, Exchange
from router.text import TextCodec
from tests.router.asgi_client import TEXT
from tests.router.fake_backend import FakeBackend, FakeGeneration
from tests.router.fake_transport import STEP_S, serving
from tests.router.test_backend import finishes, generate, in_virtual_time, read
from tests.router.test_server import Server
from tests.router.tiny_tokenizers import app_token

STALL_LIMIT_S = 0.3
TOP = tuple(TopLogprob(token_id, -1.0) for token_id in range(100, 120))
ENTRY = TokenLogprobs(-0.5, TOP)


class Noted:
    """The access log of a test."""

    def __init__(self) -> None:
        self.lines: list[AccessLine] = []
        self._arrived = asyncio.Event()

    def __call__(self, line: AccessLine) -> None:
        self.lines.append(line)
        self._arrived.set()

    async def first(self) -> AccessLine:
        await self._arrived.wait()
        return self.lines[0]


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
async def server(backend: FakeBackend, byte_level: TextCodec, noted: Noted) -> AsyncIterator[Server]:
    server = Server(backend, byte_level, access=noted, stall_limit_s=STALL_LIMIT_S)
    await server.start(send_buffer_bytes=4096)
    yield server
    await server.stop()


def ask(stream: bool = True, **fields: Any) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": stream, **fields}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def deaf_client(port: int) -> socket.socket:
    """A connection that asks and never reads, with little room in its buffers."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(ask(logprobs=5))
    return client


def talk_for_ever(generation: FakeGeneration) -> asyncio.Task[None]:
    """More than all buffers of a connection hold, as long as somebody wants it."""

    async def talk() -> None:
        while not generation.aborted.is_set():
            generation.push([app_token(ord("a"))], logprobs=[ENTRY])
            await asyncio.sleep(0)

    return asyncio.create_task(talk())


async def test_a_client_that_stops_reading_is_given_up_and_others_are_served_meanwhile(
    server: Server, noted: Noted, say: Any
) -> None:
    deaf = deaf_client(server.port)
    generation = await server.backend.started()
    talk = talk_for_ever(generation)
    server.backend.script = say("quick")
    other = await server.raw(ask(stream=False))
    assert b'"text":"quick"' in other
    assert [line.outcome for line in noted.lines] == ["ok"], "the other one was not held up"
    noted.lines.clear()
    noted._arrived.clear()
    line = await noted.first()
    await talk
    assert generation.aborted.is_set()
    assert (line.outcome, line.code, line.status) == ("slow_client", "slow_client", 200)
    deaf.close()


async def test_a_large_answer_is_not_handed_over_faster_than_it_is_read() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    exchange = Exchange(scope, asyncio.Queue[Any]().get, send, "id")
    body = bytes(range(256)) * (5 * PIECE_BYTES // 512)
    await exchange.respond(200, body)
    pieces = [message["body"] for message in sent[1:]]
    assert b"".join(pieces) == body
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert [message["more_body"] for message in sent[1:]] == [True, True, False]


@in_virtual_time
async def test_what_waits_for_a_client_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_generation, "MAX_UNREAD", 10)
    async with serving("a") as (backend, transport):
        slow, brisk = generate(backend, max_tokens=1000), generate(backend, max_tokens=40)
        deltas = await read(brisk)
        assert finishes(deltas) == [FinishReason.LENGTH]
        assert slow.refusal is not None
        assert slow.refusal.code == "slow_client"
        await asyncio.sleep(2 * STEP_S)
        assert transport.replicas["a"].engine.requests == {}
        (last,) = await read(slow)
        assert last.finish_reason is FinishReason.ERROR
        assert len(last.token_ids) <= 12
