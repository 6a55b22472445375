import random
import statistics

from cluster.bench.workload import (
    SHAREGPT_INPUT,
    LognormalLengths,
    fixed_length_request,
    long_tailed_lengths,
)


def test_quantile_lengths_have_their_quantiles() -> None:
    rng = random.Random(0)
    drawn = sorted(SHAREGPT_INPUT.draw(rng) for _ in range(20_000))
    assert abs(drawn[10_000] / 1730 - 1) < 0.03
    assert abs(drawn[18_000] / 5696 - 1) < 0.03
    assert max(drawn) <= 8141


def test_lognormal_lengths_are_clipped_and_fixed_without_spread() -> None:
    rng = random.Random(0)
    lengths = LognormalLengths(median=50, sigma=1.5, longest=256)
    drawn = [lengths.draw(rng) for _ in range(5000)]
    assert min(drawn) >= 1
    assert max(drawn) == 256
    assert abs(statistics.median(drawn) - 50) <= 3
    assert {LognormalLengths(median=50, sigma=0.0, longest=256).draw(rng) for _ in range(9)} == {50}


def test_long_tailed_lengths_keep_mean_and_longest() -> None:
    lengths = long_tailed_lengths(48, mean=64, longest=512, rng=random.Random(0))
    assert len(lengths) == 48
    assert max(lengths) == 512
    assert abs(statistics.mean(lengths) - 64) < 1


def test_fixed_length_requests_ignore_end_tokens() -> None:
    sampling = fixed_length_request(1, (1, 2), 7).sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (7, True, 0.0)
