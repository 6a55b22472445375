import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.simulation.fast_forward import Stretch
from cluster.simulation.measures import Measures
from cluster.simulation.profile import StepTimes
from replicas.step_time import StepShape
from tests.cluster.simulation.small_world import TIERS, run_small

STEPS = StepTimes.linear(step_s=0.01, new_token_s=1e-4, read_token_s=1e-6, sample_s=1e-5)


def stretch(count: int, context: int, max_steps: int) -> Stretch:
    shape = StepShape(num_new_tokens=count, kv_read_tokens=count * context, num_sampling=count)
    return Stretch(
        sequences=(), first_s=STEPS.seconds(shape), growth_s=STEPS.read_token_s * count, max_steps=max_steps
    )


@given(st.integers(1, 256), st.integers(0, 8000), st.integers(1, 400))
def test_the_closed_form_is_the_sum_of_the_steps(count: int, context: int, num_steps: int) -> None:
    total = sum(
        STEPS.seconds(
            StepShape(num_new_tokens=count, kv_read_tokens=count * (context + i), num_sampling=count)
        )
        for i in range(num_steps)
    )
    assert stretch(count, context, num_steps).elapsed_s(num_steps) == pytest.approx(total)


@given(st.integers(1, 256), st.integers(0, 8000), st.integers(1, 400), st.floats(0.0, 0.999))
def test_as_many_steps_end_within_a_time_as_the_closed_form_says(
    count: int, context: int, num_steps: int, rest: float
) -> None:
    of = stretch(count, context, 1000)
    seconds = of.elapsed_s(num_steps) + rest * (of.elapsed_s(num_steps + 1) - of.elapsed_s(num_steps))
    assert of.steps_within(seconds) == num_steps


def test_no_more_steps_than_the_batch_may_take() -> None:
    assert stretch(4, 100, 7).steps_within(1e6) == 7


def figures(measures: Measures) -> list[float]:
    tiers = [measures.tiers[tier.level] for tier in TIERS]
    return [
        value
        for tier in tiers
        for value in (
            tier.requests,
            tier.itl.count,
            tier.itl.mean,
            tier.itl.quantile(0.5),
            tier.e2e.mean,
            tier.ttft.mean,
        )
    ]


def test_taking_steps_together_changes_no_figure() -> None:
    together, one_by_one = run_small(stretch_s=1.0), run_small(stretch_s=0.0)
    assert together.num_events < 0.5 * one_by_one.num_events
    assert figures(together.measures) == pytest.approx(figures(one_by_one.measures), rel=0.05)
