import argparse

import msgspec
import pytest

from cluster.simulation.plan import _seconds, largest_batch, largest_chunk
from cluster.simulation.profile import SharedHost
from replicas.errors import ConfigError
from replicas.step_time import StepShape
from tests.cluster.simulation.small_world import PROFILE


def decodes(count: int, context: int) -> StepShape:
    return StepShape(num_new_tokens=count, kv_read_tokens=count * context, num_sampling=count)


def test_the_largest_batch_is_the_last_one_within_the_target() -> None:
    batch = largest_batch(PROFILE, 0.015, context=100)
    assert (
        PROFILE.steps.seconds(decodes(batch, 100)) <= 0.015 < PROFILE.steps.seconds(decodes(batch + 1, 100))
    )


def test_steps_are_planned_as_beside_all_neighbours() -> None:
    shared = msgspec.structs.replace(PROFILE, shared_host=SharedHost(replicas=2, slowdown=1.0))
    assert largest_batch(shared, 0.03, context=100) == largest_batch(PROFILE, 0.015, context=100)


def test_the_kv_pool_limits_the_batch_too() -> None:
    assert largest_batch(PROFILE, 10.0, context=1024) == PROFILE.kv_bytes // 1024


def test_a_target_below_one_step_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"a step of one sequence takes 10\.3 ms"):
        largest_batch(PROFILE, 0.005, context=100)


def test_the_chunk_is_the_largest_beside_the_batch() -> None:
    chunk = largest_chunk(PROFILE, 0.05, batch=8, context=100)
    beside = decodes(8, 100)
    assert PROFILE.steps.seconds(beside.with_prefill(chunk, 0)) <= 0.05
    assert PROFILE.steps.seconds(beside.with_prefill(chunk + 16, 0)) > 0.05


@pytest.mark.parametrize(("text", "seconds"), [("50ms", 0.05), ("1.5s", 1.5), ("2", 2.0)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert _seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "-1s", "0ms", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        _seconds(text)
