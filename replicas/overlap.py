"""Overlap: the next step is scheduled, packed and launched while the device still computes the last one.

    device   | step 1          | step 2          | step 3          |
    host      launch 1, launch 2, wait 1, update 1, launch 3, wait 2, update 2, ...

The tokens of a step are input of the next: they stay on the device. What the host learns one step late
(an end token, an error, an abort) makes a row of the step under way useless; its result is dropped. Its
write goes to a block that may have been freed since, before any later step can write there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from replicas.sequence import SequenceStatus
from replicas.step import Step, StepResult


class Launched(ABC):
    """A step under way."""

    @abstractmethod
    def result(self) -> StepResult:
        """Wait for the step. Once."""


class Launcher(ABC):
    """A runner that can begin a step without waiting for it. Steps run in the order of their launch."""

    @abstractmethod
    def launch(self, step: Step, previous: Launched | None) -> Launched:
        """Begin a step; returns at once.

        With `previous` each sequence continues with the token that it gets there, not known to it yet.
        """

    @abstractmethod
    def execute(self, step: Step) -> StepResult:
        """As a Runner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    step: Step
    launched: Launched


class Overlap:
    """A Runner that keeps one step under way behind the one it waits for."""

    def __init__(self, launcher: Launcher, look_ahead: Callable[[Step], Step | None]) -> None:
        """`look_ahead` returns what follows a step that is not finished; None = that cannot be said."""
        self._launcher = launcher
        self._look_ahead = look_ahead
        self._ahead: _Ahead | None = None

    @property
    def ahead(self) -> Step | None:
        """The step that is under way and must be executed next; None = whatever was scheduled."""
        if self._ahead is None:
            return None
        if all(entry.sequence.status is not SequenceStatus.RUNNING for entry in self._ahead.step.sequences):
            self._ahead = None  # all have ended or been aborted: nobody waits for it
            return None
        return self._ahead.step

    def execute(self, step: Step) -> StepResult:
        ahead, self._ahead = self._ahead, None
        launched = (
            ahead.launched if ahead is not None and ahead.step is step else self._launcher.launch(step, None)
        )
        following = self._look_ahead(step)
        behind = None
        if following is not None:
            behind = _Ahead(step=following, launched=self._launcher.launch(following, launched))
        result = launched.result()
        # Only now: if something was raised, the step behind was computed from nothing one can trust.
        self._ahead = behind
        return result
