import random

import numpy as np
import pytest
import torch

from replicas.api import GenerateRequest, SamplingParams
from replicas.attention.staging import Staging
from replicas.sampling import NO_MASKS, Masks, Sampled, sample
from replicas.sampling_batched import draw, read
from replicas.sequence import Sequence

VOCAB_SIZE = 700
CPU = torch.device("cpu")


def sequence(**sampling: object) -> Sequence:
    params = SamplingParams(**({"max_tokens": 9} | sampling))  # type: ignore[arg-type]
    tokens = [3, 4, 5, 4]
    return Sequence(
        seq_id=0,
        owner="",
        request=GenerateRequest(request_id=0, prompt_ids=(3, 4), sampling=params),
        index=0,
        arrival_at=0.0,
        token_ids=tokens,
        num_prompt_tokens=2,
        stop_ids=frozenset({7}),
        max_num_tokens=100,
    )


def batched(logits: torch.Tensor, sequences: list[Sequence], masks: Masks = NO_MASKS) -> Sampled:
    drawn = draw(logits, sequences, [s.num_tokens for s in sequences], masks, Staging(CPU))
    return read(drawn, drawn.report.numpy(), sequences)


def random_logits(seed: int, rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(10))
def test_equals_sampling_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [
        sequence(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 1, 20, VOCAB_SIZE, 10_000]),
            top_p=rng.choice([1.0, 0.9, 0.3, 1e-6]),
            min_p=rng.choice([0.0, 0.05, 1.0]),
            seed=rng.randrange(1 << 40),
            repetition_penalty=rng.choice([1.0, 1.4]),
            presence_penalty=rng.choice([0.0, 1.0]),
            min_tokens=rng.choice([0, 5]),
            logit_bias=rng.choice([{}, {9: 4.0}]),
        )
        for _ in range(40)
    ]
    logits = random_logits(seed, len(sequences))
    mask = np.zeros(VOCAB_SIZE, dtype=np.bool_)
    mask[100:200] = True
    masks = {3: mask, 30: mask}
    assert batched(logits, sequences, masks) == sample(logits, sequences, masks)


def test_ties_at_the_edges_are_kept_as_row_by_row() -> None:
    logits = torch.zeros(6, VOCAB_SIZE)
    logits[:, :40] = 5.0
    sequences = [
        sequence(temperature=1.0, top_k=k, top_p=p, seed=seed)
        for seed, (k, p) in enumerate([(10, 1.0), (10, 0.5), (0, 0.1), (0, 0.999), (40, 0.2), (41, 1.0)])
    ]
    assert batched(logits, sequences) == sample(logits, sequences)


def test_logprobs_stand_beside_those_who_asked() -> None:
    sequences = [
        sequence(temperature=0.0),
        sequence(temperature=0.0, logprobs=0),
        sequence(temperature=1.0, logprobs=3, seed=5),
        sequence(temperature=0.0, logprobs=7),
    ]
    logits = random_logits(1, 4)
    ours, reference = batched(logits, sequences), sample(logits, sequences)
    assert ours.token_ids == reference.token_ids
    assert ours.logprobs is not None
    assert reference.logprobs is not None
    for got, expected in zip(ours.logprobs, reference.logprobs, strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert [top.token_id for top in got.top] == [top.token_id for top in expected.top]
            assert [top.logprob for top in got.top] == pytest.approx(
                [top.logprob for top in expected.top], abs=1e-5
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_fails_alone(bad: float) -> None:
    logits = random_logits(2, 3)
    logits[1, 5] = bad
    sequences = [sequence(temperature=1.0, seed=i, logprobs=1) for i in range(3)]
    result = batched(logits, sequences)
    assert result.errors == {1: "the model's output is not a number"}
    assert result.token_ids[1] is None
    assert result.token_ids[0] == sample(logits[:1], sequences[:1]).token_ids[0]
    assert result.logprobs is not None
    assert result.logprobs[1] is None


def test_a_row_without_any_token_left_fails_alone() -> None:
    logits = random_logits(3, 2)
    sequences = [sequence(temperature=t, seed=1) for t in (0.0, 1.0)]
    nothing = np.zeros(VOCAB_SIZE, dtype=np.bool_)
    result = batched(logits, sequences, {0: nothing, 1: nothing})
    assert result.errors == {0: "no token can be sampled", 1: "no token can be sampled"}


def test_the_place_of_the_draw_is_what_the_caller_says() -> None:
    """Launched ahead, a sequence does not hold its last token yet."""
    logits = random_logits(4, 1).repeat(30, 1)
    sequences = [sequence(temperature=2.0, seed=3)] * 30
    drawn = draw(logits, sequences, list(range(4, 34)), NO_MASKS, Staging(CPU))
    assert drawn.token_ids[0] == sample(logits[:1], sequences[:1]).token_ids[0]
    assert len(set(drawn.token_ids.tolist())) > 10
