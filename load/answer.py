"""What one request got: bytes in, instants and counts out. The only code that runs once per token."""

import enum
from array import array
from collections.abc import Mapping
from typing import Final

from load.completion import DONE, Usage, error_message, parse_event
from load.errors import ProtocolError
from load.sse import SseParser

MAX_ERROR_BYTES: Final = 64 << 10
QUEUE_WAIT_HEADERS: Final = (b"x-queue-wait-ms", b"x-queue-time")
"""Milliseconds that the request waited in the server; the second name is TGI's."""


class Failure(enum.StrEnum):
    """Why a request did not get its answer, as far as the client can tell."""

    CONNECT = "connect"
    """No connection: refused, unreachable, name unknown."""
    RESET = "reset"
    """The connection broke before the response began."""
    TRUNCATED = "truncated"
    """The stream ended without its end."""
    TIMEOUT = "timeout"
    STOPPED = "stopped"
    """The run was stopped while the request was in flight."""
    NOT_HTTP = "not_http"
    NOT_SSE = "not_sse"
    """200, but HTML or JSON instead of an event stream."""
    BAD_EVENT = "bad_event"
    ERROR_EVENT = "error_event"
    """An error inside the stream, after its first byte."""
    HTTP_STATUS = "http_status"
    """Any status but 200; the record has the number."""
    EMPTY = "empty"
    """A complete stream without any output."""


class Answer:
    """One attempt of one request. The connection reports to it; `over()` is called exactly once, at the end.

    All instants are seconds of `time.perf_counter`, which on Linux is the same clock in all processes.
    """

    __slots__ = (
        "_body",
        "_is_stream",
        "_keep_text",
        "_parser",
        "content_type",
        "detail",
        "done_at",
        "failure",
        "finish_reason",
        "is_cancelled",
        "is_done",
        "output_at",
        "queue_wait_ms",
        "retry_after_s",
        "sent_at",
        "status",
        "stop_after",
        "text",
        "usage",
    )

    def __init__(self, sent_at: float, *, keep_text: bool = False, stop_after: int = 0) -> None:
        """`stop_after`: hang up once this many output events have arrived; 0 = never."""
        self.sent_at = sent_at
        self.done_at = 0.0
        """When the last event arrived, or the failure was seen."""
        self.output_at: array[float] = array("d")
        """Instants of the events that brought output, in order."""
        self.status = 0
        self.content_type = ""
        self.retry_after_s: float | None = None
        self.queue_wait_ms: float | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.is_done = False
        """The stream said that it is complete."""
        self.is_cancelled = False
        self.failure: Failure | None = None
        self.detail = ""
        self.stop_after = stop_after
        self.text: list[str] = []
        self._keep_text = keep_text
        self._body = b""
        self._is_stream = False
        self._parser = SseParser()

    @property
    def wants_hang_up(self) -> bool:
        return 0 < self.stop_after <= len(self.output_at)

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Take the response head; header names are in lower case."""
        self.status = status
        self.content_type = headers.get(b"content-type", b"").decode("latin-1").strip().lower()
        self.retry_after_s = _number(headers.get(b"retry-after"))
        self._is_stream = status == 200 and self.content_type.startswith("text/event-stream")
        for name in QUEUE_WAIT_HEADERS:
            if name in headers:
                self.queue_wait_ms = _number(headers[name])

    def on_body(self, chunk: bytes, now: float) -> None:
        """Take a piece of the body. Never raises: what is wrong becomes a failure."""
        if self.failure is not None:
            return
        if not self._is_stream:
            self._body = (self._body + chunk)[:MAX_ERROR_BYTES]
            return
        self.done_at = now
        try:
            for data in self._parser.feed(chunk):
                if data == DONE:
                    self.is_done = True
                else:
                    self._on_event(data, now)
        except ProtocolError as error:
            self.fail(Failure.BAD_EVENT, str(error), now)

    def _on_event(self, data: bytes, now: float) -> None:
        event = parse_event(data)
        if event.choices:
            if event.brings_output:
                self.output_at.append(now)
                if self._keep_text:
                    self.text.append(event.text)
            if event.choices[0].finish_reason is not None:
                self.finish_reason = event.choices[0].finish_reason
        if event.usage is not None:
            self.usage = event.usage
        if event.error is not None:
            self.fail(Failure.ERROR_EVENT, error_message(data), now)

    def fail(self, failure: Failure, detail: str, now: float) -> None:
        """Record why there will be no answer; the first reason stays."""
        if self.failure is None:
            self.failure = failure
            self.detail = detail
            self.done_at = now

    def cancel(self, now: float) -> None:
        """Record that the client leaves on purpose."""
        self.is_cancelled = True
        self.done_at = now

    def over(self, now: float, *, is_complete: bool) -> None:
        """Judge what arrived. `is_complete`: HTTP says that the whole response is here."""
        if self.failure is not None or self.is_cancelled:
            return
        if self.status == 0:
            self.fail(Failure.RESET, "the connection closed before a response", now)
        elif self.status != 200:
            self.fail(Failure.HTTP_STATUS, error_message(self._body), now)
        elif not self._is_stream:
            kind = self.content_type or "no content type"
            self.fail(Failure.NOT_SSE, f"{kind}: {error_message(self._body)[:100]}", now)
        elif not self.is_done and not (is_complete and self.finish_reason is not None):
            self.fail(Failure.TRUNCATED, f"the stream ended after {len(self.output_at)} events", now)
        elif not self.output_at:
            self.fail(Failure.EMPTY, "the stream is complete but brought no output", now)


def _number(header: bytes | None) -> float | None:
    """Return the number in a header; None for dates, nonsense and what no wait can be."""
    try:
        number = float(header or b"")
    except ValueError:
        return None
    return number if 0 <= number < 1e9 else None
