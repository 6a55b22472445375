"""An event loop on virtual time: sleeps and timeouts take none, and their order is exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


MAX_S = 600.0
"""A test that is still waiting after so much virtual time waits for ever."""


class _Clock(selectors.DefaultSelector):
    """Instead of waiting for input, moves the time on to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is ready and no timer is set")
            self.now += timeout
            if self.now > MAX_S:
                raise RuntimeError(f"the test is still waiting after {MAX_S} s of virtual time")
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run to completion on a loop of its own, starting at time 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
