"""StallWatch: ends a task that has tried for too long to hand over one and the same thing."""

import asyncio
from typing import Final

NUM_CHECKS: Final = 4
"""Within the limit. A stall is noticed at most a fourth of the limit late."""


class StallWatch:
    """A timeout for each of many short waits of one task, with one timer for all of them: `asyncio.timeout`
    around each costs a router as much as a seventh of a streamed token. For one event loop."""

    def __init__(self, limit_s: float) -> None:
        self._interval_s = limit_s / NUM_CHECKS
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_waiting = False
        self._num_begun = 0
        self._num_checks = 0
        """In a row that have found the same wait."""
        self._has_ended = False

    def begin(self) -> None:
        """The current task, always the same one, waits from now on."""
        self._is_waiting = True
        self._num_begun += 1
        if self._timer is None:
            self._task = asyncio.current_task()
            self._check_later()

    def end(self) -> None:
        """It has what it waited for."""
        self._is_waiting = False

    def has_cancelled(self) -> bool:
        """Whether a CancelledError that ended the wait is this watch's doing, and nobody else's. It is no
        cancellation of the task any more then."""
        return self._has_ended and self._task is not None and self._task.uncancel() == 0

    def close(self) -> None:
        """Watch no longer, until the next `begin`. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._check, self._num_begun)

    def _check(self, num_begun: int) -> None:
        is_same = self._is_waiting and num_begun == self._num_begun
        self._num_checks = self._num_checks + 1 if is_same else 0
        if self._num_checks < NUM_CHECKS:
            self._check_later()
        elif self._task is not None:
            self._has_ended = True
            self._task.cancel()
