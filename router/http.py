"""One HTTP exchange over ASGI: headers, bounded body, response, and the moment when the client leaves."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from router.access_log import AccessRecord
from router.errors import SLOW_CLIENT, ApiError, ClientGoneError, SlowClientError
from router.stall_watch import StallWatch

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_BODY_BYTES: Final = 32 << 20
PIECE_BYTES: Final = 64 << 10
"""A larger body is sent in pieces: what a client does not read is kept here, not in its connection."""
STALL_LIMIT_S: Final = 30.0
"""A client that takes nothing for so long, with its connection's buffers full, is given up."""
JSON_HEADERS: Final[tuple[Header, ...]] = ((b"content-type", b"application/json"),)
FORBIDDEN_HEADERS: Final = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds")
"""Ray Serve obeys these: a client could switch off that its hang-up is noticed."""
SANE_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")


class Exchange:
    """A request and its one response. Not for concurrent use, except that the watcher runs beside it."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        own_id: str,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        """`own_id` names the request when the client's X-Request-Id is absent or not sane."""
        self.began_at: Final = time.monotonic()  # an event loop's own clock may have a grain of 1 ms
        self.method: Final[str] = scope["method"]
        self.path: Final[str] = scope["path"].removeprefix(scope.get("root_path", ""))
        self.headers: Final[dict[bytes, bytes]] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.request_id: Final = given.decode() if SANE_REQUEST_ID.match(given) else own_id
        self.query: Final[bytes] = scope.get("query_string", b"")
        self.record = AccessRecord()
        self.extra_headers: list[Header] = []
        """Sent with whatever answer it will be."""
        self.status: int | None = None
        self.responded_at: float | None = None
        """When the status line went out."""
        self._num_keys = sum(name == b"authorization" for name, _ in scope["headers"])
        self.started = False
        """The status line is out: it can no longer be changed."""
        self.client_gone = False
        self._receive = receive
        self._send = send
        self._stalls = StallWatch(stall_limit_s)
        self._watcher: asyncio.Task[None] | None = None

    def check_headers(self) -> None:
        """Raise ApiError 400 for headers that would change how the server in front of us behaves."""
        for name in FORBIDDEN_HEADERS:
            if name in self.headers:
                raise ApiError(400, f"the header {name.decode()} is not allowed", code="invalid_header")
        if self._num_keys > 1:  # whoever is in front of us may have checked the other one
            raise ApiError(400, "the header Authorization is given twice", code="invalid_header")

    async def read_json(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the body. Raises ApiError 400 or 413, ClientGoneError."""
        kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(400, "Content-Type must be application/json", code="invalid_content_type")
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(400, "a compressed body is not supported", code="invalid_content_encoding")
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
            raise _too_large(max_bytes)
        return await self._read_body(max_bytes)

    async def _read_body(self, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_gone = True
                raise ClientGoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client hangs up. The body must have been read; once per exchange."""
        self._watcher = asyncio.create_task(self._wait_for_disconnect(gone))

    async def _wait_for_disconnect(self, gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        gone()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._stalls.close()
        if self._watcher is not None:
            self._watcher.cancel()

    async def respond(self, status: int, body: bytes, headers: Iterable[Header] = JSON_HEADERS) -> None:
        """Send a whole response."""
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._send_body(b"" if self.method == "HEAD" else body, more=False)

    async def refuse(self, error: ApiError) -> None:
        """Send an error object as a whole response."""
        headers = list(JSON_HEADERS)
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.allow is not None:
            headers.append((b"allow", error.allow.encode()))
        await self.respond(error.status, error.body(), headers)

    async def stream(self, data: bytes, headers: Iterable[Header]) -> None:
        """Send a piece of a 200 response of unknown length; the first call sends `headers`."""
        if not self.started:
            await self._start(200, list(headers))
        await self._send_body(data, more=True)

    async def end_stream(self, data: bytes) -> None:
        """Send the last piece."""
        await self._send_body(data, more=False)

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.started = True
        self.status = status
        self.responded_at = time.monotonic()
        headers.append((b"x-request-id", self.request_id.encode()))
        headers += self.extra_headers
        await self._deliver({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        last = max(0, len(data) - 1) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, last, PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            await self._deliver({"type": "http.response.body", "body": piece, "more_body": True})
        await self._deliver({"type": "http.response.body", "body": data[last:], "more_body": more})

    async def _deliver(self, message: Message) -> None:
        """Hand a message to the server. Raises ClientGoneError, SlowClientError."""
        self._stalls.begin()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if not self._stalls.has_cancelled():
                raise
            self.record.code = SLOW_CLIENT
            raise SlowClientError from None
        except OSError:
            # How an ASGI server says that the connection is closed.
            self.client_gone = True
            raise ClientGoneError from None
        finally:
            self._stalls.end()


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body exceeds {max_bytes} bytes", code="request_too_large")
