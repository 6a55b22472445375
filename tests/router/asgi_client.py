"""Drives an ASGI application directly: every message visible, hang-ups on command."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from router.app import App

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass(eq=False)
class Call:
    """One exchange with the application."""

    app: App
    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    chunks: list[bytes] = field(default_factory=list)
    status: int | None = None
    response_headers: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    _incoming: "asyncio.Queue[dict[str, Any]]" = field(default_factory=asyncio.Queue)
    _outgoing: "asyncio.Queue[bytes | None]" = field(default_factory=asyncio.Queue)
    task: "asyncio.Task[None] | None" = None

    def start(self) -> "Call":
        self._incoming.put_nowait({"type": "http.request", "body": self.body, "more_body": False})
        scope = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in self.headers.items()],
        }
        self.task = asyncio.create_task(self._run(scope))
        return self

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self.app(scope, self._incoming.get, self._send)
        finally:
            self._outgoing.put_nowait(None)

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert self.status is None
            self.status = message["status"]
            self.response_headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        assert not self.complete
        self.complete = not message.get("more_body", False)
        self.chunks.append(message["body"])
        self._outgoing.put_nowait(message["body"])

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def next_chunk(self) -> bytes | None:
        """Wait for the next piece of the response body; None when the application has returned."""
        return await self._outgoing.get()

    async def finish(self) -> "Call":
        """Wait until the application has returned; raises what it raised."""
        assert self.task is not None
        await self.task
        return self

    @property
    def raw(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        body = self.json
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = body["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The decoded events of a stream that ended with [DONE]."""
        parts = self.raw.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""], parts[-2:]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def begin(
    app: App, path: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] | None = None
) -> Call:
    """Start a call; `body` is JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return Call(app, method, path, data, {"content-type": "application/json"} | (headers or {})).start()


async def call(app: App, path: str, body: Any = None, **options: Any) -> Call:
    """Make a call and wait for its end."""
    return await begin(app, path, body, **options).finish()


async def get(app: App, path: str) -> Call:
    """GET a path."""
    return await call(app, path, method="GET")
