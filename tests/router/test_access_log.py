"""Lines of the access log, and their writer."""

import errno
import io
import json
import logging.handlers
import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from router.access_log import QUEUE_LINES, AccessLine, AccessRecord, AccessWriter, access_line


def line(record: AccessRecord | None = None, **changes: Any) -> AccessLine:
    seen: dict[str, Any] = {
        "at": 1.0,
        "request_id": "r",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "client_gone": False,
        "first_byte_s": 0.0104,
        "duration_s": 0.25,
    }
    return access_line(record or AccessRecord(), **(seen | changes))


@pytest.mark.parametrize(
    ("record", "changes", "outcome"),
    [
        (AccessRecord(), {}, "ok"),
        (AccessRecord(code="invalid_json"), {"status": 400}, "refused"),
        (AccessRecord(), {"status": 429}, "refused"),
        (AccessRecord(), {"status": 503}, "refused"),
        (AccessRecord(), {"status": 500}, "failed"),
        (AccessRecord(failed=True), {}, "failed"),
        (AccessRecord(failed=True), {"client_gone": True}, "client_gone"),
        (AccessRecord(), {"status": None, "client_gone": True, "first_byte_s": None}, "client_gone"),
    ],
)
def test_the_outcome_says_how_it_ended(record: AccessRecord, changes: dict[str, Any], outcome: str) -> None:
    assert line(record, **changes).outcome == outcome


def test_times_are_milliseconds() -> None:
    assert (line().first_byte_ms, line().duration_ms) == (10.4, 250.0)


class Sink(io.RawIOBase):
    """Keeps what is written; can be made to hang, or to be full."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.open = threading.Event()
        self.open.set()
        self.is_full = False
        self.begun = threading.Semaphore(0)
        """One for each write."""

    def write(self, data: Any) -> int:
        self.open.wait(timeout=30)
        is_full = self.is_full
        self.begun.release()
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.pieces.append(bytes(data))
        return len(data)


def test_every_line_is_one_json_object() -> None:
    sink = Sink()
    writer = AccessWriter(sink)
    for number in range(300):
        writer(line(request_id=f"r{number}"))
    writer.close()
    written = b"".join(sink.pieces).decode().splitlines()
    assert [json.loads(text)["request_id"] for text in written] == [f"r{i}" for i in range(300)]
    assert all(piece.endswith(b"\n") for piece in sink.pieces)  # whole lines: others write to the file too


def test_a_stuck_reader_costs_lines_and_holds_up_nobody() -> None:
    sink = Sink()
    sink.open.clear()
    writer = AccessWriter(sink)
    for _ in range(QUEUE_LINES + 500):
        writer(line())
    assert writer.num_dropped >= 300
    sink.open.set()
    writer.close()
    assert b"".join(sink.pieces).count(b"\n") + writer.num_dropped == QUEUE_LINES + 500


@pytest.fixture
def said() -> Iterator[queue.SimpleQueue[logging.LogRecord]]:
    """What the writer says of itself."""
    records = queue.SimpleQueue[logging.LogRecord]()
    handler = logging.handlers.QueueHandler(records)
    logging.getLogger("router.access_log").addHandler(handler)
    yield records
    logging.getLogger("router.access_log").removeHandler(handler)


def test_a_full_disk_is_one_warning_and_one_more_at_its_end(
    said: queue.SimpleQueue[logging.LogRecord],
) -> None:
    sink = Sink()
    writer = AccessWriter(sink)
    for _ in range(2):
        sink.is_full = True
        for _ in range(3):
            writer(line())
            assert sink.begun.acquire(timeout=30)
        assert "No space left" in said.get(timeout=30).getMessage()
        sink.is_full = False
        writer(line())
        assert said.get(timeout=30).getMessage().endswith("is written again; 3 lines were lost")
        assert sink.begun.acquire(timeout=30)
    writer.close()
    assert (said.empty(), writer.num_dropped, len(sink.pieces)) == (True, 6, 2)


def test_a_line_break_in_a_value_stays_inside_its_line() -> None:
    sink = Sink()
    writer = AccessWriter(sink)
    writer(line(AccessRecord(model="a\nb", code='"}\n{"')))
    writer.close()
    (text,) = b"".join(sink.pieces).splitlines()
    assert json.loads(text)["model"] == "a\nb"
