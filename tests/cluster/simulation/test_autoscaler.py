import dataclasses

import pytest

from cluster.autoscaling_policy import Policy
from cluster.simulation.autoscaler import SlaScaler
from cluster.simulation.fleet import Pace
from cluster.simulation.summary import direction_changes
from cluster.simulation.world import Outcome, simulate
from tests.cluster.simulation.small_world import TIERS, scenario, traffic

COLD_START_S = 10.0


def scaled(rate: float, first: int, seconds: float) -> Outcome:
    policy = Policy(min_replicas=1, max_replicas=6, tiers=TIERS, cold_start_s=COLD_START_S)
    begin = dataclasses.replace(scenario(num_replicas=first), pace=Pace(cold_start_s=COLD_START_S))
    return simulate(begin, traffic(rate, seconds), seconds + 1000, SlaScaler(policy))


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_constant_load_makes_no_turns_once_the_number_is_found(rate: float) -> None:
    outcome = scaled(rate, 1, 150.0)
    assert direction_changes(outcome) <= 1


def test_no_stream_fails_when_replicas_go() -> None:
    outcome = scaled(2.0, 3, 120.0)
    assert outcome.targets[-1][1] < 3
    assert all(tier.failed == tier.refused == 0 for tier in outcome.measures.tiers.values())
