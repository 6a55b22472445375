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
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
FIT_SWEEPS: Final = 40
RIDGE: Final = 1e-6
CHUNK_MULTIPLE: Final = 16
UNSEEN_TOKENS: Final = 64
TRUST: Final = 2
"""A chunk beside decodes may be so many times as large as the largest step that the fit has seen, or
UNSEEN_TOKENS: what larger ones cost is not known, and the fit would say nothing."""


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


@dataclass(slots=True)
class _Region:
    """The latest samples of one kind of step, so that frequent kinds do not push out rare ones."""

    features: deque[list[float]] = field(default_factory=lambda: deque(maxlen=SAMPLES_PER_REGION))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_PER_REGION))


class StepTimeModel:
    """Online non-negative least squares over relative errors. No clock, no randomness."""

    def __init__(self) -> None:
        self._regions: dict[tuple[int, bool], _Region] = {}
        self._coefficients: NDArray[np.float64] = np.zeros(NUM_FEATURES)
        self._plain: list[float] = [0.0] * NUM_FEATURES
        self._residuals: deque[float] = deque(maxlen=256)
        self._num_seen = 0
        self._num_since_fit = 0
        self._q99 = 0.0
        self._largest_seen = 0
        self._largest_fitted = 0
        self.fitted = False

    @property
    def residual_q99_s(self) -> float:
        """99th percentile of (measured - predicted) over recent steps with decodes, >= 0."""
        return self._q99

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from one measured step. O(1), and a refit of well under a millisecond now and then."""
        self._num_seen += 1
        if self._num_seen <= SKIPPED_STEPS or not math.isfinite(seconds) or seconds <= 0:
            return
        if self.fitted and shape.kv_read_tokens:
            self._residuals.append(seconds - self.predict(shape))
        self._largest_seen = max(self._largest_seen, shape.num_new_tokens)
        key = (_segment(shape.num_new_tokens), shape.prefill_work > 0)
        region = self._regions.setdefault(key, _Region())
        region.features.append(features(shape))
        region.seconds.append(seconds)
        self._num_since_fit += 1
        due = REFIT_EVERY if self.fitted else MIN_SAMPLES
        if self._num_since_fit >= due:
            self._fit()

    def predict(self, shape: StepShape) -> float:
        """Seconds this step should take; 0 before the first fit."""
        return math.fsum(map(operator.mul, self._plain, features(shape)))

    def largest_chunk(self, base: StepShape, context: int, budget_s: float, limit: int) -> int:
        """The most prefill tokens, <= limit, that may join `base` within `budget_s`.

        Rounded down to a multiple of 16, except when all of `limit` fits. 0 if nothing fits. Much larger
        steps than any seen so far do not fit.
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
        # Relative errors: a 2 s prefill must not drown the 30 ms decodes whose latency is promised.
        rows = rows / seconds[:, None]
        scale = np.maximum(np.sqrt((rows * rows).sum(axis=0)), 1e-30)
        scaled = rows / scale
        gram = scaled.T @ scaled + RIDGE * np.eye(NUM_FEATURES)
        target = scaled.sum(axis=0)
        weights = nonnegative_least_squares(gram, target, self._coefficients * scale)
        self._coefficients = weights / scale
        self._plain = self._coefficients.tolist()
        self.fitted = True
        if self._residuals:
            self._q99 = max(0.0, float(np.quantile(np.array(self._residuals), 0.99)))


def nonnegative_least_squares(
    gram: NDArray[np.float64],  # [n, n] positive definite
    target: NDArray[np.float64],  # [n]
    start: NDArray[np.float64],  # [n] warm start
) -> NDArray[np.float64]:
    """Minimise x'Gx/2 - t'x over x >= 0 by cyclic coordinate descent (Franc, Hlavac, Navara 2005)."""
    x = start.copy()
    gradient = gram @ x - target
    diagonal = np.diag(gram)
    for _ in range(FIT_SWEEPS):
        for i in range(len(x)):
            new = max(0.0, x[i] - gradient[i] / diagonal[i])
            if new != x[i]:
                gradient += (new - x[i]) * gram[:, i]
                x[i] = new
    return x


def _segment(num_tokens: int) -> int:
    return max(0, bisect.bisect_left(KNOTS, num_tokens) - 1)


def features(shape: StepShape) -> list[float]:
    tokens = shape.num_new_tokens
    place = max(0, bisect.bisect_right(KNOTS, tokens) - 1)
    row = [1.0, *WIDTHS[:place], float(max(0, tokens - KNOTS[place])), *ZEROS[place:]]
    row += (shape.prefill_work, float(shape.kv_read_tokens), float(shape.num_sampling))
    return row
