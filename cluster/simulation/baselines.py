"""Baselines: how others decide on the number of replicas, as they describe it, in the simulator's terms.

Each takes what it may watch from a View every five seconds. Concurrency is requests that are open at the
routers, waiting ones included. Defaults are those of the projects; thresholds that a user must choose
come as arguments.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from cluster.simulation.scaling import TICK_S, View


class Recent:
    """Values of the last seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        self._values.append((now, value))
        while self._values[0][0] <= now - self._span_s:
            self._values.popleft()

    @property
    def mean(self) -> float:
        return sum(value for _, value in self._values) / len(self._values)

    @property
    def highest(self) -> float:
        return max(value for _, value in self._values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How few and how many."""

    low: int
    high: int

    def clip(self, wanted: float) -> int:
        return max(self.low, min(self.high, math.ceil(wanted - 1e-9)))


class RayDefault:
    """Ray Serve's default policy: ongoing requests against a target for each replica, with delays.

    Source: Ray Serve 2.60, replica_queue_length_autoscaling_policy (look-back 30 s, up after 30 s, down
    after 600 s).
    """

    UP_DELAY_S: Final = 30.0
    DOWN_DELAY_S: Final = 600.0

    def __init__(self, bounds: Bounds, target_ongoing: float) -> None:
        self._bounds = bounds
        self._target_ongoing = target_ongoing
        self._ongoing = Recent(30.0)
        self._direction = 0
        self._since = 0.0

    def decide(self, view: View) -> int:
        self._ongoing.add(view.now, view.num_open)
        target = view.fleet.target
        wanted = self._bounds.clip(self._ongoing.mean / self._target_ongoing)
        direction = (wanted > target) - (wanted < target)
        if direction != self._direction:
            self._direction, self._since = direction, view.now
        delay_s = self.UP_DELAY_S if direction > 0 else self.DOWN_DELAY_S
        return wanted if direction and view.now - self._since >= delay_s else target


class TtftThreshold:
    """One more when the last minute's first tokens are too late, one fewer when all are early for long."""

    COOLDOWN_S: Final = 60.0
    CALM_S: Final = 300.0
    EARLY: Final = 0.5

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._slowest = Recent(60.0)
        self._acted_at = -math.inf
        self._calm_since = 0.0

    def decide(self, view: View) -> int:
        ratio = view.take_slowest_ttft()
        self._slowest.add(view.now, ratio)
        if ratio > self.EARLY:
            self._calm_since = view.now
        target = view.fleet.target
        if view.now - self._acted_at < self.COOLDOWN_S:
            return target
        change = 0
        if self._slowest.highest > 1.0:
            change = 1
        elif view.now - self._calm_since >= self.CALM_S:
            change = -1
        if change:
            self._acted_at = view.now
        return self._bounds.clip(target + change)


class Hpa:
    """Kubernetes' HorizontalPodAutoscaler on running sequences for each replica.

    Source: kubernetes.io, "Horizontal Pod Autoscaling" (v2 defaults): every 15 s, tolerance 10%, up at most
    twofold or by four, down to the highest recommendation of five minutes.
    """

    PERIOD_S: Final = 15.0
    TOLERANCE: Final = 0.1

    def __init__(self, bounds: Bounds, target_running: float) -> None:
        self._bounds = bounds
        self._target_running = target_running
        self._wanted = Recent(300.0)
        self._asked_at = -math.inf

    def decide(self, view: View) -> int:
        current = view.fleet.target
        if view.now - self._asked_at < self.PERIOD_S:
            return current
        self._asked_at = view.now
        running = max(1, len(view.fleet.running))
        ratio = view.num_open / running / self._target_running
        wanted = current if abs(ratio - 1) <= self.TOLERANCE else self._bounds.clip(running * ratio)
        self._wanted.add(view.now, wanted)
        return self._bounds.clip(min(self._wanted.highest, max(2 * current, current + 4)))


class Kpa:
    """Knative's autoscaler on concurrency: a stable window of 60 s, and panic over 6 s.

    Source: knative.dev, "Configuring the Autoscaler" (70% of the target, panic at twice the capacity, at
    most halved at a time).
    """

    UTILISATION: Final = 0.7
    PANIC: Final = 2.0
    PANIC_S: Final = 60.0

    def __init__(self, bounds: Bounds, target_open: float) -> None:
        self._bounds = bounds
        self._target_open = target_open * self.UTILISATION
        self._stable, self._burst = Recent(60.0), Recent(6.0)
        self._panics_since = -math.inf

    def decide(self, view: View) -> int:
        self._stable.add(view.now, view.num_open)
        self._burst.add(view.now, view.num_open)
        running = max(1, len(view.fleet.running))
        stable = self._bounds.clip(self._stable.mean / self._target_open)
        burst = self._bounds.clip(self._burst.mean / self._target_open)
        if burst >= self.PANIC * running:
            self._panics_since = view.now
        if view.now - self._panics_since < self.PANIC_S:
            return max(burst, view.fleet.target)
        return self._bounds.clip(max(stable, running / 2))


class Dynamo:
    """NVIDIA Dynamo's SLA planner: the last interval's demand over profiled throughputs.

    Source: ai-dynamo docs, "SLA-based planner": interval 180 s, constant predictor, prefill and decode
    throughput from profiling at the SLA. Both on one replica here, and without its correction factors.
    """

    PERIOD_S: Final = 180.0

    def __init__(self, bounds: Bounds, input_tokens_per_s: float, output_tokens_per_s: float) -> None:
        self._bounds = bounds
        self._input_tokens_per_s = input_tokens_per_s
        self._output_tokens_per_s = output_tokens_per_s
        self._asked_at = 0.0
        self._before = (0, 0)

    def decide(self, view: View) -> int:
        span_s = view.now - self._asked_at
        if span_s < self.PERIOD_S - TICK_S / 2:
            return view.fleet.target
        asked = view.clients.input_tokens, view.clients.output_tokens
        work_s = (asked[0] - self._before[0]) / self._input_tokens_per_s
        work_s += (asked[1] - self._before[1]) / self._output_tokens_per_s
        self._asked_at, self._before = view.now, asked
        return self._bounds.clip(work_s / span_s)


class Planned:
    """Known beforehand: what an oracle would do, replicas by TICK_S."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def decide(self, view: View) -> int:
        return self._counts[min(len(self._counts) - 1, int(view.now / TICK_S))]
