"""Server-sent events, in the one form that every OpenAI client reads: `data: {json}` and a blank line."""

from typing import Any, Final

import msgspec

from router.errors import ApiError

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx and its kin collect a response before passing it on unless told otherwise.
    (b"x-accel-buffering", b"no"),
)

_encode: Final = msgspec.json.Encoder().encode
# Legal inside JSON strings and line ends to many a client's line splitter. JSON escapes all ASCII ones.
_LINE_ENDS: Final = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def event(value: Any) -> bytes:
    """Encode one event on one line."""
    return b"data: %b\n\n" % _on_one_line(_encode(value))


def error_event(error: ApiError) -> bytes:
    """Encode the event that ends a stream which can no longer change its HTTP status."""
    return b"data: %b\n\n" % _on_one_line(error.body())


def _on_one_line(data: bytes) -> bytes:
    if data.isascii():
        return data
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data
