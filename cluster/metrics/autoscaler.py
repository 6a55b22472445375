"""The autoscaler's figures: its last decision, and how often each reason had a part in one."""

from collections import Counter

from cluster.autoscaling import Decision, Observation
from cluster.autoscaling_needs import signals
from cluster.metrics import catalogue as c
from cluster.metrics.catalogue import Sample


class DecisionFigures:
    """Of one deployment."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._latest: tuple[Sample, ...] = ()

    def note(self, observation: Observation, decision: Decision) -> None:
        """A decision was made."""
        self._reasons.update({reason.code.value for reason in decision.reasons})
        self._latest = (
            Sample(c.TARGET_REPLICAS, (), decision.target),
            Sample(c.RUNNING_REPLICAS, (), observation.running),
            *(Sample(c.LOAD_REPLICAS, (signal,), load) for signal, load in signals(decision.loads).items()),
        )

    def samples(self) -> list[Sample]:
        """All figures as they are now."""
        return [
            *self._latest,
            *(Sample(c.SCALING_REASONS, (reason,), number) for reason, number in self._reasons.items()),
        ]
