"""An event loop on virtual time: sleeps and timeouts take none, and their order is exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Clock(selectors.DefaultSelector):
    """Instead of waiting for input, moves the time on to the next timer."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self.num_turns = 0
        self._limit_s = limit_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.num_turns += 1
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is ready and no timer is set")
            self.now += timeout
            if self.now > self._limit_s:
                raise RuntimeError(f"still waiting after {self._limit_s} s of virtual time")
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, limit_s: float) -> None:
        self._clock = _Clock(limit_s)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    @property
    def num_turns(self) -> int:
        """Rounds of callbacks so far: what a simulation calls events."""
        return self._clock.num_turns


def run(main: Coroutine[Any, Any, Result], limit_s: float = 600.0) -> Result:
    """Run to completion on a loop of its own, starting at time 0.

    What is still waiting at `limit_s` waits for ever: RuntimeError.
    """
    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, limit_s)) as runner:
        return runner.run(main)
