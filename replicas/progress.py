"""How slow work reports itself."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, float | None], None]
"""progress(what is being done, share done in [0, 1]; None = unknown)."""


def silent(what: str, share: float | None) -> None:
    """Report nothing."""


class PhaseTimer:
    """A Progress that passes everything on, and measures how long each thing took."""

    def __init__(self, progress: Progress, first: str, clock: Callable[[], float]) -> None:
        """`first` is what is being done before anything is reported."""
        self._progress = progress
        self._clock = clock
        self._doing = first
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def __call__(self, what: str, share: float | None) -> None:
        if what != self._doing:
            self._close()
            self._doing = what
        self._progress(what, share)

    def finish(self) -> dict[str, float]:
        """Return the seconds of each phase, in order of their beginnings. Idempotent but for the last one."""
        self._close()
        return dict(self._seconds)

    def _close(self) -> None:
        now = self._clock()
        self._seconds[self._doing] = self._seconds.get(self._doing, 0.0) + now - self._since
        self._since = now
