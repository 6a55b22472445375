"""Judgement: what came of scaling policies on stretches of a record, and how sure that is. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.simulation.measures import WINDOW_S
from cluster.simulation.summary import DAY_S, direction_changes
from cluster.simulation.world import Outcome

Z_95: Final = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One policy on one stretch."""

    minutes: int
    """Whole ones after the warm-up."""
    met: int
    """Of these, in which every tier met both targets."""
    replica_s: float
    """Of the whole stretch, as the changes are."""
    direction_changes: int
    requests: int
    refused: int
    seconds: float

    @classmethod
    def of(cls, outcome: Outcome, warm_up_s: float) -> "Judgement":
        since_s, until_s = outcome.started_s + warm_up_s, outcome.started_s + outcome.traffic_s
        minutes = max(0, int(until_s / WINDOW_S) - math.ceil(since_s / WINDOW_S))
        share = outcome.measures.windows_met(since_s, until_s) if minutes else 0.0
        tiers = outcome.measures.tiers.values()
        return cls(
            minutes=minutes,
            met=round(share * minutes),
            replica_s=outcome.replica_s,
            direction_changes=direction_changes(outcome),
            requests=sum(tier.requests for tier in tiers),
            refused=sum(tier.refused for tier in tiers),
            seconds=outcome.traffic_s,
        )


def score(judgements: Sequence[Judgement], oracle: Sequence[Judgement]) -> dict[str, object]:
    """Return a policy's figures over all stretches, beside those of the oracle on the same ones."""
    minutes = sum(one.minutes for one in judgements)
    met = sum(one.met for one in judgements)
    replica_s = sum(one.replica_s for one in judgements)
    return {
        "windows_met_fraction": met / max(1, minutes),
        "windows_met_ci95": wilson(met, minutes),
        "windows_met_standard_error": standard_error(judgements),
        "minutes_judged": minutes,
        "replica_hours": replica_s / 3600,
        "replica_hours_over_oracle": replica_s / sum(one.replica_s for one in oracle),
        "direction_changes_per_day": sum(one.direction_changes for one in judgements)
        / sum(one.seconds for one in judgements)
        * DAY_S,
        "refused_fraction": sum(one.refused for one in judgements)
        / max(1, sum(one.requests for one in judgements)),
    }


def standard_error(judgements: Sequence[Judgement]) -> float:
    """Of the share of minutes met, from how the stretches differ: minutes of one are alike. NaN for one."""
    if len(judgements) < 2:
        return math.nan
    return statistics.stdev(one.met / max(1, one.minutes) for one in judgements) / math.sqrt(len(judgements))


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95% interval of a share of independent trials (Wilson 1927): says something where all have hit, too."""
    if not count:
        return (0.0, 1.0)
    share, square = hits / count, Z_95**2 / count
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return (max(0.0, middle - half), min(1.0, middle + half))
