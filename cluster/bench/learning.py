"""LearningRunner: a runner that learns how long the steps of the one behind it take."""

import time

from replicas.step import Runner, Step, StepResult
from replicas.step_time import StepTimeModel


class LearningRunner:
    """Passes steps on. Not for engines that launch steps ahead."""

    def __init__(self, runner: Runner) -> None:
        self.step_time = StepTimeModel()
        self._runner = runner

    def execute(self, step: Step) -> StepResult:
        started_at = time.perf_counter()
        result = self._runner.execute(step)
        self.step_time.observe(step.shape, time.perf_counter() - started_at)
        return result
