import json
from typing import Any

import pytest

from router.header_guard import HeaderGuard
from router.http import Header, Message, Receive, Scope, Send


async def answer(*headers: Header) -> tuple[list[Message], list[Scope]]:
    """Send a request with these headers through the guard; returns the response and what the app saw."""
    sent: list[Message] = []
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - an ASGI app
        seen.append(scope)
        ids = [(b"x-request-id", b"first"), (b"x-kept", b"1"), (b"X-Request-ID", b"second")]
        await send({"type": "http.response.start", "status": 200, "headers": ids})
        await send({"type": "http.response.body", "body": b"ok"})

    async def receive() -> Message:
        raise AssertionError("the guard must not read the body")

    async def send(message: Message) -> None:
        sent.append(message)

    await HeaderGuard(app)({"type": "http", "headers": list(headers)}, receive, send)
    return sent, seen


@pytest.mark.parametrize(
    "header",
    [
        (b"x-request-disconnect-disabled", b"?1"),
        (b"X-Request-Timeout-Seconds", b"1"),
        (b"x-request-id", b"\xff"),
        (b"\xff", b"x"),
    ],
)
async def test_a_trap_is_refused_before_the_application(header: Header) -> None:
    sent, seen = await answer((b"host", b"x"), header)
    assert seen == []
    assert sent[0]["status"] == 400
    assert dict(sent[0]["headers"])[b"connection"] == b"close"
    assert json.loads(sent[1]["body"])["error"]["code"] == "invalid_header"


async def test_other_headers_pass() -> None:
    headers = [(b"host", b"x"), (b"x-request-id", b"a-1"), (b"x-name", "café".encode())]
    _, seen = await answer(*headers)
    assert seen[0]["headers"] == headers


@pytest.mark.parametrize("value", [b"", b"a b", b"x" * 129, "é".encode()])
async def test_an_insane_request_id_is_dropped(value: bytes) -> None:
    _, seen = await answer((b"x-request-id", value), (b"host", b"x"))
    assert seen[0]["headers"] == [(b"host", b"x")]


async def test_a_response_carries_one_request_id() -> None:
    sent, _ = await answer()
    assert sent[0]["headers"] == [(b"x-kept", b"1"), (b"x-request-id", b"first")]


async def test_what_is_not_http_passes_untouched() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def nothing(*_: Any) -> Any:
        return None

    scope: Scope = {"type": "lifespan"}
    await HeaderGuard(app)(scope, nothing, nothing)
    assert seen == [(scope, nothing, nothing)]
