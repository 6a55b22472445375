"""An event loop on virtual time: sleeps and timeouts take none, and their order is exact."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Goes on to the next timer when nothing is ready. No files, no sockets, no threads.

    Timers of one moment run in the order in which they were set. It replaces what `BaseEventLoop` does in
    each round, because looking for input and comparing handles would be a tenth of a simulation's time.
    """

    _ready: deque[asyncio.Handle]

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.num_turns = 0
        """Rounds of callbacks so far: what a simulation calls events."""
        self._now = 0.0
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap
        self._numbers = itertools.count()

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _run_once(self) -> None:
        self.num_turns += 1
        ready = self._ready
        if not ready:
            self._advance()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _advance(self) -> None:
        """Move on to the next moment for which something is set, and make that ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise RuntimeError("deadlock: nothing is ready and no timer is set")
        self._now = max(self._now, timers[0][0])
        if self._now > self._limit_s:
            raise RuntimeError(f"still waiting after {self._limit_s} s of virtual time")
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def _write_to_self(self) -> None:
        """Nobody sleeps here who would have to be woken."""


def run(main: Coroutine[Any, Any, Result], limit_s: float = 600.0) -> Result:
    """Run to completion on a loop of its own, starting at time 0.

    What is still waiting at `limit_s` waits for ever: RuntimeError.
    """
    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, limit_s)) as runner:
        return runner.run(main)
