"""Recorded traffic: rows of arrival, input and output lengths, prefix blocks, clients.

A trace is a CSV with a header. Columns: `input_tokens`, `output_tokens`; and, where known, `arrival_s`
(ascending), `hash_ids` (space-separated prefix block ids, `a-b` for ranges) and `client_id`.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from load.errors import LoadError, TraceError
from load.files import read_file

FOLDER: Final = Path(__file__).with_name("traces")
MOONCAKE_BLOCK_TOKENS: Final = 512
MAX_ROW_TOKENS: Final = 10_000_000
MAX_ROW_BLOCKS: Final = 1_000_000
_REQUIRED: Final = ("input_tokens", "output_tokens")
_KNOWN: Final = (*_REQUIRED, "arrival_s", "hash_ids", "client_id")


class TraceRow(msgspec.Struct, frozen=True, array_like=True):
    """One recorded request."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    client: str = ""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded requests in order of arrival."""

    name: str
    rows: tuple[TraceRow, ...]
    has_arrivals: bool
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    """Tokens that one prefix block stands for."""

    @property
    def rate(self) -> float:
        """Mean requests per second."""
        span_s = self.rows[-1].at_s - self.rows[0].at_s
        return (len(self.rows) - 1) / span_s if span_s > 0 else 0.0


def read_trace(name: str) -> Trace:
    """Read a file, or a bundled trace by its name. Raises LoadError, TraceError."""
    path = Path(name)
    if not path.exists():
        path = FOLDER / f"{name}.csv"
    if not path.exists():
        bundled = ", ".join(sorted(file.stem for file in FOLDER.glob("*.csv")))
        raise LoadError(f"cannot read the trace {name!r}: no such file, and bundled are {bundled} only")
    try:
        text = read_file(path, "the trace").decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"cannot read the trace {path}: {error}") from error
    return parse_trace(text, name)


def parse_trace(text: str, name: str) -> Trace:
    """Parse CSV text. Raises TraceError with line and column of the first mistake."""
    lines = text.splitlines()
    if not lines:
        raise TraceError(name, 1, 1, "the file is empty")
    columns = _header(lines[0], name)
    has_arrivals = "arrival_s" in columns
    rows: list[TraceRow] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        row = _RowParser(name, number, line, columns).parse()
        if rows and row.at_s < rows[-1].at_s:
            column = 1 + _offset(line, columns.index("arrival_s"))
            raise TraceError(name, number, column, f"arrival_s {row.at_s} is before the row above it")
        rows.append(row)
    if not rows:
        raise TraceError(name, len(lines), 1, "the trace has no rows")
    return Trace(name=name, rows=tuple(rows), has_arrivals=has_arrivals)


def _header(line: str, name: str) -> list[str]:
    columns = [column.strip() for column in line.split(",")]
    for i, column in enumerate(columns):
        if column not in _KNOWN or column in columns[:i]:
            problem = "appears twice" if column in columns[:i] else f"is not one of {', '.join(_KNOWN)}"
            raise TraceError(name, 1, 1 + _offset(line, i), f"the column {column!r} {problem}")
    for required in _REQUIRED:
        if required not in columns:
            raise TraceError(name, 1, 1, f"the header has no column {required}")
    return columns


def _offset(line: str, index: int) -> int:
    return sum(len(field) + 1 for field in line.split(",")[:index])


class _RowParser:
    """One line; knows where it is, so that a mistake can be shown."""

    def __init__(self, name: str, number: int, line: str, columns: list[str]) -> None:
        self._name = name
        self._number = number
        self._line = line
        self._columns = columns
        self._fields = line.split(",")

    def parse(self) -> TraceRow:
        if len(self._fields) != len(self._columns):
            problem = f"{len(self._fields)} fields, but the header has {len(self._columns)}"
            raise TraceError(self._name, self._number, len(self._line) + 1, problem)
        return TraceRow(
            at_s=self._seconds("arrival_s"),
            input_tokens=self._tokens("input_tokens"),
            output_tokens=self._tokens("output_tokens"),
            blocks=self._blocks("hash_ids"),
            client=self._text("client_id"),
        )

    def _text(self, column: str) -> str:
        return self._fields[self._columns.index(column)].strip() if column in self._columns else ""

    def _wrong(self, column: str, expected: str) -> TraceError:
        offset = 1 + _offset(self._line, self._columns.index(column))
        return TraceError(
            self._name, self._number, offset, f"{column} {self._text(column)[:40]!r} is not {expected}"
        )

    def _seconds(self, column: str) -> float:
        if column not in self._columns:
            return 0.0
        try:
            seconds = float(self._text(column))
        except ValueError:
            raise self._wrong(column, "a number of seconds") from None
        if not 0 <= seconds < 1e9:
            raise self._wrong(column, "between 0 and 1e9 seconds")
        return seconds

    def _tokens(self, column: str) -> int:
        text = self._text(column)
        if not (text.isascii() and text.isdigit() and len(text) < 19 and 1 <= int(text) <= MAX_ROW_TOKENS):
            raise self._wrong(column, f"a whole number from 1 to {MAX_ROW_TOKENS}")
        return int(text)

    def _blocks(self, column: str) -> tuple[int, ...]:
        blocks: list[int] = []
        for part in self._text(column).split():
            first, dash, last = part.partition("-")
            if not (first.isdigit() and (last.isdigit() if dash else True) and len(part) < 38):
                raise self._wrong(column, "block ids like 3 7-9")
            end = int(last or first)
            if end < int(first) or end - int(first) + len(blocks) >= MAX_ROW_BLOCKS:
                raise self._wrong(column, f"ascending ranges of at most {MAX_ROW_BLOCKS} blocks")
            blocks.extend(range(int(first), end + 1))
        return tuple(blocks)


def rescale(trace: Trace, *, rate_factor: float = 1.0, length_factor: float = 1.0) -> Trace:
    """Return the trace with gaps divided by `rate_factor` and lengths (and blocks) times `length_factor`.

    The first arrival moves to 0. Raises LoadError for factors that are not positive.
    """
    if not (0 < rate_factor < float("inf") and 0 < length_factor < float("inf")):
        raise LoadError(f"trace factors must be positive, not {rate_factor:g} and {length_factor:g}")
    first_s = trace.rows[0].at_s
    rows = tuple(
        TraceRow(
            (row.at_s - first_s) / rate_factor,
            max(1, round(row.input_tokens * length_factor)),
            max(1, round(row.output_tokens * length_factor)),
            row.blocks,
            row.client,
        )
        for row in trace.rows
    )
    block_tokens = max(1, round(trace.block_tokens * length_factor))
    return msgspec.structs.replace(trace, rows=rows, block_tokens=block_tokens)


def jittered(trace: Trace, jitter_s: float, rng: random.Random) -> Trace:
    """Return the trace with uniform(0, jitter_s) added to each arrival.

    Mooncake stamps arrivals every 3 s: bursts below that are an artefact of the recording.
    """
    moved = (msgspec.structs.replace(row, at_s=row.at_s + rng.uniform(0.0, jitter_s)) for row in trace.rows)
    return msgspec.structs.replace(trace, rows=tuple(sorted(moved, key=lambda row: row.at_s)))


def cut(trace: Trace, *, duration_s: float, max_total_tokens: int | None) -> Trace:
    """Return the rows that arrive within `duration_s` and fit `max_total_tokens`.

    Raises LoadError when none do.
    """
    rows = tuple(_fitting(trace.rows, duration_s, max_total_tokens))
    if not rows:
        raise LoadError(f"no row of {trace.name} arrives within {duration_s:g} s and fits the token limit")
    return msgspec.structs.replace(trace, rows=rows)


def _fitting(rows: tuple[TraceRow, ...], duration_s: float, most: int | None) -> Iterator[TraceRow]:
    for row in rows:
        if row.at_s <= duration_s and (most is None or row.input_tokens + row.output_tokens <= most):
            yield row
