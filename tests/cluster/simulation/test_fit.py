import random

import pytest

from cluster.simulation.fit import fit, noise_of
from cluster.simulation.profile import StepTimes
from replicas.step_time import StepShape

TRUE = StepTimes.linear(step_s=0.02, new_token_s=1e-3, query_key_pair_s=2e-6, read_token_s=5e-6, sample_s=0.0)


def shapes(draw: random.Random) -> list[StepShape]:
    found = []
    for _ in range(400):
        batch = draw.choice([0, 1, 2, 4, 8])
        decodes = StepShape(
            num_new_tokens=batch, kv_read_tokens=batch * draw.randint(50, 800), num_sampling=batch
        )
        chunk = draw.choice([0, 0, 40, 120, 500]) or (64 if not batch else 0)
        found.append(decodes.with_prefill(chunk, draw.randint(0, 300)) if chunk else decodes)
    return found


def test_it_finds_the_median_step_although_some_took_much_longer() -> None:
    draw = random.Random(0)
    measured = shapes(draw)
    # A machine that is busy now and then: a tenth of the steps take up to four times as long.
    slowed = [draw.uniform(1.0, 4.0) if draw.random() < 0.1 else draw.uniform(0.98, 1.02) for _ in measured]
    found = fit(measured, [TRUE.seconds(shape) * by for shape, by in zip(measured, slowed, strict=True)])
    for shape in measured:
        assert found.seconds(shape) == pytest.approx(TRUE.seconds(shape), rel=0.05)


def test_the_last_line_goes_on_where_nothing_was_measured() -> None:
    measured = [StepShape().with_prefill(count, 0) for count in range(8, 513, 8)]
    found = fit(measured, [TRUE.seconds(shape) for shape in measured])
    larger = StepShape(num_new_tokens=2000)
    assert found.seconds(larger) == pytest.approx(TRUE.seconds(larger), rel=0.2)


def test_what_was_never_seen_costs_nothing_more() -> None:
    found = fit([StepShape(num_new_tokens=1, kv_read_tokens=100, num_sampling=1)] * 9, [0.02] * 9)
    assert found.seconds(StepShape(num_new_tokens=1, kv_read_tokens=100, num_sampling=1)) == pytest.approx(
        0.02, rel=0.01
    )
    assert found.query_key_pair_s == 0.0


def test_noise_is_what_steps_took_over_what_they_should() -> None:
    decode, prefill = StepShape(num_new_tokens=1), StepShape().with_prefill(64, 0)
    factors = [0.5 + i / 100 for i in range(101)]
    seconds = [TRUE.seconds(decode) * factor for factor in factors] + [TRUE.seconds(prefill) * 2.0]
    noise = noise_of(TRUE, [decode] * 101 + [prefill], seconds)
    assert noise.decodes == pytest.approx(factors)
    assert noise.prefills == pytest.approx([2.0] * 101)
