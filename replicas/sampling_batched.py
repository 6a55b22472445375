"""Sampling where every wait for the device costs: all rows at once, one small tensor back.

The rules, and up to rounding the results, are those of sampling.py: the same thresholds, the same inverse of
the cumulated probabilities, the same hash for the same (seed, index, position).
"""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.api import TokenLogprobs, TopLogprob
from replicas.attention.staging import Staging
from replicas.sampling import GREEDY_BELOW, Masks, Sampled, adjust, uniform
from replicas.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Tokens that may not have been computed yet."""

    token_ids: Tensor  # [num_rows] int64 on the device
    report: Tensor  # [n] float64 on the device; what `read` wants to see on the host
    asked: tuple[int, ...]
    """Rows whose logprobs are wanted."""
    num_top: int
    """Alternatives reported per such row; the most that any of them asked for."""


def draw(
    logits: Tensor,  # [num_rows, vocab_size] float32; not changed
    sequences: Rows[Sequence],
    num_tokens: Rows[int],  # per row the tokens before the one to draw: it decides the draw
    masks: Masks,
    staging: Staging,
) -> Drawn:
    """Begin to choose one token per row. Waits for nothing unless a row has a mask, a bias or a penalty."""
    adjusted = adjust(logits, sequences, masks)
    peaks, token_ids = adjusted.max(dim=-1)
    if any(sequence.sampling.temperature >= GREEDY_BELOW for sequence in sequences):
        token_ids = _draw(adjusted, peaks, token_ids, sequences, num_tokens, staging)
    asked = tuple(i for i, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None)
    num_top = min(max((sequences[i].sampling.logprobs or 0 for i in asked), default=0), logits.shape[-1])
    parts = [token_ids, peaks]
    if asked:
        [rows] = staging.upload([np.array(asked, dtype=np.int64)])
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        top = logprobs.topk(num_top, dim=-1)
        parts += [logprobs.gather(1, token_ids[rows][:, None]), top.values, top.indices]
    report = torch.cat([part.reshape(-1).double() for part in parts])
    return Drawn(token_ids=token_ids, report=report, asked=asked, num_top=num_top)


def read(
    drawn: Drawn,
    report: NDArray[np.float64],  # drawn.report on the host
    sequences: Rows[Sequence],
) -> Sampled:
    """Take the tokens, errors and logprobs out of the report."""
    count = len(sequences)
    token_ids: list[int | None] = list(report[:count].astype(np.int64).tolist())
    errors = {}
    for i, peak in enumerate(report[count : 2 * count].tolist()):
        if not math.isfinite(peak):
            errors[i] = (
                "no token can be sampled" if peak == -math.inf else "the model's output is not a number"
            )
            token_ids[i] = None
    logprobs: list[TokenLogprobs | None] | None = None
    if any(token_ids[i] is not None for i in drawn.asked):
        logprobs = [None] * count
        rows, top = len(drawn.asked), drawn.num_top
        chosen, values, ids = np.split(report[2 * count :], [rows, rows + rows * top])
        for row, i in enumerate(drawn.asked):
            if token_ids[i] is not None:
                span = slice(row * top, row * top + (sequences[i].sampling.logprobs or 0))
                pairs = zip(ids[span].astype(np.int64).tolist(), values[span].tolist(), strict=True)
                alternatives = tuple(TopLogprob(token_id=token, logprob=value) for token, value in pairs)
                logprobs[i] = TokenLogprobs(logprob=float(chosen[row]), top=alternatives)
    return Sampled(token_ids=token_ids, logprobs=logprobs, errors=errors)


def _draw(
    logits: Tensor,  # [num_rows, vocab_size]
    peaks: Tensor,  # [num_rows]
    best: Tensor,  # [num_rows] int64; what greedy rows take
    sequences: Rows[Sequence],
    num_tokens: Rows[int],
    staging: Staging,
) -> Tensor:  # [num_rows] int64
    params = [sequence.sampling for sequence in sequences]
    vocab_size = logits.shape[-1]
    drawing = [p.temperature >= GREEDY_BELOW for p in params]
    top_k = [
        p.top_k if 0 < p.top_k < vocab_size and draws else 0 for p, draws in zip(params, drawing, strict=True)
    ]
    draws = [
        uniform(s.sampling.seed, s.index, position) for s, position in zip(sequences, num_tokens, strict=True)
    ]
    columns = np.array(
        [
            [p.temperature if draws else 1.0 for p, draws in zip(params, drawing, strict=True)],
            [p.min_p for p in params],
            [p.top_p for p in params],
            draws,
            drawing,
        ],
        dtype=np.float64,
    )
    table, last_of_top_k = staging.upload([columns, np.array([max(k - 1, 0) for k in top_k], dtype=np.int64)])
    temperature, min_p, top_p, wanted, is_drawing = (column[:, None] for column in table)
    scaled = (logits - peaks[:, None]) / temperature.float()
    if any(top_k):
        values = scaled.topk(max(top_k), dim=-1).values
        [has_top_k] = staging.upload([np.array(top_k, dtype=np.int64)])
        edge = values.gather(1, last_of_top_k[:, None]).masked_fill(has_top_k[:, None] == 0, -math.inf)
        scaled = scaled.masked_fill(scaled < edge, -math.inf)
    probabilities = torch.softmax(scaled, dim=-1)
    if any(p.min_p for p in params):
        floor = probabilities.amax(dim=-1, keepdim=True) * min_p.float()
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    if any(p.top_p < 1.0 for p in params):
        probabilities = _keep_top_p(probabilities, top_p)
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # Below the total even after rounding, or the search would run past the last token that is left.
    wanted = torch.minimum(wanted * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, wanted, right=True).clamp_max(vocab_size - 1)
    return torch.where(is_drawing[:, 0] > 0, tokens[:, 0], best)


def _keep_top_p(
    probabilities: Tensor,  # [num_rows, vocab_size]
    top_p: Tensor,  # [num_rows, 1] float64
) -> Tensor:
    """Zero all below the smallest probability of the smallest set that reaches top_p of the mass."""
    values = probabilities.sort(dim=-1, descending=True).values
    mass = values.cumsum(dim=-1, dtype=torch.float64)
    target = top_p * mass[:, -1:]
    reached = torch.searchsorted(mass, target).clamp_max(mass.shape[-1] - 1)
    threshold = values.gather(1, reached).masked_fill(top_p >= 1.0, 0.0)
    return probabilities.masked_fill(probabilities < threshold, 0.0)
