"""Tool calls in an answer's text: found while it arrives, their arguments passed on as they come."""

import enum
import json
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from router.tool_formats import ToolFormat

_WHITE: Final = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of an answer: text, or something of a call."""

    text: str = ""
    call: int | None = None
    """Which call; None = text."""
    name: str | None = None
    """With the first piece of a call."""
    arguments: str = ""


class _Place(enum.Enum):
    TEXT = "text"
    BETWEEN = "between"
    """Where a call may begin."""
    HEAD = "head"
    """In a call, before its arguments."""
    ARGUMENTS = "arguments"
    TAIL = "tail"
    """In a call, after its arguments."""


class ToolCallParser:
    """Splits the text of one output into text and calls.

    What looks like a call and is none (no JSON object, an unknown name) is text, as it came. A call whose
    name comes first is passed on as it arrives, any other when it is complete.
    """

    def __init__(self, form: ToolFormat, names: AbstractSet[str], *, parallel: bool) -> None:
        self.num_calls = 0
        self._form = form
        self._names = names
        self._most = None if parallel else 1
        self._header = re.compile(
            r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
        )
        self._place = _Place.TEXT if form.opening else _Place.BETWEEN
        self._buffer = ""  # not yet passed on
        self._skipped = ""  # markers and separators before a possible call
        self._end = _ObjectEnd()

    def feed(self, text: str) -> list[Part]:
        """Take the next text; return what is certain by now."""
        self._buffer += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """End the output."""
        rest = self._buffer
        place, self._buffer = self._place, ""
        if place is _Place.HEAD:
            return [Part(text=self._skipped + rest)]
        if place is _Place.TEXT and (rest.strip() or (rest and not self.num_calls)):
            return [Part(text=rest)]
        if place is _Place.BETWEEN and not self.num_calls and rest + self._skipped:
            return [Part(text=self._skipped + rest)]
        return []

    def _advance(self, parts: list[Part]) -> bool:
        """Consume what can be; False = more text is needed."""
        steps = {
            _Place.TEXT: self._in_text,
            _Place.BETWEEN: self._between,
            _Place.HEAD: self._in_head,
            _Place.ARGUMENTS: self._in_arguments,
            _Place.TAIL: self._in_tail,
        }
        return bool(self._buffer) and steps[self._place](parts)

    def _in_text(self, parts: list[Part]) -> bool:
        opening = self._form.opening
        if opening and (at := self._buffer.find(opening)) >= 0 and self._may_call:
            before = self._buffer[:at]
            if before.strip():
                parts.append(Part(text=before.rstrip(_WHITE)))
            self._skipped = before[len(before.rstrip(_WHITE)) :] + opening
            self._buffer = self._buffer[at + len(opening) :]
            self._place = _Place.BETWEEN
            return True
        # White space before a call is not text, and an opening may have begun.
        kept = self._buffer
        if opening and self._may_call:
            kept = kept[: len(kept) - _overlap(kept, opening)].rstrip(_WHITE)
        if kept:
            parts.append(Part(text=kept))
            self._buffer = self._buffer[len(kept) :]
        return False

    def _between(self, parts: list[Part]) -> bool:
        rest = self._buffer.lstrip(self._form.separators)
        self._skipped += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if not rest:
            return False
        closing = self._form.closing
        if closing and closing.startswith(rest[: len(closing)]) and self.num_calls:
            if len(rest) < len(closing):
                return False
            self._buffer, self._skipped = rest[len(closing) :].lstrip(_WHITE), ""
            self._place = _Place.TEXT
            return True
        if rest[0] == "{" and self._may_call:
            self._place, self._end = _Place.HEAD, _ObjectEnd()
            return True
        self._place = _Place.TEXT
        if self._skipped and (not self.num_calls or self._skipped.strip(self._form.separators)):
            parts.append(Part(text=self._skipped))
        self._skipped = ""
        return True

    def _in_head(self, parts: list[Part]) -> bool:
        found = self._header.match(self._buffer)
        if found is not None and (name := json.loads(found[1])) in self._names:
            parts.append(Part(call=self.num_calls, name=name))
            self._buffer = self._buffer[found.end() :]
            self._place, self._end = _Place.ARGUMENTS, _ObjectEnd()
            return True
        end = _ObjectEnd().find(self._buffer)
        if end is None:
            return False
        if not self._whole_call(parts, self._buffer[:end]):
            self._give_up(parts, end)
            return True
        self._buffer, self._skipped = self._buffer[end:], ""
        self._place = _Place.BETWEEN
        return True

    def _whole_call(self, parts: list[Part], text: str) -> bool:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        arguments = value.get("arguments", value.get("parameters", {}))
        if value.get("name") not in self._names or not isinstance(arguments, dict):
            return False
        written = json.dumps(arguments, ensure_ascii=False)
        parts.append(Part(call=self.num_calls, name=value["name"], arguments=written))
        self.num_calls += 1
        return True

    def _give_up(self, parts: list[Part], end: int) -> None:
        """What seemed to be a call is text."""
        parts.append(Part(text=self._skipped + self._buffer[:end]))
        self._buffer, self._skipped = self._buffer[end:], ""
        self._place = _Place.TEXT

    def _in_arguments(self, parts: list[Part]) -> bool:
        end = self._end.find(self._buffer)
        taken = len(self._buffer) if end is None else end
        parts.append(Part(call=self.num_calls, arguments=self._buffer[:taken]))
        self._buffer = self._buffer[taken:]
        if end is not None:
            self.num_calls += 1
            self._place = _Place.TAIL
        return True

    def _in_tail(self, parts: list[Part]) -> bool:  # noqa: ARG002 - a step; what follows is no text
        at = self._buffer.find("}")
        self._buffer = "" if at < 0 else self._buffer[at + 1 :]
        if at >= 0:
            self._place, self._skipped = _Place.BETWEEN, ""
        return True

    @property
    def _may_call(self) -> bool:
        return self._most is None or self.num_calls < self._most


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the place after the brace that closes the object; None = not in this piece."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return None


def _overlap(text: str, word: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `word`."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0)
