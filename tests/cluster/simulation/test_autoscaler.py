import dataclasses
import math

import msgspec
import pytest

from cluster.autoscaling_policy import Policy
from cluster.simulation.autoscaler import SlaScaler
from cluster.simulation.fleet import Pace
from cluster.simulation.profile import Profile, StepTimes
from cluster.simulation.summary import direction_changes
from cluster.simulation.world import Outcome, simulate
from tests.cluster.simulation.small_world import PROFILE, TIERS, scenario, traffic

COLD_START_S = 10.0


SLOW = msgspec.structs.replace(
    PROFILE,
    steps=StepTimes.linear(
        step_s=0.02, new_token_s=1e-4, query_key_pair_s=1e-8, read_token_s=1e-6, sample_s=1e-4
    ),
)
CAPACITY = 4.5
"""Requests/s that one replica of this profile takes (cluster.simulation.capacity)."""


def scaled(rate: float, first: int, seconds: float, profile: Profile = PROFILE) -> Outcome:
    policy = Policy(min_replicas=1, max_replicas=6, tiers=TIERS, cold_start_s=COLD_START_S)
    begin = dataclasses.replace(
        scenario(num_replicas=first), pace=Pace(cold_start_s=COLD_START_S), profile=profile
    )
    return simulate(begin, traffic(rate, seconds), seconds + 1000, SlaScaler(policy))


@pytest.mark.parametrize(("percent", "first"), [(10, 3), (50, 1), (70, 3), (90, 1), (110, 3), (150, 1)])
def test_constant_load_makes_no_turns_at_any_level(percent: int, first: int) -> None:
    outcome = scaled(percent / 100 * CAPACITY, first, 180.0, SLOW)
    assert direction_changes(outcome) == 0
    assert outcome.targets[-1][1] >= math.ceil(percent / 100)


def test_no_stream_fails_when_replicas_go() -> None:
    outcome = scaled(2.0, 3, 120.0)
    assert outcome.targets[-1][1] < 3
    assert all(tier.failed == tier.refused == 0 for tier in outcome.measures.tiers.values())
