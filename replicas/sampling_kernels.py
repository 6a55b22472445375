"""Draws from one row of probabilities, compiled by numba: a pass over the row instead of a sort.

The results are those of sampling.py's tensors, bit for bit: masses add up in fp64, one after the other.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from replicas.attention import lanes

_LANES: Final = lanes.WIDTH
_CUT: Final = np.float32(0.125)
"""How much lower the next look at a row goes when the mass found is short."""
_LEAST: Final = np.float32(1e-30)
_MASKED: Final = np.float32(-np.inf)


@njit(nogil=True, cache=True, error_model="numpy")
def _first_cut(row: Any) -> Any:
    """Return a value that 2 * _LANES of the row, at least, reach: the least of so many maxima."""
    a = b = lanes.splat(_MASKED)
    for i in range(0, len(row) - 2 * _LANES + 1, 2 * _LANES):
        a = lanes.clamp_below(lanes.load(row, i), a)
        b = lanes.clamp_below(lanes.load(row, i + _LANES), b)
    zero = lanes.splat(np.float32(0.0))
    return -lanes.largest(lanes.sub(zero, lanes.clamp_above(a, b)))


@njit(nogil=True, cache=True, error_model="numpy")
def _at_least(row: Any, cut: Any) -> Any:
    """Return the values of the row that reach `cut`, the largest first."""
    found = np.empty(len(row), np.float32)
    count = 0
    whole = len(row) // _LANES * _LANES
    for start in range(0, whole, _LANES):
        if lanes.largest(lanes.load(row, start)) >= cut:
            for i in range(start, start + _LANES):
                if row[i] >= cut:
                    found[count] = row[i]
                    count += 1
    for i in range(whole, len(row)):
        if row[i] >= cut:
            found[count] = row[i]
            count += 1
    return -np.sort(-found[:count])


@njit(nogil=True, cache=True, error_model="numpy")
def nucleus_threshold(
    row: Any,  # [vocab_size] float32, contiguous; probabilities
    target: Any,  # float64
) -> Any:
    """Return the smallest of the largest values that together reach `target`; if none do, of the row."""
    cut = _first_cut(row) if len(row) >= 2 * _LANES else np.float32(0.0)
    while True:
        values = _at_least(row, cut)
        mass = 0.0
        for i in range(len(values)):
            mass += np.float64(values[i])
            if mass >= target:
                return values[i]
        if cut == 0.0:
            return values[-1] if len(values) > 0 else cut
        cut = cut * _CUT if cut > _LEAST else np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def draw(
    row: Any,  # [vocab_size] float32, contiguous; probabilities
    threshold: Any,  # float32; what is below it is not drawn
    uniform: Any,  # float64 in (0, 1)
) -> Any:
    """Draw by the inverse of the cumulated probabilities in the order of token ids."""
    total, _ = _add_up(row, threshold, np.inf)
    # Below the total even after rounding, or the search would run past the last token that is left.
    _, token = _add_up(row, threshold, min(uniform * total, np.nextafter(total, 0.0)))
    return token


@njit(nogil=True, cache=True, error_model="numpy")
def _add_up(row: Any, threshold: Any, limit: Any) -> Any:
    """Return the probability of the tokens that may be drawn, up to the first with which it exceeds `limit`,
    and that token; the last one if none does."""
    whole = len(row) // _LANES * _LANES
    mass = 0.0
    for start in range(0, len(row), _LANES):
        if start == whole or lanes.largest(lanes.load(row, start)) >= threshold:
            for i in range(start, min(start + _LANES, len(row))):
                if row[i] >= threshold:
                    mass += np.float64(row[i])
                    if mass > limit:
                        return mass, i
    return mass, len(row) - 1
