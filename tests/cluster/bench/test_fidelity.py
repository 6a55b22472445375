from array import array

import pytest

from cluster.bench.fidelity import compared
from cluster.bench.fidelity_served import delays, times_of
from cluster.bench.fidelity_times import Measured, Times
from cluster.bench.http_replay import Replayed
from cluster.bench.step_log import LoggedStep
from cluster.simulation.world import simulate
from load.answer import Answer
from replicas.step_time import StepShape
from tests.cluster.simulation.small_world import PROFILE, scenario, traffic


def replayed(due_at: float, *output_at: float) -> Replayed:
    answer = Answer(due_at)
    answer.output_at = array("d", output_at)
    answer.done_at = output_at[-1]
    return Replayed(due_at=due_at, answer=answer)


def test_times_count_from_when_a_request_was_due() -> None:
    times = times_of([replayed(1.0, 1.5, 1.75), replayed(2.0, 2.25, 2.5, 3.5)])
    assert times.ttft_s == [0.5, 0.25]
    assert times.e2e_s == [0.75, 1.5]
    assert times.gaps_s == [0.25, 0.25, 1.0]


def test_a_lone_requests_delay_is_what_no_step_took() -> None:
    ended_at = [0.9, 1.25, 1.5, 3.25]
    steps = [LoggedStep(shape=StepShape(num_new_tokens=1), seconds=0.125, ended_at=at) for at in ended_at]
    lone = [replayed(1.0, 1.625, 2.0), replayed(3.0, 3.5)]
    # Of the first one's 0.625 s two steps took 0.25, of the second one's 0.5 s one.
    assert delays(lone, [steps[:2], steps[2:]]) == [0.375, 0.375]


def test_the_simulator_is_compared_with_the_delay_added() -> None:
    outcome = simulate(scenario(), traffic(3.0, 10.0), 1000)
    tiers = outcome.measures.tiers
    real = Times(
        ttft_s=[tiers[0].ttft.quantile(0.5) + 0.5],
        e2e_s=[tiers[0].e2e.quantile(0.5) + 0.5],
        gaps_s=[tiers[0].itl.quantile(0.5) * 2],
    )
    report = compared(Measured(times=real, profile=PROFILE, delay_s=0.5, facts={}), outcome)
    errors = report["error_fraction"]
    assert isinstance(errors, dict)
    assert errors["ttft_ms_p50"] == pytest.approx(0.0)
    assert errors["e2e_ms_p50"] == pytest.approx(0.0)
    assert errors["itl_ms_p50"] == pytest.approx(-0.5)
