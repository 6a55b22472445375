"""Non-negative least squares from normal equations, by active sets: exact, and quick for a few unknowns."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

TOLERANCE: Final = 1e-9


def nonnegative_least_squares(
    gram: NDArray[np.float64],  # [n, n] A'A, positive definite
    target: NDArray[np.float64],  # [n] A'b
) -> NDArray[np.float64]:  # [n]
    """Minimise |Ax - b|^2 over x >= 0 (Lawson and Hanson; with A'A: Bro and de Jong 1997).

    Cost: about one solve of at most n equations per positive unknown.
    """
    count = len(target)
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gain = np.where(free, -np.inf, target - gram @ x)
        best = int(gain.argmax())
        if gain[best] <= TOLERANCE:
            break
        free[best] = True
        x = _solve_free(gram, target, x, free)
    return x


def _solve_free(
    gram: NDArray[np.float64],
    target: NDArray[np.float64],
    x: NDArray[np.float64],  # feasible
    free: NDArray[np.bool_],  # unknowns that may be positive; those that reach 0 are taken out
) -> NDArray[np.float64]:
    """Go from `x` towards the best values of the free unknowns, as far as all stay >= 0, until all do."""
    while True:
        goal = np.zeros_like(x)
        goal[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
        falling = free & (goal <= 0)
        if not falling.any():
            return goal
        steps = np.full_like(x, np.inf)
        steps[falling] = x[falling] / np.maximum(x[falling] - goal[falling], np.finfo(float).tiny)
        first = int(steps.argmin())
        x = np.maximum(x + steps[first] * (goal - x), 0.0)
        free &= x > 0
        free[first], x[first] = False, 0.0
