"""Waker: asks for a replica while requests wait and none is there. The way back from zero."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final

from router.transport import ReplicaGoneError

CALL_S: Final = 10.0
"""So long one call waits; its waiting is what is counted, so it must not end early."""
RETRY_S: Final = 0.5

Wake = Callable[[], Awaitable[None]]
"""Wait until any replica answers: where there is none, whoever starts replicas sees somebody wait. Raises
ReplicaGoneError when it meets one that is going."""


class Waker:
    """Calls `wake` from when it is needed until it is not. One event loop only."""

    def __init__(self, wake: Wake | None, is_needed: Callable[[], bool]) -> None:
        """Without `wake` there is nobody to ask."""
        self._wake = wake
        self._is_needed = is_needed
        self._task: asyncio.Task[None] | None = None

    @property
    def can_call(self) -> bool:
        return self._wake is not None

    def check(self) -> None:
        """Begin to call if that is needed now, or cease. Call when something may have changed."""
        is_calling = self._task is not None and not self._task.done()
        if self._wake is not None and self._is_needed() and not is_calling:
            # An empty context: the call must not belong to the request that made it necessary.
            self._task = asyncio.get_running_loop().create_task(self._call(self._wake), context=Context())
        elif is_calling and not self._is_needed():
            self.close()

    def close(self) -> None:
        """Cease. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _call(self, wake: Wake) -> None:
        while self._is_needed():
            try:
                async with asyncio.timeout(CALL_S):
                    await wake()
            except (ReplicaGoneError, TimeoutError):
                pass
            await asyncio.sleep(RETRY_S)  # what answered, or failed, is known as gone by then
