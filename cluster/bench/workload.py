"""Lengths and prompts for benchmarks, drawn from one seed."""

import itertools
import math
import random
from dataclasses import dataclass

from replicas.api import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Lengths with these quantiles: (probability, tokens), straight lines between them."""

    points: tuple[tuple[float, int], ...]

    def draw(self, rng: random.Random) -> int:
        u = rng.random()
        for (low_p, low), (high_p, high) in itertools.pairwise(self.points):
            if u <= high_p:
                return round(low + (high - low) * (u - low_p) / (high_p - low_p))
        return self.points[-1][1]


SHAREGPT_INPUT = QuantileLengths(
    ((0.0, 4), (0.05, 29), (0.5, 1730), (0.9, 5696), (0.95, 6563), (0.99, 7433), (1.0, 8141))
)
"""Running context of ShareGPT conversations up to 8k (Llama-2 tokens), as used by Sarathi-Serve."""
SHAREGPT_OUTPUT = QuantileLengths(
    ((0.0, 1), (0.05, 44), (0.5, 415), (0.9, 834), (0.95, 920), (0.99, 998), (1.0, 1024))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Lognormal lengths with this median, clipped to 1..longest. sigma 0 = always the median."""

    median: int
    sigma: float
    longest: int

    def draw(self, rng: random.Random) -> int:
        return max(1, min(self.longest, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


def long_tailed_lengths(count: int, mean: int, longest: int, rng: random.Random) -> list[int]:
    """Exponential lengths with one of `longest` in sixteen, scaled to the mean; order random.

    The textbook's picture of a batch: one long answer holds the seats of fifteen short ones.
    """
    num_long = max(1, round(count / 16))
    short_mean = (mean * count - longest * num_long) / max(1, count - num_long)
    short = [rng.expovariate(1.0) for _ in range(count - num_long)]
    scale = short_mean * len(short) / sum(short) if short else 0.0
    lengths = [longest] * num_long + [max(1, min(longest, round(value * scale))) for value in short]
    rng.shuffle(lengths)
    return lengths


def random_prompt(num_tokens: int, vocab_size: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(num_tokens))


def fixed_length_request(request_id: int, prompt: tuple[int, ...], num_output_tokens: int) -> GenerateRequest:
    """A greedy request that generates exactly so many tokens."""
    sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling)
