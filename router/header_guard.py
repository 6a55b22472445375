"""HeaderGuard: settles the request headers that Ray Serve would obey or stumble over before our app."""

from collections.abc import Awaitable, Callable
from typing import Final

from router.errors import ApiError
from router.http import (
    FORBIDDEN_HEADERS,
    JSON_HEADERS,
    SANE_REQUEST_ID,
    Header,
    Message,
    Receive,
    Scope,
    Send,
)

REQUEST_ID: Final = b"x-request-id"


class HeaderGuard:
    """Pure ASGI middleware; belongs outside of everything that reads headers.

    Serve obeys the forbidden headers by itself, decodes all names and some values as UTF-8 (500 where
    that fails), and puts its own X-Request-ID next to ours into every response.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = _problem(scope["headers"])
        if problem is not None:
            await _refuse(problem, send)
            return

        async def send_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _with_one_id(list(message["headers"]))
            await send(message)

        scope["headers"] = [header for header in scope["headers"] if not _is_insane_id(*header)]
        await self._app(scope, receive, send_one_id)


def _problem(headers: list[Header]) -> str | None:
    for name, value in headers:
        if name.lower() in FORBIDDEN_HEADERS:
            return f"the header {name.decode()} is not allowed"
        try:
            name.decode()
            value.decode()
        except UnicodeDecodeError:
            return "header names and values must be UTF-8"
    return None


def _is_insane_id(name: bytes, value: bytes) -> bool:
    return name.lower() == REQUEST_ID and not SANE_REQUEST_ID.match(value)


def _with_one_id(headers: list[Header]) -> list[Header]:
    ids = [header for header in headers if header[0].lower() == REQUEST_ID]
    return [*(header for header in headers if header[0].lower() != REQUEST_ID), *ids[:1]]


async def _refuse(problem: str, send: Send) -> None:
    body = ApiError(400, problem, code="invalid_header").body()
    # The request's body is not read: the connection must not carry it into the next request.
    headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
