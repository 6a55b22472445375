"""Logits -> tokens: each row by its own parameters, its result independent of the other rows.

Order of operations on a row: grammar, repetition penalty, frequency and presence penalty, logit bias,
min_tokens; then temperature, top-k, min-p, top-p on what is left; then the draw. Only work that some row asks
for is done.

Ties are kept: where several tokens are equally probable at the edge of top-k or top-p, all of them stay. So
the kept set is a threshold on probability, which no sorting order can change.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.api import SamplingParams, TokenLogprobs, TopLogprob
from replicas.sequence import Sequence

try:
    from replicas import sampling_kernels as kernels
except ImportError:  # a GPU machine needs no numba
    kernels = None  # type: ignore[assignment]

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: the exact limit, and no quotient can overflow."""

Masks = Mapping[int, NDArray[np.bool_]]
"""Row -> [vocab_size], the tokens that may be drawn; rows that are not in it are free."""
NO_MASKS: Final[Masks] = MappingProxyType({})

_NUCLEUS = 256
_NUCLEUS_GROWTH = 8
"""top-p looks at so many of the best tokens, then at so many times more, until they reach it."""
_MASK64 = (1 << 64) - 1


@dataclass(slots=True, kw_only=True)
class Sampled:
    """Lists are parallel to the rows given."""

    token_ids: list[int | None]
    """None where `errors` says why."""
    logprobs: list[TokenLogprobs | None] | None
    """None when no row asked for them."""
    errors: dict[int, str]


def sample(
    logits: Tensor,  # [num_rows, vocab_size] float32; not changed
    sequences: Rows[Sequence],  # [num_rows]; the row's token comes after sequence.token_ids
    masks: Masks = NO_MASKS,
) -> Sampled:
    """Choose one token per row.

    A row with NaN or infinite logits, or with no token left to choose, becomes an entry of `errors`.
    """
    adjusted = adjust(logits, sequences, masks)
    peaks, best = _maxima(adjusted)
    token_ids: list[int | None] = list(best)
    drawing = [i for i, sequence in enumerate(sequences) if sequence.sampling.temperature >= GREEDY_BELOW]
    if drawing:
        rows = adjusted if len(drawing) == len(sequences) else adjusted[drawing]
        for i, token in zip(drawing, _draw(rows, [sequences[i] for i in drawing]), strict=True):
            token_ids[i] = token
    errors = {}
    for i, peak in enumerate(peaks):
        if not math.isfinite(peak):
            errors[i] = (
                "no token can be sampled" if peak == -math.inf else "the model's output is not a number"
            )
            token_ids[i] = None
    return Sampled(token_ids=token_ids, logprobs=_logprobs(logits, sequences, token_ids), errors=errors)


def _maxima(rows: Tensor) -> tuple[list[float], list[int]]:
    """Return each row's maximum and where it stands first; NaN counts as the largest."""
    if rows.device.type == "cpu":  # ten times as fast as torch's
        values = rows.numpy()
        places = values.argmax(axis=-1)
        return values[np.arange(len(values)), places].tolist(), places.tolist()
    peaks, best = rows.max(dim=-1)
    return peaks.tolist(), best.tolist()


def uniform(seed: int, index: int, position: int) -> float:
    """Return the number in (0, 1) that decides a draw: a hash, so there is no state to lose.

    The mixing function is splitmix64's (Steele, Lea & Flood, "Fast splittable pseudorandom number
    generators", 2014), applied after each of the three parts.
    """
    state = 0
    for part in (seed, index, position):
        state = (state ^ (part & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return ((state >> 12) + 0.5) * 2.0**-52


def adjust(logits: Tensor, sequences: Rows[Sequence], masks: Masks) -> Tensor:
    """Return the logits [num_rows, vocab_size] after masks, penalties, biases and min_tokens.

    A copy where a row has any of them, else `logits` itself.
    """
    adjusted = logits
    for i, sequence in enumerate(sequences):
        params = sequence.sampling
        banned = sequence.stop_ids if sequence.num_output_tokens < params.min_tokens else ()
        mask = masks.get(i)
        if not (_has_penalty(params) or params.logit_bias or banned or mask is not None):
            continue
        if adjusted is logits:
            adjusted = logits.clone()
        row = adjusted[i]
        if mask is not None:
            row.masked_fill_(~torch.from_numpy(mask).to(row.device), -math.inf)
        if _has_penalty(params):
            _penalise(row, sequence)
        if params.logit_bias:
            row[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=row.device)
        if banned:
            row[sorted(banned)] = -math.inf
    return adjusted


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _penalise(row: Tensor, sequence: Sequence) -> None:
    params = sequence.sampling
    tokens = np.array(sequence.token_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(tokens)).to(row.device)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = np.unique(tokens[sequence.num_prompt_tokens :], return_counts=True)
        amount = params.presence_penalty + params.frequency_penalty * counts
        row[torch.from_numpy(ids).to(row.device)] -= torch.from_numpy(amount).to(row)


def _draw(logits: Tensor, sequences: Rows[Sequence]) -> list[int]:
    """Draw by the inverse of the cumulated probabilities in the order of token ids."""
    params = [sequence.sampling for sequence in sequences]
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / _column([p.temperature for p in params], logits)
    if any(p.top_k for p in params):
        scaled = _keep_top_k(scaled, [p.top_k for p in params])
    probabilities = torch.softmax(scaled, dim=-1)
    if any(p.min_p for p in params):
        floor = probabilities.amax(dim=-1, keepdim=True) * _column([p.min_p for p in params], logits)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    draws = [uniform(s.sampling.seed, s.index, s.num_tokens) for s in sequences]
    shares = [p.top_p for p in params]
    if kernels is not None and probabilities.device.type == "cpu":
        rows = zip(probabilities, shares, draws, strict=True)
        return [_draw_from(row, share, draw) for row, share, draw in rows]
    return draw_by_tensors(probabilities, shares, draws)


def _draw_from(row: Tensor, top_p: float, draw: float) -> int:
    assert kernels is not None
    values = row.numpy()
    threshold = np.float32(0.0)
    if top_p < 1.0:
        threshold = kernels.nucleus_threshold(values, top_p * float(row.double().sum()))
    token: int = kernels.draw(values, threshold, draw)
    return token


def draw_by_tensors(
    probabilities: Tensor,  # [num_rows, vocab_size]; may be changed
    top_p: list[float],  # [num_rows], as the next
    draws: list[float],  # in (0, 1)
) -> list[int]:
    """Draw where sampling_kernels.py cannot: without numba, or on a GPU."""
    if any(share < 1.0 for share in top_p):
        probabilities = _keep_top_p(probabilities, top_p)
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # Below the total even after rounding, or the search would run past the last token that is left.
    wanted = torch.minimum(_column(draws, cumulated) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, wanted, right=True).squeeze(-1)
    tokens = tokens.clamp_max(probabilities.shape[-1] - 1)
    drawn: list[int] = tokens.tolist()
    return drawn


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _keep_top_k(scaled: Tensor, top_k: list[int]) -> Tensor:
    vocab_size = scaled.shape[-1]
    kept = [min(k, vocab_size) if k > 0 else vocab_size for k in top_k]
    for i, k in enumerate(kept):
        if k < vocab_size:
            row = scaled[i]
            scaled[i] = row.masked_fill(row < row.topk(k).values[-1], -math.inf)
    return scaled


def _keep_top_p(probabilities: Tensor, top_p: list[float]) -> Tensor:
    """Zero all below the smallest probability of the smallest set that reaches top_p of the mass."""
    for i, share in enumerate(top_p):
        if share < 1.0:
            row = probabilities[i]
            target = share * float(row.double().sum())
            threshold = _nucleus_threshold(row, target)
            probabilities[i] = row.masked_fill(row < threshold, 0.0)
    return probabilities


def _nucleus_threshold(row: Tensor, target: float) -> float:
    """Return the smallest of the largest values that together reach `target`."""
    count = _NUCLEUS
    while True:
        values = row.topk(min(count, len(row))).values.double()
        mass = values.cumsum(dim=-1)
        if count >= len(row) or float(mass[-1]) >= target:
            break
        count *= _NUCLEUS_GROWTH
    reached = int(torch.searchsorted(mass, target))
    return float(values[min(reached, len(values) - 1)])


def _logprobs(
    logits: Tensor, sequences: Rows[Sequence], token_ids: list[int | None]
) -> list[TokenLogprobs | None] | None:
    asked = [
        i for i, s in enumerate(sequences) if s.sampling.logprobs is not None and token_ids[i] is not None
    ]
    if not asked:
        return None
    logprobs: list[TokenLogprobs | None] = [None] * len(sequences)
    for i in asked:
        token = token_ids[i]
        assert token is not None
        logprobs[i] = token_logprobs(logits[i], token, sequences[i].sampling.logprobs or 0)
    return logprobs


def token_logprobs(
    logits: Tensor,  # [vocab_size] float32
    token_id: int,
    count: int,  # alternatives to report
) -> TokenLogprobs:
    """Return the logprobs of a token at a position."""
    row = torch.log_softmax(logits, dim=-1)
    top: tuple[TopLogprob, ...] = ()
    if count:
        values, ids = row.topk(min(count, row.shape[-1]))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        top = tuple(TopLogprob(token_id=token, logprob=value) for token, value in pairs)
    return TokenLogprobs(logprob=float(row[token_id]), top=top)
