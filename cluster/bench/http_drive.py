"""Drive a server over HTTP with a closed load of streams, as cheaply as a client can."""

import asyncio
import re
import time
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from replicas.api import GenerateRequest

USAGE_EVENT = re.compile(rb'data: (\{[^\n]*"usage":\{[^\n]*\})\n')
READ_BYTES = 1 << 16


@dataclass(slots=True)
class HttpDrive:
    """What the client saw. Tokens are those of the servers' usage events."""

    wall_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    """Between reads that brought something, per stream."""
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _UsageChunk(msgspec.Struct):
    usage: _Usage


def drive_http(url: str, model: str, requests: list[GenerateRequest], concurrency: int) -> HttpDrive:
    """Run all requests as streamed completions, at most `concurrency` at a time.

    Raises RuntimeError with the server's answer if one of them fails.
    """
    return asyncio.run(_drive(url, model, requests, concurrency))


async def _drive(url: str, model: str, requests: list[GenerateRequest], concurrency: int) -> HttpDrive:
    result = HttpDrive()
    todo = deque(requests)

    async def work() -> None:
        while todo:
            await _stream(url, _body(model, todo.popleft()), result)

    started_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    result.wall_s = time.perf_counter() - started_at
    return result


def _body(model: str, request: GenerateRequest) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": request.prompt_ids,
            "max_tokens": request.sampling.max_tokens,
            "temperature": request.sampling.temperature,
            "ignore_eos": request.sampling.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _stream(url: str, body: bytes, result: HttpDrive) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    sent_at = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    tail, last_at = b"", None
    try:
        while data := await reader.read(READ_BYTES):
            now = time.perf_counter()
            if last_at is None:
                if b" 200 " not in data.partition(b"\r\n")[0]:
                    raise RuntimeError(f"the server answers {data[:500]!r}")
                result.ttft_ms.append((now - sent_at) * 1e3)
            else:
                result.gap_ms.append((now - last_at) * 1e3)
            last_at = now
            tail = (tail + data)[-4096:]
    finally:
        writer.close()
    event = USAGE_EVENT.search(tail)
    if event is None:
        raise RuntimeError(f"a stream ended without usage: {tail[-300:]!r}")
    usage = msgspec.json.decode(event[1], type=_UsageChunk).usage
    result.prompt_tokens += usage.prompt_tokens
    result.output_tokens += usage.completion_tokens
