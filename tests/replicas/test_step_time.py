import math
import random

import pytest

from replicas.step_time import (
    CHUNK_MULTIPLE,
    DEFAULT_OVERRUN,
    MAX_OVERRUN,
    MAX_PACE,
    PACE_GAIN,
    SKIPPED_STEPS,
    TRUST,
    UNSEEN_TOKENS,
    StepShape,
    StepTimeModel,
)


def true_seconds(shape: StepShape) -> float:
    """A CPU-like step: stairs by rows, attention by pairs, a cost per sampling sequence."""
    return (
        0.02
        + 0.004 * math.ceil(shape.num_new_tokens / 8)
        + 1e-7 * shape.prefill_work
        + 2e-7 * shape.kv_read_tokens
        + 1e-4 * shape.num_sampling
    )


def random_shape(rng: random.Random) -> StepShape:
    decodes = rng.randint(1, 32)
    shape = StepShape(
        num_new_tokens=decodes,
        kv_read_tokens=sum(rng.randint(10, 1000) for _ in range(decodes)),
        num_sampling=decodes,
    )
    return shape.with_prefill(rng.randint(1, 512), rng.randint(0, 1000)) if rng.random() < 0.4 else shape


@pytest.fixture
def learned() -> StepTimeModel:
    rng = random.Random(1)
    model = StepTimeModel()
    for _ in range(1500):
        shape = random_shape(rng)
        model.observe(shape, true_seconds(shape) * rng.uniform(0.98, 1.02))
    return model


def test_predictions_are_within_a_tenth_on_unseen_steps(learned: StepTimeModel) -> None:
    rng = random.Random(2)
    errors = sorted(
        abs(learned.predict(s) / true_seconds(s) - 1) for s in (random_shape(rng) for _ in range(300))
    )
    assert errors[150] < 0.03
    assert errors[-1] < 0.10


def test_a_longer_step_is_never_predicted_to_be_faster(learned: StepTimeModel) -> None:
    base = StepShape(num_new_tokens=8, kv_read_tokens=4000, num_sampling=8)
    seconds = [learned.predict(base.with_prefill(n, 100)) for n in range(0, 4096, 8)]
    assert seconds == sorted(seconds)


def test_the_largest_chunk_fits_and_the_next_one_does_not(learned: StepTimeModel) -> None:
    base = StepShape(num_new_tokens=8, kv_read_tokens=4000, num_sampling=8)
    for budget_s in (0.05, 0.08, 0.15):
        chunk = learned.largest_chunk(base, context=300, budget_s=budget_s, limit=1000)
        assert chunk % CHUNK_MULTIPLE == 0
        assert learned.predict(base.with_prefill(chunk, 300)) <= budget_s
        assert learned.predict(base.with_prefill(chunk + CHUNK_MULTIPLE, 300)) > budget_s
    assert learned.largest_chunk(base, context=300, budget_s=0.001, limit=1000) == 0
    assert learned.largest_chunk(base, context=0, budget_s=10.0, limit=37) == 37


def test_cold_first_steps_and_broken_clocks_are_not_learned() -> None:
    model = StepTimeModel()
    shape = StepShape(num_new_tokens=1, kv_read_tokens=5, num_sampling=1)
    for _ in range(SKIPPED_STEPS):
        model.observe(shape, 30.0)
    for seconds in (math.nan, -1.0, 0.0, math.inf):
        model.observe(shape, seconds)
    assert not model.fitted
    for _ in range(20):
        model.observe(shape, 0.01)
    assert model.predict(shape) == pytest.approx(0.01, rel=0.02)


def test_rare_regions_are_not_forgotten(learned: StepTimeModel) -> None:
    prefill = StepShape().with_prefill(400, 0)
    before = learned.predict(prefill)
    rng = random.Random(3)
    for _ in range(3000):
        shape = StepShape(num_new_tokens=4, kv_read_tokens=rng.randint(100, 4000), num_sampling=4)
        learned.observe(shape, true_seconds(shape))
    assert learned.predict(prefill) == pytest.approx(before, rel=0.1)


def test_the_overrun_follows_the_noise(learned: StepTimeModel) -> None:
    assert 1.01 < learned.overrun < 1.06
    rng = random.Random(4)
    for _ in range(600):
        shape = random_shape(rng)
        learned.observe(shape, true_seconds(shape) * rng.uniform(0.85, 1.15))
    assert 1.1 < learned.overrun < 1.3


def observe_stalls(model: StepTimeModel, *, every: int, times: float) -> None:
    """A thousand steps with prefill beside decodes; one in `every` of them takes so many times as long."""
    shape = StepShape(num_new_tokens=8, kv_read_tokens=800, num_sampling=8).with_prefill(64, 100)
    for number in range(1000):
        model.observe(shape, true_seconds(shape) * (times if number % every == 0 else 1.0))


def test_rare_stalls_do_not_count_as_overrun(learned: StepTimeModel) -> None:
    observe_stalls(learned, every=300, times=3.0)
    assert learned.overrun < 1.05


def test_stalls_that_would_break_the_promise_do_up_to_a_bound(learned: StepTimeModel) -> None:
    observe_stalls(learned, every=50, times=1.3)
    assert 1.2 < learned.overrun < 1.4
    observe_stalls(learned, every=50, times=10.0)
    assert learned.overrun == MAX_OVERRUN


def test_the_overrun_is_wide_while_few_chunks_were_seen() -> None:
    model = StepTimeModel()
    shape = StepShape(num_new_tokens=8, kv_read_tokens=800, num_sampling=8).with_prefill(64, 100)
    overruns = []
    for _ in range(300):
        model.observe(shape, true_seconds(shape))
        overruns.append(model.overrun)
    assert overruns[0] == DEFAULT_OVERRUN
    assert overruns[20] > 1.1
    assert overruns[-1] < 1.02


def test_the_pace_follows_a_slower_machine_within_a_few_steps(learned: StepTimeModel) -> None:
    rng = random.Random(6)
    assert learned.pace == pytest.approx(1.0, abs=0.03)
    for _ in range(3):
        shape = random_shape(rng)
        learned.observe(shape, true_seconds(shape) * 1.6)
    assert learned.pace > 1.3
    for _ in range(600):
        shape = random_shape(rng)
        learned.observe(shape, true_seconds(shape) * 1.6)
    # By now it is the prediction that has followed, not the pace.
    assert learned.pace < 1.2
    assert learned.pace * learned.predict(shape) == pytest.approx(1.6 * true_seconds(shape), rel=0.1)


def test_one_stall_hardly_moves_the_pace(learned: StepTimeModel) -> None:
    shape = random_shape(random.Random(7))
    before = learned.pace
    learned.observe(shape, 100 * true_seconds(shape))
    assert learned.pace <= before * MAX_PACE**PACE_GAIN * 1.001


def test_chunks_between_the_sizes_seen_are_predicted_between_their_times() -> None:
    model = StepTimeModel()
    base = StepShape(num_new_tokens=8, kv_read_tokens=80, num_sampling=8)
    large = StepShape().with_prefill(256, 0)
    for number in range(80):
        model.observe(large if number % 10 == 3 else base, 0.140 if number % 10 == 3 else 0.020)
    seconds = [model.predict(base.with_prefill(chunk, 0)) for chunk in (16, 64, 120)]
    assert seconds == pytest.approx([0.028, 0.051, 0.078], rel=0.2)
    assert model.predict(StepShape().with_prefill(2000, 0)) > 0.5


def test_shapes_can_be_taken_apart_again() -> None:
    base = StepShape(num_new_tokens=3, kv_read_tokens=30, num_sampling=3)
    assert base.with_prefill(7, 5, True).with_prefill(-7, 5, True) == base
    assert base.without_decode(10) == StepShape(num_new_tokens=2, kv_read_tokens=20, num_sampling=2)


def test_no_chunk_is_much_larger_than_any_step_seen() -> None:
    model = StepTimeModel()
    for _ in range(40):
        model.observe(StepShape(num_new_tokens=8, kv_read_tokens=80, num_sampling=8), 0.02)
    base = StepShape(num_new_tokens=8, kv_read_tokens=80, num_sampling=8)
    assert model.largest_chunk(base, 0, budget_s=0.1, limit=2000) == UNSEEN_TOKENS
    for _ in range(40):
        model.observe(base.with_prefill(64, 0), 0.021)
    assert model.largest_chunk(base, 0, budget_s=1.0, limit=2000) == TRUST * 72
