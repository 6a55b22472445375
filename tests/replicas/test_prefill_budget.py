from replicas.api import GenerateRequest
from replicas.prefill_budget import COLD_TOKENS, FLOOR_TOKENS, PrefillBudget
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence, Step
from replicas.step_time import StepShape, StepTimeModel
from tests.replicas.fake_runner import config, request


def decoding(asked: GenerateRequest) -> ScheduledSequence:
    sequence = Sequence(
        seq_id=asked.request_id,
        owner="",
        request=asked,
        index=0,
        arrival_at=0.0,
        token_ids=[1] * 10,
        num_prompt_tokens=9,
        stop_ids=frozenset(),
        max_num_tokens=99,
        num_computed_tokens=9,
    )
    return ScheduledSequence(sequence, 9, 1, True)


def step_with(*tiers: int) -> Step:
    """A step in which one sequence of each of these tiers decodes."""
    entries = [decoding(request(i, 3, tier=tier)) for i, tier in enumerate(tiers)]
    count = len(entries)
    shape = StepShape(num_new_tokens=count, kv_read_tokens=9 * count, num_sampling=count)
    return Step(number=0, sequences=entries, num_tokens=count, num_decodes=count, shape=shape)


def learned(seconds_per_token: float) -> StepTimeModel:
    """A model that has only ever seen cost per token."""
    model = StepTimeModel()
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) * 12:
        model.observe(StepShape(num_new_tokens=tokens), seconds_per_token * tokens)
    return model


def test_without_a_target_only_tokens_count() -> None:
    budget = PrefillBudget(config(max_num_batched_tokens=64), StepTimeModel(), step_with(0))
    assert [budget.take(50, 0), budget.take(50, 0), budget.take(50, 0)] == [50, 13, 0]


def test_before_the_first_fit_the_chunk_is_fixed_over_all_prefills() -> None:
    cold = config(max_num_batched_tokens=512, itl_target_ms=50.0)
    budget = PrefillBudget(cold, StepTimeModel(), step_with(0))
    assert budget.take(COLD_TOKENS - 10, 0) == COLD_TOKENS - 10
    assert budget.take(50, 0) == 10
    assert budget.take(50, 0) == 0
    assert not budget.at_floor


def test_the_chunk_is_the_largest_that_keeps_the_target() -> None:
    timed = config(max_num_batched_tokens=512, itl_target_ms=100.0)
    budget = PrefillBudget(timed, learned(0.001), step_with(0))
    assert budget.take(400, 0) == 72  # 100 ms / DEFAULT_OVERRUN
    assert budget.left == 0
    assert not budget.could_take(1)


def test_the_strictest_tier_that_decodes_decides() -> None:
    timed = config(max_num_batched_tokens=512, itl_target_ms=400.0, tier_itl_target_ms={0: 100.0, 1: 50.0})
    chunks = {
        tiers: PrefillBudget(timed, learned(0.001), step_with(*tiers)).take(400, 0)
        for tiers in ((2,), (0, 2), (0, 1, 2))
    }
    assert chunks == {(2,): 312, (0, 2): 72, (0, 1, 2): 32}


def test_a_machine_that_has_slowed_down_gets_smaller_chunks() -> None:
    timed = config(max_num_batched_tokens=512, itl_target_ms=100.0)
    model, decodes = learned(0.001), StepShape(num_new_tokens=64, kv_read_tokens=64, num_sampling=64)
    for slowness in [1.0] * 60 + [1.6] * 3:
        model.observe(decodes, 0.064 * slowness)
    assert PrefillBudget(timed, model, step_with(0)).take(400, 0) == 56  # 72 tokens take 115 ms now


def test_no_decode_no_limit() -> None:
    timed = config(max_num_batched_tokens=512, itl_target_ms=1.0)
    assert PrefillBudget(timed, learned(0.001), step_with()).take(600, 0) == 512


def test_at_the_floor_prefill_still_moves_once_per_step_and_overload_is_told() -> None:
    timed = config(max_num_batched_tokens=512, itl_target_ms=1.0)
    budget = PrefillBudget(timed, learned(0.001), step_with(0))
    first = FLOOR_TOKENS - 6
    assert [budget.take(first, 0), budget.take(50, 0), budget.take(50, 0)] == [first, 6, 0]
    assert budget.at_floor


def test_unchunked_prompts_go_whole_or_not_at_all() -> None:
    whole = config(max_num_batched_tokens=64, chunked_prefill=False, max_model_len=64, itl_target_ms=1.0)
    budget = PrefillBudget(whole, learned(0.001), step_with(0))
    assert budget.could_take(63)
    assert not budget.could_take(64)
    assert budget.take(40, 0) == 40
    assert budget.take(40, 0) == 0
