"""StepFeed: the event stream of the live page: steps of the replicas as they pass, and the board.

Replicas record steps only while they are asked, and every page asks for itself: what a slow page does not
fetch is dropped where it was recorded, and costs neither router nor replica memory.
"""

import asyncio
import contextlib
from contextvars import Context
from typing import Final, Literal, Protocol

import msgspec

from replicas.step_record import StepNews, StepWatch
from router import sse
from router.board import Board
from router.errors import ApiError
from router.http import Exchange
from router.transport import ReplicaGoneError

POLL_INTERVAL_S: Final = 0.2
BOARD_INTERVAL_S: Final = 1.0
POLL_TIMEOUT_S: Final = 1.0
MAX_STREAM_S: Final = 60.0
"""The page asks again then: an open stream holds up the end of a router that drains."""
MAX_PAGES: Final = 4
"""That one router serves at a time: each costs the engines some."""
MAX_REPLICAS: Final = 8
"""Whose steps one page sees: the first ones by name. The board has all."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StepNews).decode


class StepSource(Protocol):
    """The carrier's part in it."""

    async def steps(self, replica: str, watch: bytes) -> bytes:
        """Deliver a StepWatch, return the StepNews. Raises ReplicaGoneError."""
        ...


class StepsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What came from each replica since the last event; those without steps are left out."""

    kind: Literal["steps"] = "steps"
    replicas: dict[str, StepNews]


class StepFeed:
    """Serves GET /ui/events. One event loop."""

    def __init__(self, source: StepSource, board: Board) -> None:
        self._source = source
        self._board = board
        self._num_pages = 0

    async def serve(self, exchange: Exchange) -> None:
        """Stream events until the client leaves or MAX_STREAM_S. Raises ApiError 429, ClientGoneError."""
        if self._num_pages >= MAX_PAGES:
            raise ApiError(
                429, f"{MAX_PAGES} pages watch this router already", code="too_many_pages", retry_after_s=10
            )
        self._num_pages += 1
        gone = asyncio.Event()
        exchange.watch(gone.set)
        try:
            await self._send(exchange, gone)
        finally:
            exchange.close()
            self._num_pages -= 1

    async def _send(self, exchange: Exchange, gone: asyncio.Event) -> None:
        now = asyncio.get_running_loop().time
        ends_at = now() + MAX_STREAM_S
        board_at = now()
        cursors: dict[str, int] = {}
        while not gone.is_set() and now() < ends_at:
            data = b""
            if now() >= board_at:
                data = sse.event(self._board.read())
                board_at = now() + BOARD_INTERVAL_S
            reports = await self._ask(cursors)
            if reports:
                data += sse.event(StepsEvent(replicas=reports))
            if data:
                await exchange.stream(data, sse.HEADERS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await gone.wait()
        if not gone.is_set():
            await exchange.end_stream(b"")

    async def _ask(self, cursors: dict[str, int]) -> dict[str, StepNews]:
        """Ask every replica for what came after its cursor; moves the cursors."""
        names = self._board.replicas()[:MAX_REPLICAS]
        for name in cursors.keys() - set(names):
            del cursors[name]
        # An empty context: calls made inside a Serve request would inherit its id and collide in Ray.
        loop = asyncio.get_running_loop()
        asked = [
            loop.create_task(self._ask_one(name, cursors.get(name, 0)), context=Context()) for name in names
        ]
        answers = dict(zip(names, await asyncio.gather(*asked), strict=True))
        reports = {name: report for name, report in answers.items() if report is not None}
        cursors |= {name: report.cursor for name, report in reports.items()}
        return {name: r for name, r in reports.items() if r.records or r.riders is not None}

    async def _ask_one(self, name: str, cursor: int) -> StepNews | None:
        """None when it did not answer; it is asked again."""
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                return _decode(await self._source.steps(name, _encode(StepWatch(cursor))))
        except (TimeoutError, ReplicaGoneError):
            return None
