import pytest

from cluster.bench.drive import drive
from cluster.bench.workload import fixed_length_request
from tests.replicas.fake_runner import engine


def test_counts_agree_with_the_engine_and_concurrency_is_kept() -> None:
    built, runner = engine(max_num_seqs=8)
    requests = [fixed_length_request(i, (i + 1, 2, 3), 4 + i) for i in range(6)]
    measured = drive(built, requests, concurrency=2)
    assert measured.prompt_tokens == 18
    assert measured.output_tokens == sum(4 + i for i in range(6))
    assert len(measured.ttft_ms) == 6
    assert len(measured.itl_ms) == measured.output_tokens - 6
    assert max(len(step.sequences) for step in runner.steps) == 2
    assert measured.output_tokens_per_s == measured.output_tokens / measured.wall_s


def test_a_failed_request_stops_the_measurement() -> None:
    built, runner = engine()
    runner.fail_on = {1}
    with pytest.raises(RuntimeError, match="request 1 failed: RuntimeError: cannot run request 1"):
        drive(built, [fixed_length_request(1, (1, 2, 3), 4)], concurrency=1)
