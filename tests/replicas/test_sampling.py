import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas import sampling
from replicas.api import GenerateRequest, SamplingParams
from replicas.sampling import sample, uniform
from replicas.sequence import Sequence

VOCAB_SIZE = 50


def row(
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (1, 2),
    index: int = 0,
    stop: tuple[int, ...] = (),
    **sampling: object,
) -> Sequence:
    params = SamplingParams(**({"max_tokens": 100} | sampling))  # type: ignore[arg-type]
    return Sequence(
        seq_id=0,
        owner="",
        request=GenerateRequest(request_id=0, prompt_ids=prompt, sampling=params),
        index=index,
        arrival_at=0.0,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        stop_ids=frozenset(stop),
        max_num_tokens=1000,
    )


def logits(*values: float) -> Tensor:
    return torch.tensor([values])


def random_logits(rows: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * spread


def counts(given: Tensor, num_draws: int, **sampling: object) -> Counter[int]:
    """Draw with so many seeds from the same logits."""
    sequences = [row(seed=i, **sampling) for i in range(num_draws)]
    drawn = sample(given.expand(num_draws, -1), sequences).token_ids
    return Counter(token for token in drawn if token is not None)


def test_greedy_takes_the_most_probable() -> None:
    given = random_logits(8)
    sampled = sample(given, [row(temperature=0.0, top_p=0.1, top_k=3, seed=i) for i in range(8)])
    assert sampled.token_ids == given.argmax(dim=-1).tolist()
    assert sampled.logprobs is None
    assert sampled.errors == {}


def test_draws_follow_the_softmax() -> None:
    """Chi-squared over 40,000 draws; 27.9 is the 0.1% point for nine degrees of freedom."""
    given = random_logits(1, spread=1.0)[:, :10]
    num_draws = 40_000
    expected = torch.softmax(given / 0.8, dim=-1)[0] * num_draws
    seen = counts(given, num_draws, temperature=0.8)
    assert sum((seen[i] - e) ** 2 / e for i, e in enumerate(expected.tolist())) < 27.9


def test_uniform_numbers_are_uniform_over_every_counter() -> None:
    """Kolmogorov-Smirnov at 0.1%: 1.95 / sqrt(n)."""
    n = 4000
    streams = [
        [uniform(7, 0, i) for i in range(n)],
        [uniform(i, 0, 9) for i in range(n)],
        [uniform(7, i, 9) for i in range(n)],
    ]
    for stream in streams:
        ordered = np.sort(stream)
        assert 0.0 < ordered[0] < ordered[-1] < 1.0
        assert np.abs(ordered - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 4 / math.sqrt(n)


def test_a_draw_depends_on_seed_index_and_position_only() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    assert (
        len({uniform(*key) for key in [(1, 2, 3), (3, 2, 1), (1, 3, 2), (-1, 2, 3), (1, 2, 3 + 2**40)]}) == 5
    )


def test_top_k_keeps_the_k_most_probable_and_their_equals() -> None:
    given = logits(1.0, 3.0, 2.0, 2.0, 0.0)
    assert set(counts(given, 500, top_k=1)) == {1}
    assert set(counts(given, 500, top_k=2)) == {1, 2, 3}
    assert set(counts(given, 500, top_k=4)) == {0, 1, 2, 3}
    assert set(counts(given, 500, top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    given = torch.log(torch.tensor([[0.5, 0.1, 0.3, 0.06, 0.04]]))
    assert set(counts(given, 500, top_p=0.45)) == {0}
    assert set(counts(given, 500, top_p=0.55)) == {0, 2}
    assert set(counts(given, 500, top_p=0.85)) == {0, 1, 2}
    assert set(counts(given, 2000, top_p=0.999)) == {0, 1, 2, 3, 4}


def test_top_p_finds_its_set_in_a_flat_large_vocabulary() -> None:
    """More tokens are needed than are sorted at first."""
    given = torch.arange(1000)[None] * -1e-4
    drawn = counts(given, 3000, top_p=0.5)
    kept = int((torch.softmax(given.double(), -1).cumsum(-1) < 0.5).sum()) + 1
    assert max(drawn) < kept
    assert max(drawn) > 0.98 * kept


def test_min_p_drops_tokens_below_a_share_of_the_best() -> None:
    given = torch.log(torch.tensor([[0.5, 0.26, 0.2, 0.04]]))
    assert set(counts(given, 500, min_p=0.5)) == {0, 1}
    assert set(counts(given, 500, min_p=0.3)) == {0, 1, 2}
    assert set(counts(given, 500, min_p=1.0)) == {0}


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    given = logits(5.0, 4.6, 4.0)
    assert sample(given, [row(prompt=(0, 0), temperature=0.0, presence_penalty=1.0)]).token_ids == [0]
    assert sample(given, [row(output=(0,), temperature=0.0, presence_penalty=0.5)]).token_ids == [1]
    assert sample(given, [row(output=(0, 0, 1), temperature=0.0, presence_penalty=0.5)]).token_ids == [0]
    frequency = row(output=(0, 0, 1), temperature=0.0, frequency_penalty=0.5)  # 4.0, 4.1, 4.0
    assert sample(given, [frequency]).token_ids == [1]


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    once = row(prompt=(0, 1), output=(0,), temperature=0.0, repetition_penalty=2.0)
    assert sample(logits(4.0, 3.0, 1.9), [once]).token_ids == [0]
    assert sample(logits(4.0, 3.0, 2.1), [once]).token_ids == [2]
    assert sample(logits(-1.0, -1.0, -1.9), [once]).token_ids == [2]


def test_logit_bias_adds_and_bans() -> None:
    given = logits(5.0, 4.0, 3.0)
    assert sample(given, [row(temperature=0.0, logit_bias={0: -100.0})]).token_ids == [1]
    assert sample(given, [row(temperature=0.0, logit_bias={2: 2.5, 1: 0.1})]).token_ids == [2]
    assert set(counts(given, 300, logit_bias={0: -100.0, 1: -100.0})) == {2}


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    given = logits(9.0, 8.0, 1.0)
    early = row(output=(2,) * 4, stop=(0, 1), temperature=0.0, min_tokens=5)
    late = row(output=(2,) * 5, stop=(0, 1), temperature=0.0, min_tokens=5)
    assert sample(given, [early]).token_ids == [2]
    assert sample(given, [late]).token_ids == [0]
    assert set(counts(given, 4, stop=(0, 1), min_tokens=5)) == {2}


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-300, 0.0])
def test_tiny_temperatures_take_the_best_token(temperature: float) -> None:
    given = random_logits(1, spread=1e4)
    for extra in ({"top_p": 0.1}, {"top_k": 5}, {"min_p": 0.5}, {}):
        sampled = sample(given, [row(temperature=temperature, seed=3, **extra)])  # type: ignore[arg-type]
        assert sampled.token_ids == [int(given.argmax())]
        assert not sampled.errors


def test_logprobs_are_of_the_raw_logits() -> None:
    given = random_logits(2)
    changed = row(temperature=0.3, top_k=2, logit_bias={4: 50.0}, logprobs=3)
    sampled = sample(given, [changed, row()])
    assert sampled.logprobs is not None
    first, second = sampled.logprobs
    assert second is None
    assert first is not None
    expected = torch.log_softmax(given[0], dim=-1)
    assert sampled.token_ids[0] == 4
    assert first.logprob == pytest.approx(float(expected[4]))
    assert [t.token_id for t in first.top] == expected.topk(3).indices.tolist()
    assert [t.logprob for t in first.top] == pytest.approx(expected.topk(3).values.tolist())


def test_logprobs_without_alternatives() -> None:
    sampled = sample(logits(0.0, 1.0), [row(temperature=0.0, logprobs=0)])
    assert sampled.logprobs is not None
    assert sampled.logprobs[0] is not None
    assert sampled.logprobs[0].logprob == pytest.approx(-math.log(1 + math.exp(-1)))
    assert sampled.logprobs[0].top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_a_number_fails_alone(bad: float, temperature: float) -> None:
    given = random_logits(3)
    good = sample(given, [row(temperature=temperature, seed=i) for i in range(3)])
    given[1, 7] = bad
    sampled = sample(given, [row(temperature=temperature, seed=i, logprobs=1, top_p=0.9) for i in range(3)])
    assert sampled.errors == {1: "the model's output is not a number"}
    assert sampled.token_ids[1] is None
    if temperature == 0.0:
        assert [sampled.token_ids[0], sampled.token_ids[2]] == [good.token_ids[0], good.token_ids[2]]
    assert sampled.logprobs is not None
    assert sampled.logprobs[1] is None


def test_a_row_with_nothing_left_to_sample_is_an_error() -> None:
    everything = tuple(range(3))
    sampled = sample(logits(1.0, 2.0, 3.0), [row(stop=everything, min_tokens=5)])
    assert sampled.errors == {0: "no token can be sampled"}


def test_a_row_does_not_depend_on_the_others() -> None:
    given = random_logits(12)
    choices: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 2.0}},
        {"logprobs": 4},
        {"temperature": 1.7, "top_p": 0.95},
        {"min_tokens": 9},
        {"frequency_penalty": 0.3, "top_k": 9, "logprobs": 1},
    ]
    sequences = [row(output=(3, 3, 7), stop=(5,), seed=i, **c) for i, c in enumerate(choices)]
    together = sample(given, sequences)
    assert together.logprobs is not None
    for i, sequence in enumerate(sequences):
        alone = sample(given[i : i + 1], [sequence])
        assert alone.token_ids == [together.token_ids[i]]
        assert (alone.logprobs or [None])[0] == together.logprobs[i]


def test_logits_are_not_changed() -> None:
    given = random_logits(2)
    before = given.clone()
    sample(given, [row(output=(3,), presence_penalty=1.0, top_k=3, top_p=0.5, stop=(4,), min_tokens=9)] * 2)
    assert torch.equal(given, before)


@pytest.mark.parametrize("vocab_size", [1, 7, 31, 32, 100, 5_003])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
def test_both_ways_to_draw_give_the_same_tokens(vocab_size: int, spread: float) -> None:
    """Flat and peaked rows, some with ties, some with nothing but one token left."""
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.randn(40, vocab_size, generator=generator) * spread
    scores[::3] = scores[::3].round()
    scores[1, 1:] = -math.inf
    probabilities = torch.softmax(scores, dim=-1)
    shares = [(0.0, 0.3, 0.9, 0.999_999, 1.0)[i % 5] for i in range(40)]
    draws = [(1e-16, 0.2, 0.7, 1 - 1e-16)[i % 4] for i in range(40)]
    fast = [sampling._draw_from(*one) for one in zip(probabilities, shares, draws, strict=True)]
    assert fast == sampling.draw_by_tensors(probabilities.clone(), shares, draws)


def test_a_row_that_is_no_number_ends_too() -> None:
    assert 0 <= sampling._draw_from(torch.full((100,), math.nan), 0.9, 0.5) < 100
