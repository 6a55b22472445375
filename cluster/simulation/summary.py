"""Summary: the keys that `headway simulate` prints, of one run or of several seeds."""

import itertools
import math
import resource
import statistics
from collections.abc import Callable, Sequence
from typing import Final

from cluster.simulation.measures import TierMeasures
from cluster.simulation.world import Outcome
from router.tenants import Tier

T_975: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95% intervals, by degrees of freedom from 1 on; 1.96 beyond."""
DAY_S: Final = 86_400.0


def summary(outcomes: Sequence[Outcome], tiers: Sequence[Tier]) -> dict[str, object]:
    """Return the report's keys; several outcomes (one per seed) give means, and 95% intervals beside."""
    wall_s = sum(outcome.wall_s for outcome in outcomes)
    report: dict[str, object] = {
        "requests": sum(num_requests(outcome) for outcome in outcomes),
        "virtual_s": sum(outcome.virtual_s for outcome in outcomes),
        "wall_s": wall_s,
        "cpu_s": sum(outcome.cpu_s for outcome in outcomes),
        "events_per_s": sum(outcome.num_events for outcome in outcomes) / wall_s,
        "steps_per_s": sum(outcome.num_steps for outcome in outcomes) / wall_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "attainment": {tier.name: _mean(outcomes, _attainment(tier.level)) for tier in tiers},
        "windows_met_fraction": _mean(outcomes, windows_met),
        "replica_hours": _mean(outcomes, lambda outcome: outcome.replica_s / 3600),
        "busy_fraction": _mean(outcomes, lambda outcome: outcome.busy_s / outcome.replica_s),
        "mean_open": _mean(outcomes, lambda outcome: outcome.mean_open),
        "direction_changes": _mean(outcomes, direction_changes),
        "tiers": {tier.name: _tier(outcomes, tier.level) for tier in tiers},
        "seeds": len(outcomes),
    }
    if len(outcomes) > 1:
        report["windows_met_fraction_ci95"] = interval([windows_met(outcome) for outcome in outcomes])
        report["attainment_ci95"] = {
            tier.name: interval([_attainment(tier.level)(outcome) for outcome in outcomes]) for tier in tiers
        }
    return report


def num_requests(outcome: Outcome) -> int:
    return sum(tier.requests for tier in outcome.measures.tiers.values())


def windows_met(outcome: Outcome) -> float:
    """Share of the minutes in which every tier met its targets."""
    return outcome.measures.windows_met(outcome.started_s, outcome.started_s + outcome.traffic_s)


def direction_changes(outcome: Outcome) -> int:
    """How often the number of wanted replicas turned from rising to falling or back."""
    moves = [after - before for (_, before), (_, after) in itertools.pairwise(outcome.targets)]
    signs = [move > 0 for move in moves if move]
    return sum(a != b for a, b in itertools.pairwise(signs))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean (Student's t)."""
    mean, count = statistics.fmean(values), len(values)
    t = T_975[count - 2] if count - 2 < len(T_975) else 1.96
    half = t * statistics.stdev(values) / math.sqrt(count)
    return mean - half, mean + half


def _attainment(level: int) -> Callable[[Outcome], float]:
    return lambda outcome: outcome.measures.tiers[level].attainment


def _mean(outcomes: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    return statistics.fmean(value(outcome) for outcome in outcomes)


def _tier(outcomes: Sequence[Outcome], level: int) -> dict[str, float]:
    def mean(value: Callable[[TierMeasures], float]) -> float:
        return _mean(outcomes, lambda outcome: value(outcome.measures.tiers[level]))

    return {
        "requests": mean(lambda tier: tier.requests),
        "refused": mean(lambda tier: tier.refused),
        "failed": mean(lambda tier: tier.failed),
        "cancelled": mean(lambda tier: tier.cancelled),
        "ttft_ms_mean": mean(lambda tier: tier.ttft.mean * 1e3),
        "ttft_ms_p50": mean(lambda tier: tier.ttft.quantile(0.5) * 1e3),
        "ttft_ms_p99": mean(lambda tier: tier.ttft.quantile(0.99) * 1e3),
        "itl_ms_p50": mean(lambda tier: tier.itl.quantile(0.5) * 1e3),
        "itl_ms_p99": mean(lambda tier: tier.itl.quantile(0.99) * 1e3),
        "itl_ms_max": mean(lambda tier: tier.itl.quantile(1.0) * 1e3),
        "itl_attainment": mean(lambda tier: tier.itl_attainment),
        "e2e_ms_mean": mean(lambda tier: tier.e2e.mean * 1e3),
        "e2e_ms_p50": mean(lambda tier: tier.e2e.quantile(0.5) * 1e3),
    }
