"""Fit: a profile's step times from measured steps. Pure.

An engine fits its own steps while it runs: on the last of each kind, and by squares of relative errors, which
lean to the quick ones. A profile is fitted once, on all of them, by their absolute relative errors: it says
what the median step of each kind takes, whatever a busy machine did to some.
"""

import bisect
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.simulation.profile import Noise, RowTime, StepTimes
from replicas.least_squares import nonnegative_least_squares
from replicas.step_time import KNOTS, StepShape, features

SWEEPS: Final = 30
SMALLEST_ERROR: Final = 0.01
"""Of a prediction: nearer ones do not weigh more."""
RIDGE: Final = 1e-6
QUANTILES: Final = np.linspace(0.0, 1.0, 101)


def fit(shapes: Sequence[StepShape], seconds: Sequence[float]) -> StepTimes:
    """Return the times that deviate least from those measured, one per shape, all > 0; at least one step.

    Least absolute deviations by reweighted least squares (Schlossmacher 1973).
    """
    rows = np.array([features(shape) for shape in shapes])
    times = np.array(seconds)
    coefficients = _weighted(rows, times, 1 / times)
    for _ in range(SWEEPS):
        predicted = np.maximum(rows @ coefficients, 1e-9)
        errors = np.maximum(np.abs(times - predicted), SMALLEST_ERROR * predicted)
        coefficients = _weighted(rows, times, 1 / np.sqrt(errors * predicted))
    return _step_times(coefficients.tolist(), max(shape.num_new_tokens for shape in shapes))


def noise_of(steps: StepTimes, shapes: Sequence[StepShape], seconds: Sequence[float]) -> Noise:
    """Return how the steps that `steps` was fitted to differ from it; at least one of them only decodes, and
    one does not."""
    factors: dict[bool, list[float]] = {False: [], True: []}
    for shape, measured_s in zip(shapes, seconds, strict=True):
        factors[shape.prefill_work > 0].append(measured_s / steps.seconds(shape))
    decodes, prefills = (np.quantile(factors[kind], QUANTILES).tolist() for kind in (False, True))
    return Noise(decodes=tuple(decodes), prefills=tuple(prefills))


def _weighted(
    rows: NDArray[np.float64],  # [steps, features]
    times: NDArray[np.float64],  # [steps]
    weights: NDArray[np.float64],  # [steps]
) -> NDArray[np.float64]:  # [features]
    weighted = rows * weights[:, None]
    scale = np.maximum(np.sqrt((weighted * weighted).sum(axis=0)), 1e-30)
    scaled = weighted / scale
    gram = scaled.T @ scaled + RIDGE * np.eye(rows.shape[1])
    return np.asarray(nonnegative_least_squares(gram, scaled.T @ (times * weights)) / scale)


def _step_times(coefficients: list[float], most_tokens: int) -> StepTimes:
    """Of larger steps than any measured the last line is taken to go on."""

    def base_s(num_tokens: int) -> float:
        row = features(StepShape(num_new_tokens=num_tokens))
        return float(sum(c * value for c, value in zip(coefficients, row, strict=True)))

    knots = KNOTS[: max(2, bisect.bisect_left(KNOTS, most_tokens) + 1)]
    query_key_pair_s, read_token_s, sample_s = coefficients[-3:]
    return StepTimes(
        rows=tuple(RowTime(knot, base_s(knot)) for knot in knots),
        query_key_pair_s=query_key_pair_s,
        read_token_s=read_token_s,
        sample_s=sample_s,
    )
