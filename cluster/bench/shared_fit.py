"""Shared fit: what steps take alone, and how much neighbours slow them, from logs of one host. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.bench.step_log import LoggedStep
from cluster.simulation.fit import fit, noise_of
from cluster.simulation.profile import Noise, StepTimes

MOST_SLOWDOWN: Final = 3.0
PRECISION: Final = 0.01
"""Of the slowdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFit:
    """Step times of a replica that is alone on its host, and the slowdown of profile.SharedHost."""

    steps: StepTimes
    slowdown: float
    noise: Noise
    error: float
    """Mean deviation of a step, as a share of what this says."""


def fit_shared(logs: Sequence[Sequence[LoggedStep]]) -> SharedFit:
    """Fit to the logs of all replicas of a host: the slowdown with which steps deviate least from each other.

    It takes steps without neighbours and steps beside them. Ternary search: O(log) fits.
    """
    beside = [time_beside(logs, number) for number in range(len(logs))]
    shapes = [step.shape for log in logs for step in log]
    times = np.concatenate(beside)

    def fitted(slowdown: float) -> SharedFit:
        alone_s = (times / (1.0 + slowdown * np.arange(times.shape[1]))).sum(axis=1)
        found = fit(shapes, alone_s.tolist())
        expected_s = np.array([found.seconds(shape) for shape in shapes])
        error = float(np.abs(alone_s / expected_s - 1.0).mean())
        noise = noise_of(found, shapes, alone_s.tolist())
        return SharedFit(steps=found, slowdown=slowdown, noise=noise, error=error)

    low, high = 0.0, MOST_SLOWDOWN
    while high - low > PRECISION:
        third = (high - low) / 3
        if fitted(low + third).error <= fitted(high - third).error:
            high -= third
        else:
            low += third
    return fitted((low + high) / 2)


def time_beside(
    logs: Sequence[Sequence[LoggedStep]], number: int
) -> NDArray[np.float64]:  # [steps, replicas]
    """Return for each step of log `number` how long 0, 1, ... other replicas were in a step meanwhile."""
    others = [step for i, log in enumerate(logs) if i != number for step in log]
    edges = [(step.ended_at - step.seconds, 1) for step in others] + [(step.ended_at, -1) for step in others]
    # Before and after all others nobody works; a step that ends as the next begins leaves no gap.
    edges.sort(key=lambda edge: (edge[0], -edge[1]))
    at = np.array([edge[0] for edge in edges] or [0.0])
    count = np.cumsum([edge[1] for edge in edges] or [0])
    ends = np.array([step.ended_at for step in logs[number]])
    starts = ends - np.array([step.seconds for step in logs[number]])
    found = np.zeros((len(ends), len(logs)))
    for busy in range(1, len(logs)):
        # Seconds until each edge in which exactly so many were busy.
        passed = np.concatenate(([0.0], np.cumsum(np.diff(at) * (count[:-1] == busy))))
        found[:, busy] = np.interp(ends, at, passed) - np.interp(starts, at, passed)
    found[:, 0] = ends - starts - found.sum(axis=1)
    return found
