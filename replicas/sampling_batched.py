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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Knobs:
    """Parameters of all rows on the device; floats are [num_rows, 1] float64."""

    temperature: Tensor
    """1 for greedy rows."""
    min_p: Tensor
    top_p: Tensor
    uniform: Tensor
    """What decides the draw."""
    is_drawing: Tensor
    """0 for greedy rows."""
    top_k: Tensor  # [num_rows, 1] int64; 0 = all tokens
    max_top_k: int
    """0 when no row has one."""


def _upload_knobs(
    sequences: Rows[Sequence], num_tokens: Rows[int], vocab_size: int, staging: Staging
) -> _Knobs:
    table = np.zeros((5, len(sequences)), dtype=np.float64)
    top_k = np.zeros(len(sequences), dtype=np.int64)
    for i, (sequence, position) in enumerate(zip(sequences, num_tokens, strict=True)):
        params = sequence.sampling
        is_drawing = params.temperature >= GREEDY_BELOW
        draw_at = uniform(params.seed, sequence.index, position) if is_drawing else 0.0
        temperature = params.temperature if is_drawing else 1.0
        table[:, i] = (temperature, params.min_p, params.top_p, draw_at, is_drawing)
        if is_drawing and 0 < params.top_k < vocab_size:
            top_k[i] = params.top_k
    columns, ranks = staging.upload([table, top_k])
    temperatures, min_p, top_p, draws, drawing = (column[:, None] for column in columns)
    return _Knobs(
        temperature=temperatures,
        min_p=min_p,
        top_p=top_p,
        uniform=draws,
        is_drawing=drawing,
        top_k=ranks[:, None],
        max_top_k=int(top_k.max()),
    )


def _draw(
    logits: Tensor,  # [num_rows, vocab_size]
    peaks: Tensor,  # [num_rows]
    best: Tensor,  # [num_rows] int64; what greedy rows take
    sequences: Rows[Sequence],
    num_tokens: Rows[int],
    staging: Staging,
) -> Tensor:  # [num_rows] int64
    vocab_size = logits.shape[-1]
    knobs = _upload_knobs(sequences, num_tokens, vocab_size, staging)
    scaled = (logits - peaks[:, None]) / knobs.temperature.float()
    if knobs.max_top_k:
        values = scaled.topk(knobs.max_top_k, dim=-1).values
        edge = values.gather(1, (knobs.top_k - 1).clamp_min(0)).masked_fill(knobs.top_k == 0, -math.inf)
        scaled = scaled.masked_fill(scaled < edge, -math.inf)
    probabilities = torch.softmax(scaled, dim=-1)
    if any(sequence.sampling.min_p for sequence in sequences):
        floor = probabilities.amax(dim=-1, keepdim=True) * knobs.min_p.float()
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    if any(sequence.sampling.top_p < 1.0 for sequence in sequences):
        probabilities = _keep_top_p(probabilities, knobs.top_p)
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # Below the total even after rounding, or the search would run past the last token that is left.
    wanted = torch.minimum(knobs.uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, wanted, right=True).clamp_max(vocab_size - 1)
    return torch.where(knobs.is_drawing > 0, tokens, best[:, None])[:, 0]


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
