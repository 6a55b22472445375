"""Capacity: the highest rate of requests that one replica serves within its targets, by simulation."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from cluster.config import ClusterConfig
from cluster.simulation.fleet import Pace
from cluster.simulation.measures import ALLOWED
from cluster.simulation.profile import Profile
from cluster.simulation.traffic import Arrival
from cluster.simulation.world import Outcome, Scenario, simulate

PROBE_S: Final = 40.0
BISECTIONS: Final = 5
LIMIT_S: Final = 4000.0

Draw = Callable[[float, float], Iterator[Arrival]]
"""Arrivals at a rate, for so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one replica can take."""

    rate: float
    """Requests per second."""
    mean_open: float
    """Requests that are open at a time at that rate."""
    binding: str
    """What breaks first above it: ttft, itl, or refused where the queue grows."""


def capacity(config: ClusterConfig, profile: Profile, draw: Draw, most: float) -> Capacity:
    """Bisect up to `most` requests/s. A rate holds when every tier keeps both its p99 targets.

    Where replicas share a host, it is a host's rate, divided among them.
    """
    num_replicas = 1 if profile.shared_host is None else profile.shared_host.replicas
    low, high = 0.0, most
    held: Outcome | None = None
    binding = "none below the highest rate tried"
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        outcome = probe(config, profile, draw, middle * num_replicas, num_replicas)
        broken = broken_targets(outcome)
        if broken:
            high, binding = middle, broken[0]
        else:
            low, held = middle, outcome
    return Capacity(rate=low, mean_open=_mean_open(held) / num_replicas, binding=binding)


def probe(
    config: ClusterConfig, profile: Profile, draw: Draw, rate: float, num_replicas: int, *kills_at_s: float
) -> Outcome:
    """Serve PROBE_S of traffic at a rate with so many replicas."""
    scenario = Scenario(
        config=config,
        profile=profile,
        num_replicas=num_replicas,
        pace=Pace(cold_start_s=profile.cold_start_s),
        kills_at_s=kills_at_s,
    )
    return simulate(scenario, draw(rate, PROBE_S), LIMIT_S)


def broken_targets(outcome: Outcome) -> list[str]:
    """Return which p99 targets some tier did not keep, the worst first."""
    worst: dict[str, float] = {}
    for tier in outcome.measures.tiers.values():
        missed = 1 - tier.attainment
        refused = tier.refused / tier.requests if tier.requests else 0.0
        kind = "refused" if refused > missed / 2 else "ttft"
        for name, share in ((kind, missed), ("itl", 1 - tier.itl_attainment)):
            worst[name] = max(worst.get(name, 0.0), share)
    return sorted((name for name, share in worst.items() if share > ALLOWED), key=lambda n: -worst[n])


def _mean_open(outcome: Outcome | None) -> float:
    if outcome is None:
        return math.nan
    tiers = outcome.measures.tiers.values()
    return sum(tier.e2e.total for tier in tiers) / outcome.traffic_s
