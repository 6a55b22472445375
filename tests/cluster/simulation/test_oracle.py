import pytest

from cluster.simulation.oracle import Mean, counts, work_by_tick
from cluster.simulation.scaling import TICK_S
from cluster.simulation.traffic import Arrival

MEAN = Mean(input_tokens=100, output_tokens=50, rate=2.0, input_share=0.4, output_token_s=0.1)


def arrival(at_s: float, num_input: int = 100, num_output: int = 50) -> Arrival:
    return Arrival(at_s=at_s, tier=0, client="", prompt_ids=(1,) * num_input, output_tokens=num_output)


def test_mean_requests_at_the_replicas_rate_keep_one_replica_busy() -> None:
    work = work_by_tick([arrival(i / 2) for i in range(400)], MEAN, 200.0)
    assert work[5:35] == pytest.approx([1.0] * 30)


def test_an_outputs_work_is_spread_over_the_time_it_decodes() -> None:
    work = work_by_tick([arrival(0.0, num_output=150)], MEAN, 60.0)
    whole = (0.4 + 3 * 0.6) / 2.0 / TICK_S
    assert sum(work) == pytest.approx(whole)
    assert work[0] > work[1] == work[2] == work[3] > work[4] == 0.0


def test_counts_are_whole_and_at_least_one() -> None:
    assert counts([0.0, 0.9, 1.0, 1.1, 2.5], 1.0) == [1, 1, 1, 2, 3]
    assert counts([0.9, 1.6], 0.8) == [2, 2]
