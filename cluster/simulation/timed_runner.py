"""TimedRunner: a runner that computes nothing and says how long it would have taken."""

from collections.abc import Callable

from replicas.step import Step, StepResult
from replicas.step_time import StepShape

TOKEN_ID = 1
"""What it says for every token; no vocabulary ends with it here."""


class TimedRunner:
    """Moves a clock of its own by the time of each step. For one engine that is driven step by step."""

    def __init__(self, seconds: Callable[[StepShape], float]) -> None:
        self.now = 0.0
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def execute(self, step: Step) -> StepResult:
        self.now += self._seconds(step.shape)
        return StepResult(token_ids=[TOKEN_ID if entry.samples else None for entry in step.sequences])
