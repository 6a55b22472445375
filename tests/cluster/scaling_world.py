"""A deployment in a few lines of arithmetic, to close the loop around `cluster.autoscaling.decide`."""

import itertools
from collections import deque
from dataclasses import dataclass, field
from random import Random

from cluster.autoscaling import Decision, Observation, ReplicaReport, State, decide
from cluster.autoscaling_policy import Policy
from router.counters import TTFT_EDGES_MS, RouterCounters, TierCounters
from router.tenants import Tier

SPEED = 1000.0
"""Prompt tokens that one replica computes per second; there are no output tokens."""
TOKENS = 100
"""Of a prompt."""
TIER = Tier(name="interactive", level=0, ttft_target_ms=2000.0)


@dataclass
class World:
    """Replicas that drain one queue; refuses what would wait longer than the target, as admission does."""

    policy: Policy
    cold_start_s: float = 60.0
    interval_s: float = 5.0
    now: float = 1000.0
    target: int = 1
    running: int = 1
    state: State = field(default_factory=State)
    starts: deque[float] = field(default_factory=deque)
    queued: float = 0.0
    counters: TierCounters = field(default_factory=lambda: TierCounters(0))
    number: int = 0
    targets: list[int] = field(default_factory=list)

    def tick(self, load: float) -> Decision:
        """One interval at a demand of `load` replicas' whole time, then a decision."""
        self.now += self.interval_s
        while self.starts and self.starts[0] <= self.now:
            self.starts.popleft()
            self.running += 1
        asked = round(load * SPEED * self.interval_s / TOKENS)
        self.queued += asked * TOKENS
        self.queued = max(0.0, self.queued - self.running * SPEED * self.interval_s)
        most = self.running * SPEED * 2.0
        num_refused = round(max(0.0, self.queued - most) / TOKENS)
        self.queued -= num_refused * TOKENS
        self._count(asked, num_refused)
        decision = decide(self.observe(), self.state, self.policy, self.now)
        self.state = decision.state
        self._carry_out(decision.target)
        return decision

    def run(self, load: float, seconds: float) -> list[Decision]:
        return [self.tick(load) for _ in range(round(seconds / self.interval_s))]

    def run_random(self, load: float, seconds: float, draw: Random) -> None:
        """The same with arrivals at random (Poisson)."""
        mean = load * SPEED * self.interval_s / TOKENS
        for _ in range(round(seconds / self.interval_s)):
            at, number = draw.expovariate(mean), 0
            while at < 1.0:
                at, number = at + draw.expovariate(mean), number + 1
            self.tick(load * number / mean)

    def observe(self) -> Observation:
        self.number += 1
        reports = tuple(
            ReplicaReport(replica=f"r{i}", input_tokens_per_s=SPEED, cold_start_s=self.cold_start_s)
            for i in range(self.running)
        )
        routers = (RouterCounters("router", 1, self.number, (self.counters,)),)
        return Observation(target=self.target, running=self.running, routers=routers, replicas=reports)

    def _count(self, asked: int, num_refused: int) -> None:
        before = self.counters
        self.counters = TierCounters(
            0,
            num_requests=before.num_requests + asked,
            num_rejected=before.num_rejected + num_refused,
            input_tokens=before.input_tokens + asked * TOKENS,
            ttft=(before.num_requests + asked, *[0] * len(TTFT_EDGES_MS)),
            queued_input_tokens=round(self.queued),
        )

    def _carry_out(self, target: int) -> None:
        for _ in range(self.target, target):
            self.starts.append(self.now + self.cold_start_s)
        for _ in range(target, self.target):
            if self.starts:
                self.starts.pop()
            else:
                self.running -= 1
        self.target = target
        self.targets.append(target)


def world(**policy: float) -> World:
    return World(policy=Policy(**({"max_replicas": 8, "tiers": (TIER,)} | policy)))  # type: ignore[arg-type]


def num_turns(targets: list[int]) -> int:
    """How often the direction changes."""
    steps = [b - a for a, b in itertools.pairwise(targets) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(steps))
