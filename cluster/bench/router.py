"""`headway bench router`: what the HTTP side costs when replicas and sockets cost nothing.

The application is driven as an ASGI server would, over a backend that knows its answers. Costs are CPU time
of the whole process, threads included, so that other processes do not count.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from cluster.arguments import at_least_one
from cluster.bench.report import commit, percentile
from replicas.api import FinishReason, ModelCard, SamplingParams, TokenDelta
from replicas.config import EngineConfig
from replicas.model_source import locate
from replicas.progress import silent
from router.app import App, build_app
from router.errors import ApiError
from router.generation import GenerationTimes
from router.text import TextCodec

NAME = "router"
HELP = "CPU time of the router per request and per streamed token; longest hold-up of its event loop"
PROMPT_TOKENS: Final = 1000
STREAM_TOKENS: Final = 1000
LARGEST_BODY: Final = 32 << 20
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"


class _Scripted:
    """A generation that says the words it was given, a token at a time."""

    refusal: ApiError | None = None
    queue_wait_s: float | None = None
    times = GenerationTimes()

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        last = len(self._token_ids) - 1
        for i, token_id in enumerate(self._token_ids):
            yield TokenDelta(1, 0, 0, [token_id], FinishReason.LENGTH if i == last else None)

    def abort(self, index: int | None = None) -> None:  # noqa: ARG002 - a Generation
        return


class _Backend:
    """Answers every request with `max_tokens` tokens of a text."""

    def __init__(self, card: ModelCard, token_ids: list[int]) -> None:
        self.card: ModelCard | None = card
        self._token_ids = token_ids

    def generate(
        self,
        *,
        prompt_ids: tuple[int, ...],  # noqa: ARG002 - a Backend
        sampling: SamplingParams,
        n: int = 1,  # noqa: ARG002
        tier: int = 0,  # noqa: ARG002
        cache_salt: str = "",  # noqa: ARG002
        trace_id: str = "",  # noqa: ARG002
        traceparent: str = "",  # noqa: ARG002
        tenant: str = "",  # noqa: ARG002
        weight: float = 1.0,  # noqa: ARG002
    ) -> _Scripted:
        return _Scripted(self._token_ids[: sampling.max_tokens])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=at_least_one, default=200, help="measured requests (default 200)")
    parser.add_argument("--streams", type=at_least_one, default=20, help="measured streams (default 20)")


def run(args: argparse.Namespace) -> dict[str, object]:
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> dict[str, object]:
    text = TextCodec.from_folder(locate(EngineConfig().model, silent).folder)
    prompt = _words(text, PROMPT_TOKENS)
    spoken = text.tokenizer.encode(_words(text, STREAM_TOKENS), add_special_tokens=False).ids
    app = build_app(_Backend(_card(text), spoken), text)
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    life = asyncio.ensure_future(app({"type": "lifespan"}, events.get, _ignore))
    events.put_nowait({"type": "lifespan.startup"})
    try:
        chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        request_us = [await _cpu_us(app, CHAT, _encode(chat)) for _ in range(args.requests + 10)][10:]
        short = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}
        token_us = []
        for _ in range(args.streams):
            one = await _cpu_us(app, CHAT, _encode(short | {"max_tokens": 1}))
            many = await _cpu_us(app, CHAT, _encode(short | {"max_tokens": STREAM_TOKENS}))
            token_us.append((many - one) / (STREAM_TOKENS - 1))
        held_ms = {name: await _held_up_ms(app, path, body) for name, (path, body) in _large_bodies().items()}
    finally:
        events.put_nowait({"type": "lifespan.shutdown"})
        await life
    return {
        "request_cpu_us_1k_prompt": percentile(request_us, 50),
        "token_cpu_us": percentile(token_us, 50),
        "loop_block_ms_max": max(held_ms.values()),
        "loop_block_ms": {name: round(value, 2) for name, value in held_ms.items()},
        "requests": args.requests,
        "streams": args.streams,
        "commit": commit(),
    }


def _card(text: TextCodec) -> ModelCard:
    return ModelCard(
        name="bench",
        fingerprint="bench",
        vocab_size=text.tokenizer.get_vocab_size(),
        max_model_len=8192,
        eos_token_ids=(0,),
        num_blocks=1,
        block_size=16,
        max_num_seqs=1,
        replica_epoch=1,
    )


def _words(text: TextCodec, num_tokens: int) -> str:
    """Return English of so many tokens."""
    sentence = (
        "The train leaves the station at nine and reaches the coast before noon, if the weather holds. "
    )
    ids = text.tokenizer.encode(sentence * (num_tokens // 10), add_special_tokens=False).ids[:num_tokens]
    return str(text.tokenizer.decode(ids))


def _large_bodies() -> dict[str, tuple[str, bytes]]:
    """Legal JSON of 32 MiB, of the kinds that take parsers longest."""
    message = b'{"role":"user","content":"%b"}' % (b"y" * 450)
    ids = b"[" + b"500," * 8_000 + b"500]"
    return {
        "one_text": (TEXT, b'{"prompt": "' + b"x" * (LARGEST_BODY - 20) + b'"}'),
        "token_ids": (TEXT, b'{"prompt": [' + b",".join([ids] * 1000) + b"]}"),
        "messages": (CHAT, b'{"messages": [' + b",".join([message] * 65_536) + b"]}"),
        "escapes": (CHAT, b'{"messages": [], "user": "' + b'\\"{' * (LARGEST_BODY // 3 - 30) + b'"}'),
    }


async def _cpu_us(app: App, path: str, body: bytes) -> float:
    started = time.process_time()
    status = await _call(app, path, body)
    took_s = time.process_time() - started
    if status != 200:
        raise RuntimeError(f"{path} answered {status}: a refusal is no measure of an answer")
    return took_s * 1e6


async def _held_up_ms(app: App, path: str, body: bytes) -> float:
    """Return the most CPU time that passes between two turns of the loop while `body` is handled.

    A thread that holds the GIL spends CPU time, so no hold-up by the router itself is longer than this.
    """
    longest = 0.0
    handled = asyncio.create_task(_call(app, path, body))
    while not handled.done():
        before = time.process_time()
        await asyncio.sleep(0)
        longest = max(longest, time.process_time() - before)
    await handled
    return longest * 1e3


async def _call(app: App, path: str, body: bytes) -> int:
    """Make a request; return the status of its answer."""
    status = 0

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await app(scope, incoming.get, send)
    return status


async def _ignore(_: Any) -> None:
    return


def _encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)
