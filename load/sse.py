"""Server-sent events from bytes, as the WHATWG HTML standard (section 9.2.6) defines them.

Only `data` matters to an OpenAI stream: names, ids and retry times are read over. Comments are too; a
keep-alive is no token.
"""

import re
from typing import Final

from load.errors import ProtocolError

MAX_EVENT_BYTES: Final = 8 << 20
"""A server that never ends its line must not fill our memory."""

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class SseParser:
    """Cuts a byte stream into events, however the bytes are split over reads."""

    __slots__ = ("_after_cr", "_at_start", "_data", "_partial")

    def __init__(self) -> None:
        self._partial = b""
        self._data: list[bytes] = []
        self._after_cr = False
        """The last byte was CR: an LF that comes next belongs to the same line end."""
        self._at_start = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of each event that `chunk` completes. Raises ProtocolError when one is too long."""
        if not self._partial and not self._data and chunk[:6] == b"data: " and chunk[-2:] == b"\n\n":
            # Nearly every chunk of nearly every server is whole events of one line each.
            events = chunk[6:-2].split(b"\n\ndata: ")
            if chunk.count(b"\n") == 2 * len(events) and b"\r" not in chunk:
                self._at_start = self._after_cr = False
                return events
        return self._feed_lines(chunk)

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        if not chunk:
            return []
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
        self._after_cr = chunk[-1:] == b"\r"
        *lines, self._partial = _LINE_END.split(self._partial + chunk)
        if self._at_start and (lines or len(self._partial) >= 3):
            self._at_start = False
            if lines:
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            else:
                self._partial = self._partial.removeprefix(_BYTE_ORDER_MARK)
        events = []
        for line in lines:
            if line:
                self._read_field(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        if len(self._partial) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def _read_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
