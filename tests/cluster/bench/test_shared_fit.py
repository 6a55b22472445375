import asyncio
import random

import numpy as np
import pytest

from cluster.bench.shared_fit import fit_shared, time_beside
from cluster.bench.step_log import LoggedStep
from cluster.simulation.host import Host
from cluster.simulation.profile import StepTimes
from cluster.simulation.virtual_time import run
from replicas.step_time import StepShape

ONE = StepShape(num_new_tokens=1, kv_read_tokens=100, num_sampling=1)


def step(start_s: float, end_s: float, shape: StepShape = ONE) -> LoggedStep:
    return LoggedStep(shape=shape, seconds=end_s - start_s, ended_at=end_s)


def test_time_beside_counts_the_others_that_are_in_a_step() -> None:
    logs = [
        [step(0.0, 4.0), step(10.0, 11.0)],
        [step(1.0, 2.0), step(2.0, 3.0)],
        [step(2.5, 6.0)],
    ]
    expected = [[1.0, 2.5, 0.5], [1.0, 0.0, 0.0]]
    np.testing.assert_allclose(time_beside(logs, 0), expected)
    np.testing.assert_allclose(time_beside(logs, 2), [[2.0, 1.0, 0.5]])


def test_without_others_nothing_is_beside_anything() -> None:
    np.testing.assert_allclose(time_beside([[step(0.0, 4.0)]], 0), [[4.0]])


def test_it_finds_step_times_and_slowdown_from_steps_that_overlap() -> None:
    true = StepTimes.linear(step_s=0.01, new_token_s=1e-3, read_token_s=5e-6)
    logs = run(_logs(true, slowdown=0.8))
    found = fit_shared(logs)
    assert found.slowdown == pytest.approx(0.8, abs=0.03)
    for shape in (ONE, StepShape().with_prefill(64, 0)):
        assert found.steps.seconds(shape) == pytest.approx(true.seconds(shape), rel=0.03)


async def _logs(steps: StepTimes, slowdown: float) -> list[list[LoggedStep]]:
    """Two replicas that pause now and then, on one host."""
    host = Host(2, slowdown)
    loop = asyncio.get_running_loop()

    async def work(seed: int) -> list[LoggedStep]:
        draw = random.Random(seed)
        log = []
        for _ in range(300):
            if draw.random() < 0.1:
                await asyncio.sleep(draw.uniform(0.05, 0.3))
            batch, chunk = draw.randint(1, 4), draw.choice([0, 0, 0, 64])
            shape = StepShape(num_new_tokens=batch, kv_read_tokens=batch * 200, num_sampling=batch)
            shape = shape.with_prefill(chunk, 0) if chunk else shape
            started_at = loop.time()
            await host.work(steps.seconds(shape) * draw.uniform(0.98, 1.02))
            log.append(LoggedStep(shape=shape, seconds=loop.time() - started_at, ended_at=loop.time()))
        return log

    return list(await asyncio.gather(work(1), work(2)))
