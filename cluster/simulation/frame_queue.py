"""FrameQueue: a step stream within the process."""

import asyncio
from collections.abc import AsyncIterator, Callable

from router.transport import FrameStream


class FrameQueue(FrameStream):
    """Frames on their way to one router; each arrives `delay_s` after it was put."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.cancelled: Callable[[], None] = lambda: None
        """Called when the router ends the stream."""
        self._delay_s = delay_s
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, frame: bytes | None) -> None:
        """Hand over a frame; None ends the stream."""
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._queue.put_nowait, frame)
        else:
            self._queue.put_nowait(frame)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (frame := await self._queue.get()) is not None:
            yield frame

    def cancel(self) -> None:
        self.cancelled()
