"""The access log: one JSON line per request. Who, what, how long, how it ended; never a prompt or a key."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Final, Literal

import msgspec

from router.errors import SLOW_CLIENT

QUEUE_LINES: Final = 10_000
MAX_LINES_AT_ONCE: Final = 100
_log: Final = logging.getLogger(__name__)

Outcome = Literal["ok", "refused", "failed", "client_gone", "slow_client"]


@dataclass(slots=True, kw_only=True)
class AccessRecord:
    """What is found out about a request while it is handled."""

    tenant: str = ""
    key_id: str = ""
    tier: str = ""
    model: str = ""
    """The served one; an unknown name is the client's text and stays out."""
    stream: bool = False
    level: int | None = None
    """The priority it ran with: its tier's, or a later one that it asked for."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_wait_s: float | None = None
    """In this router, until all its prompts were sent to replicas."""
    code: str | None = None
    """Of the error object, if it ended in one."""
    failed: bool = False
    """It ended in an error after the status line."""


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log."""

    at: float
    """When the answer ended, seconds since 1970."""
    request_id: str
    method: str
    route: str
    """One of the server's own paths; empty for a URL that is none."""
    status: int | None
    """None when the client left before the status line."""
    outcome: Outcome
    code: str | None
    tenant: str
    key_id: str
    tier: str
    level: int | None
    model: str
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_wait_ms: float | None
    """In the router, until a replica was chosen; None when it never was."""
    first_byte_ms: float | None
    """From the last byte of the header to the status line: the time to the first token of a stream."""
    duration_ms: float


def access_line(
    record: AccessRecord,
    *,
    at: float,
    request_id: str,
    method: str,
    route: str,
    status: int | None,
    client_gone: bool,
    first_byte_s: float | None,
    duration_s: float,
) -> AccessLine:
    """Combine what the handler found out with what the exchange saw."""
    return AccessLine(
        at=round(at, 3),
        request_id=request_id,
        method=method,
        route=route,
        status=status,
        outcome=_outcome(record, status, client_gone),
        code=record.code,
        tenant=record.tenant,
        key_id=record.key_id,
        tier=record.tier,
        level=record.level,
        model=record.model,
        stream=record.stream,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        queue_wait_ms=_milliseconds(record.queue_wait_s),
        first_byte_ms=_milliseconds(first_byte_s),
        duration_ms=round(duration_s * 1000, 1),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _outcome(record: AccessRecord, status: int | None, client_gone: bool) -> Outcome:
    if record.code == SLOW_CLIENT:
        return "slow_client"
    if client_gone:
        return "client_gone"
    if record.failed or status is None or status == 500:
        return "failed"
    return "ok" if status < 400 else "refused"


AccessSink = Callable[[AccessLine], None]


def nowhere(line: AccessLine) -> None:
    """Keep no access log."""


class AccessWriter:
    """An AccessSink that writes to a file or pipe from a thread: a full disk or a stuck reader of stdout
    holds up no request. Lines that find the queue full, or the disk, are dropped and counted; a spell of that
    is one warning, and one more when everything that waits is written again."""

    def __init__(self, stream: IO[bytes]) -> None:
        """`stream` is unbuffered: several routers may append to one file, each whole lines at once."""
        self._stream = stream
        self._lines: queue.Queue[AccessLine | None] = queue.Queue(QUEUE_LINES)
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._num_dropped_before = 0
        """As of the end of the last spell."""
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def __call__(self, line: AccessLine) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._drop(1, "it is written too slowly")

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def close(self) -> None:
        """Write what waits, and end."""
        self._lines.put(None)
        self._thread.join()

    def _write(self) -> None:
        encoder = msgspec.json.Encoder()
        is_open = True
        while is_open:
            lines = [self._lines.get()]
            while len(lines) < MAX_LINES_AT_ONCE and not self._lines.empty():
                lines.append(self._lines.get())
            is_open = lines[-1] is not None
            encoded = [encoder.encode(line) + b"\n" for line in lines if line is not None]
            try:
                if encoded:
                    self._stream.write(b"".join(encoded))
            except OSError as error:
                self._drop(len(encoded), str(error))
            else:
                self._note_written()

    def _drop(self, num_lines: int, reason: str) -> None:
        with self._lock:
            is_first = self._num_dropped == self._num_dropped_before
            self._num_dropped += num_lines
        if is_first:
            _log.warning("the access log loses lines: %s", reason)

    def _note_written(self) -> None:
        with self._lock:
            num_lost = self._num_dropped - self._num_dropped_before
            if not num_lost or not self._lines.empty():
                return
            self._num_dropped_before = self._num_dropped
        _log.warning("the access log is written again; %d lines were lost", num_lost)
