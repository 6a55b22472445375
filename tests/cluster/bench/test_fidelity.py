import itertools
from array import array
from pathlib import Path

import msgspec
import pytest

from cluster.bench.fidelity import arrivals_of, compared
from cluster.bench.fidelity_served import delays, times_of
from cluster.bench.fidelity_times import Measured, Times
from cluster.bench.http_replay import Replayed
from cluster.bench.logged_serve import read_logs
from cluster.bench.scheduler import decoding_engine
from cluster.bench.step_log import LoggedStep, log_steps
from cluster.simulation.world import simulate
from load.answer import Answer
from replicas.step_time import SKIPPED_STEPS, StepShape
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


def test_logs_of_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    engine = decoding_engine(2, max_tokens=50)
    log: list[LoggedStep] = []
    log_steps(engine, log.append)
    for _ in range(SKIPPED_STEPS + 5):
        engine.step()
    assert [step.shape.num_new_tokens for step in log] == [2] * 5
    assert all(later.ended_at > earlier.ended_at for earlier, later in itertools.pairwise(log))
    (tmp_path / "1.jsonl").write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in log))
    assert read_logs(tmp_path) == [log]


def test_arrivals_are_the_beginning_of_a_trace_stretched_to_the_rate() -> None:
    arrivals = arrivals_of("azure2023-conv", 0.1, rate=2.0, seconds=60.0)
    slower = arrivals_of("azure2023-conv", 0.1, rate=1.0, seconds=120.0)
    assert [2 * arrival.at_s for arrival in arrivals] == pytest.approx([arrival.at_s for arrival in slower])
    assert [len(a.prompt_ids) for a in arrivals] == [len(a.prompt_ids) for a in slower]
    assert max(len(a.prompt_ids) + a.output_tokens for a in arrivals) < 1024
