"""HTTP/1.1 on one connection, parsed by llhttp (httptools), reporting to an Answer.

Raw protocols instead of an HTTP client library: the budget is 30 microseconds of CPU per streamed token,
because the server under test may share the cores; stream objects and body buffers alone cost more.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from load.answer import Answer, Failure
from load.errors import LoadError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    """Path in front of /v1, without a slash at its end."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_target(url: str) -> Target:
    """Read a base URL, with or without /v1. Raises LoadError."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise LoadError(f"{url!r} is not a URL like http://127.0.0.1:8000: {error}") from None
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise LoadError(f"the port in {url!r} is not a number from 1 to 65535")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LoadError(f"{url!r} is not a URL like http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username:
        raise LoadError(f"{url!r} must be a base URL: no query, fragment or user name")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls, prefix=prefix)


def encode_request(target: Target, path: str, body: bytes, api_key: str | None) -> bytes:
    """Return the bytes of one POST."""
    head = (
        f"POST {target.prefix}{path} HTTP/1.1\r\n"
        f"Host: {target.authority}\r\n"
        "Content-Type: application/json\r\n"
        "Accept: text/event-stream\r\n"
        "User-Agent: headway-load\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    if api_key is not None:
        head += f"Authorization: Bearer {api_key}\r\n"
    return head.encode("latin-1") + b"\r\n" + body


class Connection(asyncio.Protocol):
    """One keep-alive connection; carries one request at a time."""

    def __init__(self, release: Callable[["Connection"], None]) -> None:
        """`release` gets the connection back when it can carry another request."""
        self.is_open = False
        self.is_fresh = True
        """No response has come over it yet."""
        self._release = release
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None
        self._now = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._read_bytes_per_s = 0.0

    def send(self, request: bytes, answer: Answer, read_bytes_per_s: float = 0.0) -> asyncio.Future[None]:
        """Send a request; the future ends when `answer` has its end. 0 bytes/s = read at once."""
        assert self._transport is not None
        assert self._answer is None
        self._answer = answer
        self._read_bytes_per_s = read_bytes_per_s
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._over

    @property
    def num_output_events(self) -> int:
        """Output events of the request in flight so far."""
        return len(self._answer.output_at) if self._answer is not None else 0

    def hang_up(self) -> None:
        """Close now, as a client does that has gone away."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, failure: Failure, detail: str) -> None:
        """End the request with a failure of our own making, and hang up."""
        if self._answer is not None:
            self._now = time.perf_counter()
            self._answer.fail(failure, detail, self._now)
            self._end(is_complete=False)
        self.hang_up()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        answer = self._answer
        if answer is None:
            # Bytes nobody asked for would be taken for the next answer.
            self.hang_up()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up(Failure.NOT_HTTP, f"the response is not HTTP/1.1: {error}")
            return
        if self._answer is None:
            return
        if answer.stop_after and answer.wants_hang_up:
            answer.cancel(self._now)
            self._end(is_complete=False)
            self.hang_up()
        elif answer.is_done and not self._has_length:
            # Nothing can follow, and a server that keeps the connection open would keep us waiting.
            self._end(is_complete=True)
            self.hang_up()
        elif self._read_bytes_per_s:
            self._rest(len(data) / self._read_bytes_per_s)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the Answer says what was lost
        self.is_open = False
        self._now = time.perf_counter()
        self._end(is_complete=not self._has_length)

    @property
    def _has_length(self) -> bool:
        """Whether HTTP says where the response ends; one without a length ends with its connection."""
        return b"content-length" in self._headers or b"transfer-encoding" in self._headers

    # httptools callbacks, from inside feed_data

    def on_message_begin(self) -> None:
        self._headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.is_fresh = False
        if self._answer is not None:
            self._answer.on_head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.on_body(body, self._now)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        keep_alive = self._parser.should_keep_alive()
        self._end(is_complete=True)
        if keep_alive and self.is_open:
            self._release(self)
        else:
            self.hang_up()

    def _end(self, *, is_complete: bool) -> None:
        answer, over = self._answer, self._over
        self._answer = self._over = None
        if answer is not None and over is not None:
            answer.over(self._now, is_complete=is_complete)
            if not over.done():
                over.set_result(None)

    def _rest(self, pause_s: float) -> None:
        """Read nothing for a while, so that the server's writes meet a full socket."""
        transport = self._transport
        assert transport is not None
        transport.pause_reading()

        def resume() -> None:
            if self.is_open:
                transport.resume_reading()

        asyncio.get_running_loop().call_later(pause_s, resume)


def tls_context(target: Target) -> ssl.SSLContext | None:
    """Return the context for `target`, with certificates verified; None for plain HTTP."""
    return ssl.create_default_context() if target.is_tls else None
