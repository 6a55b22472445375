"""StepLog: how long every step of an engine took, to fit a profile to."""

from replicas.engine import Engine, StepReport
from replicas.step_time import SKIPPED_STEPS, StepShape


class StepLog:
    """Watches an engine: a step with its scheduling and bookkeeping, which is what streams see of it."""

    def __init__(self, engine: Engine) -> None:
        self.shapes: list[StepShape] = []
        self.seconds: list[float] = []
        self._engine = engine
        self._num_seen = 0
        engine.watch(self._note)

    def _note(self, report: StepReport) -> None:
        self._num_seen += 1
        step = self._engine.last_step
        if step is not None and self._num_seen > SKIPPED_STEPS:
            self.shapes.append(step.shape)
            self.seconds.append(report.step_s)
