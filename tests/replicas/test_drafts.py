"""Guesses, and what the scheduler makes of them; the model's side is in test_speculation.py."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.api import FinishReason, SamplingParams
from replicas.drafts import PAUSE, Drafter
from replicas.sequence import Sequence
from tests.replicas.fake_runner import Clock, FakeRunner, engine, request, run_until_idle


def sequence(*token_ids: int) -> Sequence:
    asked = request(0, tuple(token_ids))
    return Sequence(
        seq_id=0,
        owner="",
        request=asked,
        index=0,
        arrival_at=0.0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        stop_ids=frozenset(),
        max_num_tokens=1000,
    )


def test_what_followed_the_last_time_is_guessed_to_follow_again() -> None:
    drafter = Drafter(4)
    one = sequence(1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3)
    assert drafter.draft(one, 9) == (4, 5, 6, 7)
    assert drafter.draft(one, 2) == (4, 5)
    assert drafter.draft(one, 0) == ()


def test_the_latest_of_several_occurrences_counts() -> None:
    assert Drafter(2).draft(sequence(1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3), 9) == (5, 9)


def test_the_end_is_no_occurrence_of_itself() -> None:
    drafter = Drafter(4)
    one = sequence(1, 2, 3)
    assert drafter.draft(one, 9) == ()
    one.token_ids += [1, 2, 3]
    assert drafter.draft(one, 9) == (1, 2, 3)


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 1), (1, 2, 3, 4)])
def test_without_a_repetition_nothing_is_guessed(token_ids: tuple[int, ...]) -> None:
    assert Drafter(4).draft(sequence(*token_ids), 9) == ()


def test_guesses_shrink_to_what_was_right_and_grow_again() -> None:
    drafter = Drafter(8)
    one = sequence(*range(20), *range(3))
    assert len(drafter.draft(one, 99)) == 8
    drafter.learn(one, 8, 2)
    assert drafter.draft(one, 99) == (3, 4)
    drafter.learn(one, 2, 2)
    assert drafter.draft(one, 99) == (3, 4, 5, 6)


def test_after_a_wrong_guess_there_is_a_pause() -> None:
    drafter = Drafter(4)
    one = sequence(*range(40), *range(10))
    drafter.draft(one, 9)
    drafter.learn(one, 4, 0)
    for token in range(10, 10 + PAUSE):
        assert drafter.draft(one, 9) == ()
        one.token_ids.append(token)
    assert drafter.draft(one, 9) == (10 + PAUSE,)


def periodic(token_ids: list[int], index: int) -> int:
    """Repeats itself for a while, then says something else, seldom the end token."""
    n = len(token_ids)
    return (7 * (n // 40) + n % 5 + index) % 23 if n % 29 else n % 7


def answers(num_drafts: int, seed: int, **changes: object) -> tuple[object, FakeRunner]:
    """Random requests over a model that repeats itself; a pool too small for all of them."""
    rng = random.Random(seed)
    built, runner = engine(Clock(), num_blocks=40, num_speculative_tokens=num_drafts, **changes)
    runner.model = periodic
    for i in range(8):
        stop = (rng.randrange(23),) if rng.random() < 0.3 else ()
        sampling = SamplingParams(max_tokens=rng.randrange(1, 90), stop_token_ids=stop, ignore_eos=i % 2 == 0)
        asked = request(i, rng.randrange(1, 40), indexes=(0, 1) if i % 3 == 0 else (0,))
        built.add(msgspec.structs.replace(asked, sampling=sampling), "a")
    seen = run_until_idle(built)
    return (seen.tokens, seen.finished), runner


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), num_drafts=st.sampled_from([1, 3, 8]), budget=st.sampled_from([4, 9, 64]))
def test_drafts_change_no_answer(seed: int, num_drafts: int, budget: int) -> None:
    """Under preemption, shared prompts, stop tokens and small budgets; the fake checks every KV slot."""
    plain, _ = answers(0, seed)
    drafted, runner = answers(num_drafts, seed, max_num_batched_tokens=budget)
    assert drafted == plain
    assert all(step.num_tokens <= budget for step in runner.steps)


def test_right_guesses_save_steps_and_are_counted() -> None:
    built, runner = engine(num_speculative_tokens=4)
    runner.model = lambda token_ids, _: 1 + len(token_ids) % 4
    built.add(request(0, (50,), max_tokens=100), "a")
    seen = run_until_idle(built)
    assert seen.tokens[0, 0] == [1 + n % 4 for n in range(1, 101)]
    assert len(runner.steps) < 40
    counters = built.counters
    assert counters.accepted_tokens == counters.draft_tokens == 100 - len(runner.steps)
    assert counters.computed_tokens == 100


def test_a_stop_token_among_the_guesses_ends_the_sequence_there() -> None:
    built, runner = engine(num_speculative_tokens=8)
    prompt = (2, 3, 4, 9, 2, 3, 4, 9, 2)
    runner.model = lambda token_ids, _: prompt[len(token_ids) % 4]
    sampling = SamplingParams(max_tokens=60, stop_token_ids=(9,))
    built.add(msgspec.structs.replace(request(0, prompt), sampling=sampling), "a")
    seen = run_until_idle(built)
    assert seen.tokens[0, 0] == [3, 4, 9]
    assert seen.finished[0, 0] is FinishReason.STOP
    assert any(9 in entry.drafts for step in runner.steps for entry in step.sequences)


def test_guesses_that_were_not_verified_stay_out_of_the_prefix_cache() -> None:
    """A wrong guess fills blocks to their end; a prompt that is the guess must not find them."""
    built, runner = engine(num_speculative_tokens=8)
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2)
    runner.model = lambda token_ids, _: 3 if len(token_ids) == len(prompt) else 60
    built.add(request(1, prompt, max_tokens=4), "a")
    seen = run_until_idle(built)
    [drafts] = [entry.drafts for step in runner.steps for entry in step.sequences if entry.drafts]
    assert drafts == (4, 5)
    assert seen.tokens[1, 0] == [3, 60, 60, 60]
    built.add(request(2, (*prompt, 3, *drafts, 99), max_tokens=1), "a")
    assert run_until_idle(built).cached[2, 0] == 12
