import itertools
import random

import pytest

from cluster.bench.itl import Measured, watch, with_chunking
from cluster.simulation.profile import StepTimes
from cluster.simulation.timed_runner import TimedRunner
from replicas.config import ResolvedConfig
from replicas.engine import Engine
from replicas.step_time import StepShape

STEPS = StepTimes.linear(step_s=0.02, new_token_s=0.001, sample_s=0.001)
CONFIG = ResolvedConfig(
    max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=4096, block_size=16, num_blocks=4096
)
DECODE_S = STEPS.seconds(StepShape(num_new_tokens=8, num_sampling=8))
MEASURED = Measured(
    decode_s=DECODE_S, prompt_s=STEPS.seconds(StepShape(num_new_tokens=2000)), prompt_tokens=2000
)


def engine_of(runner: TimedRunner, chunked: bool) -> Engine:
    config = with_chunking(CONFIG, MEASURED, chunked)
    return Engine(config, runner, vocab_size=1000, eos_token_ids=frozenset(), clock=runner.clock)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_keep_the_gaps_and_most_of_what_is_left_though_steps_vary(seed: int) -> None:
    draw = random.Random(seed)
    runner = TimedRunner(lambda shape: STEPS.seconds(shape) * draw.lognormvariate(0.0, 0.05))
    engine = engine_of(runner, chunked=True)
    watched = watch(engine, runner.clock, itertools.count(2.0, 3.4), 2000, 60.0)
    left = MEASURED.prefill_tokens_per_s * (1 - DECODE_S / MEASURED.target_s)
    assert watched.within(MEASURED.target_s) >= 0.99
    assert watched.prompt_tokens / watched.busy_s >= 0.7 * left


@pytest.mark.parametrize(("chunked", "least", "most"), [(True, 0.99, 1.0), (False, 0.0, 0.98)])
def test_chunks_keep_the_gaps_of_streams_and_whole_prompts_break_them(
    chunked: bool, least: float, most: float
) -> None:
    runner = TimedRunner(STEPS.seconds)
    engine = engine_of(runner, chunked)
    watched = watch(engine, runner.clock, itertools.count(2.0, 3.4), 2000, 30.0)
    assert least <= watched.within(MEASURED.target_s) <= most
    assert len(watched.ttft_s) >= 7


def test_the_gain_that_gaps_allow_is_that_of_the_rates() -> None:
    # Off: 2 s + 99 x 20 ms a prompt; on: 2 s / 80%.
    measured = Measured(decode_s=0.02, prompt_s=2.0, prompt_tokens=2000)
    assert measured.capacity_ratio_by_gaps == pytest.approx(3.98 / 2.5)
