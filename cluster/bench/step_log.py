"""Logs of steps: how long each took and when, to fit a profile to."""

import time
from collections.abc import Callable

import msgspec

from replicas.engine import Engine, StepReport
from replicas.step_time import SKIPPED_STEPS, StepShape


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an engine."""

    shape: StepShape
    seconds: float
    """What streams see of it: with scheduling, bookkeeping, and what came between it and the step before."""
    ended_at: float
    """On time.perf_counter, which on Linux is the same clock in all processes."""


def log_steps(engine: Engine, take: Callable[[LoggedStep], None]) -> None:
    """Give every step from now on to `take`, in the engine's thread; the first few are left out."""
    num_seen = 0

    def note(report: StepReport) -> None:
        nonlocal num_seen
        num_seen += 1
        step = engine.last_step
        if step is not None and num_seen > SKIPPED_STEPS:
            seconds = report.gap_s or report.step_s
            take(LoggedStep(shape=step.shape, seconds=seconds, ended_at=time.perf_counter()))

    engine.watch(note)
