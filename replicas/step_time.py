"""StepTimeModel: how long a step will take, learned while running.

    t(step) = g(T_new) + c * sum n*(ctx + n/2) + d * KV_read + e * S

T_new are the step's new tokens, n and ctx chunk and context of each prefill, KV_read the summed contexts
of the decodes, S the sequences that sample. g is piecewise linear and never falls: matrix kernels cost
by rows, in stairs on a CPU (8 -> 16 rows was 49 -> 92 ms). All coefficients are non-negative, so a
longer step is never predicted to be faster, and `largest_chunk` may bisect.
"""

import bisect
import itertools
import math
import operator
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from replicas.least_squares import nonnegative_least_squares

KNOTS: Final = (0, 1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Where g may change its slope; the last segment goes on for ever."""
WIDTHS: Final = tuple(float(high - low) for low, high in itertools.pairwise(KNOTS))
ZEROS: Final = (0.0,) * len(WIDTHS)
NUM_FEATURES: Final = len(KNOTS) + 4
SKIPPED_STEPS: Final = 3
"""First steps compile kernels and touch cold memory; a fit must never see them."""
SAMPLES_PER_REGION: Final = 48
MIN_SAMPLES: Final = 8
REFIT_EVERY: Final = 32
REFIT_WHEN_WRONG: Final = 4
"""Steps between two fits at least, even where predictions fail."""
WRONG: Final = 1.25
"""A step so many times as long as predicted, or as short, asks for a fit."""
TINY_S: Final = 1e-9
"""In place of predictions of nothing, which are divided by."""
RIDGE: Final = 1e-6
EVENNESS: Final = 1.0
"""How much it counts that neighbouring slopes of g are equal, in samples. A segment that no sample is in
would otherwise cost nothing, or all of what the next sample beyond it took."""
CHUNK_MULTIPLE: Final = 8
UNSEEN_TOKENS: Final = 64
TRUST: Final = 2
"""A chunk beside decodes may be so many times as large as the largest step that the fit has seen, or
UNSEEN_TOKENS: what larger ones cost is a guess."""
RECENT_STEPS: Final = 32
"""So many of the latest steps with decodes say at what pace the machine works."""
RECENT_CHUNKS: Final = 256
"""So many of the latest steps with prefill beside decodes say how far predictions are off."""
LATE: Final = 0.005
"""Share of those that the margin may leave out: of an answer's gaps, 99% must be in the target."""
FEW: Final = 3.0
"""Over their number, this is what the margin has in addition: few samples do not show the rare ones."""
PACE_GAIN: Final = 0.35
"""Weight of the last step in the pace."""
MAX_PACE: Final = 2.0
"""One step changes the pace as if it had taken at most so many times the prediction, or as little."""
MAX_OVERRUN: Final = 1.5
"""The margin at most: what would cover worse leaves little of a target, and a machine that stalls so often
does so in plain decode steps as well."""
DEFAULT_OVERRUN: Final = 1.25
"""As long as few such steps were seen."""


@dataclass(slots=True, kw_only=True)
class StepShape:
    """The quantities of a step that its duration depends on."""

    num_new_tokens: int = 0
    prefill_work: float = 0.0
    """Sum over prefills of n * (ctx + n / 2): query-key pairs."""
    kv_read_tokens: int = 0
    """Sum of the decodes' contexts."""
    num_sampling: int = 0

    def with_prefill(self, num_tokens: int, context: int, samples: bool = False) -> "StepShape":
        """This step plus a prefill of `num_tokens` after `context`; a negative number takes it away."""
        sign = 1 if num_tokens >= 0 else -1
        return StepShape(
            num_new_tokens=self.num_new_tokens + num_tokens,
            prefill_work=self.prefill_work + num_tokens * (context + abs(num_tokens) / 2),
            kv_read_tokens=self.kv_read_tokens,
            num_sampling=self.num_sampling + sign * samples,
        )

    def without_decode(self, context: int) -> "StepShape":
        return StepShape(
            num_new_tokens=self.num_new_tokens - 1,
            prefill_work=self.prefill_work,
            kv_read_tokens=self.kv_read_tokens - context,
            num_sampling=self.num_sampling - 1,
        )


@dataclass(frozen=True, slots=True)
class _Samples:
    """The latest samples of one kind of step, so that frequent kinds do not push out rare ones."""

    features: deque[list[float]]
    seconds: deque[float]

    @classmethod
    def of(cls, length: int) -> "_Samples":
        return cls(deque(maxlen=length), deque(maxlen=length))

    def add(self, features: list[float], seconds: float) -> None:
        self.features.append(features)
        self.seconds.append(seconds)

    def ratios(self, coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
        """Measured over predicted."""
        if not self.seconds:
            return np.empty(0)
        return np.array(self.seconds) / np.maximum(np.array(self.features) @ coefficients, TINY_S)


class StepTimeModel:
    """Online non-negative least squares over relative errors. No clock, no randomness."""

    def __init__(self) -> None:
        self._regions: dict[tuple[int, bool], _Samples] = {}
        self._recent = _Samples.of(RECENT_STEPS)
        self._chunks = _Samples.of(RECENT_CHUNKS)
        self._plain: list[float] = [0.0] * NUM_FEATURES
        self._num_seen = 0
        self._num_since_fit = 0
        self._largest_seen = 0
        self._largest_fitted = 0
        self.overrun = DEFAULT_OVERRUN
        """How many times prediction and pace a step with prefill beside decodes takes at most, but for
        LATE of the cases; 1 <= overrun <= MAX_OVERRUN."""
        self.pace = 1.0
        """How many times the prediction the latest steps took: neighbours and heat change a machine's speed
        within seconds, for seconds."""
        self.fitted = False

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one measured step. O(1), and a refit of about a millisecond now and then."""
        self._num_seen += 1
        if self._num_seen <= SKIPPED_STEPS or not math.isfinite(seconds) or seconds <= 0:
            return
        self._largest_seen = max(self._largest_seen, shape.num_new_tokens)
        key = (_segment(shape.num_new_tokens), shape.prefill_work > 0)
        if key not in self._regions:
            self._regions[key] = _Samples.of(SAMPLES_PER_REGION)
        row = features(shape)
        self._regions[key].add(row, seconds)
        ratio = seconds / max(self._predict(row), TINY_S) if self.fitted else 1.0
        if shape.kv_read_tokens:
            self.pace = _next_pace(self.pace, ratio)
            self._recent.add(row, seconds)
            if shape.prefill_work:
                self._chunks.add(row, seconds)
        self._num_since_fit += 1
        if self._num_since_fit >= self._fit_after(shape, ratio):
            self._fit()

    def _fit_after(self, shape: StepShape, ratio: float) -> int:
        if not self.fitted:
            return MIN_SAMPLES
        is_new = shape.prefill_work > 0 and len(self._chunks.seconds) < SAMPLES_PER_REGION
        is_wrong = not 1 / WRONG < ratio < WRONG
        return REFIT_WHEN_WRONG if is_new or is_wrong else REFIT_EVERY

    def predict(self, shape: StepShape) -> float:
        """Seconds this step should take; 0 before the first fit."""
        return self._predict(features(shape))

    def _predict(self, row: list[float]) -> float:
        return math.fsum(map(operator.mul, self._plain, row))

    def largest_chunk(self, base: StepShape, context: int, budget_s: float, limit: int) -> int:
        """The most prefill tokens, <= limit, that may join `base` within `budget_s`.

        Rounded down to a multiple of CHUNK_MULTIPLE, except when all of `limit` fits. 0 if nothing fits.
        Much larger steps than any seen so far do not fit.
        """
        limit = min(limit, max(UNSEEN_TOKENS, TRUST * self._largest_fitted))
        if self.predict(base.with_prefill(limit, context)) <= budget_s:
            return limit
        low, high = 0, limit // CHUNK_MULTIPLE
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(base.with_prefill(middle * CHUNK_MULTIPLE, context)) <= budget_s:
                low = middle
            else:
                high = middle - 1
        return low * CHUNK_MULTIPLE

    def _fit(self) -> None:
        self._num_since_fit = 0
        self._largest_fitted = self._largest_seen
        rows = np.array([row for region in self._regions.values() for row in region.features])
        seconds = np.array([value for region in self._regions.values() for value in region.seconds])
        even = _evenness(rows, seconds)
        # Relative errors: a 2 s prefill must not drown the 30 ms decodes whose latency is promised.
        rows = rows / seconds[:, None]
        scale = np.maximum(np.sqrt((rows * rows).sum(axis=0)), 1e-30)
        scaled, scaled_even = rows / scale, even / scale
        gram = scaled.T @ scaled + scaled_even.T @ scaled_even + RIDGE * np.eye(NUM_FEATURES)
        coefficients = nonnegative_least_squares(gram, scaled.sum(axis=0)) / scale
        self._plain = coefficients.tolist()
        self.fitted = True
        self.pace = _paces(self._recent.ratios(coefficients))[-1]
        if len(self._chunks.seconds) >= MIN_SAMPLES:
            ratios = self._chunks.ratios(coefficients)
            self.overrun = _overrun(ratios / _paces(ratios)[:-1])


def _next_pace(pace: float, ratio: float) -> float:
    change = min(max(ratio / pace, 1 / MAX_PACE), MAX_PACE)
    return pace * math.pow(change, PACE_GAIN)


def _paces(ratios: NDArray[np.float64]) -> list[float]:
    """Return the pace before each step, and after the last."""
    return list(itertools.accumulate(ratios.tolist(), _next_pace, initial=1.0))


def _overrun(ratios: NDArray[np.float64]) -> float:
    """Return what all but LATE of the ratios keep: a rare stall does not count, more of them do."""
    kept = len(ratios) - 1 - int(LATE * len(ratios))
    return min(max(1.0, float(np.partition(ratios, kept)[kept])) + FEW / len(ratios), MAX_OVERRUN)


def _evenness(
    rows: NDArray[np.float64],  # [samples, NUM_FEATURES]
    seconds: NDArray[np.float64],  # [samples]
) -> NDArray[np.float64]:  # [len(KNOTS) - 1, NUM_FEATURES]
    """Return equations, each as good as EVENNESS samples, that neighbouring slopes of g are equal."""
    tokens = rows[:, 1 : len(KNOTS) + 1].sum(axis=1)
    order = np.argsort(tokens, kind="stable")
    at_knots_s = np.interp(KNOTS[1:], tokens[order], seconds[order])
    equations = np.zeros((len(KNOTS) - 1, NUM_FEATURES))
    for i, (low, high) in enumerate(itertools.pairwise(KNOTS)):
        weight = EVENNESS * (high - low) / at_knots_s[i]
        equations[i, 1 + i], equations[i, 2 + i] = weight, -weight
    return equations


def _segment(num_tokens: int) -> int:
    return max(0, bisect.bisect_left(KNOTS, num_tokens) - 1)


def features(shape: StepShape) -> list[float]:
    tokens = shape.num_new_tokens
    place = max(0, bisect.bisect_right(KNOTS, tokens) - 1)
    row = [1.0, *WIDTHS[:place], float(max(0, tokens - KNOTS[place])), *ZEROS[place:]]
    row += (shape.prefill_work, float(shape.kv_read_tokens), float(shape.num_sampling))
    return row
