"""Statistics of a run: quantiles, their intervals, fairness. Pure; arrays are float64."""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

QUANTILES: Final = (0.5, 0.9, 0.99)
RESAMPLES: Final = 200
MAX_BOOTSTRAP_VALUES: Final = 400_000
CURVE_POINTS: Final = 101


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """95% confidence interval."""

    low: float
    high: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in a few numbers, in the unit of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    p50_ci: Interval | None = None
    p99_ci: Interval | None = None


def summarise(values: Floats, owners: Ints | None = None) -> Summary | None:
    """Summarise values; None when there are none.

    `owners` says which request each value belongs to (default: one each). Gaps of one answer resemble each
    other, so intervals come from resampling requests, not values (cluster bootstrap; Davison & Hinkley 1997,
    section 3.8). Same values, same intervals: the resampling is seeded.
    """
    if not len(values):
        return None
    p50, p90, p99 = np.quantile(values, QUANTILES).tolist()
    intervals = _quantile_intervals(values, owners)
    return Summary(
        count=len(values),
        mean=float(values.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=float(values.max()),
        p50_ci=intervals[0],
        p99_ci=intervals[1],
    )


def _quantile_intervals(values: Floats, owners: Ints | None) -> tuple[Interval | None, Interval | None]:
    owners = np.arange(len(values)) if owners is None else owners
    names, owners = np.unique(owners, return_inverse=True)
    if len(names) < 8:
        return None, None
    rng = np.random.default_rng(0)
    if len(values) > MAX_BOOTSTRAP_VALUES:
        # Thinning keeps the owners' spread, which is what the interval is made of.
        kept = rng.choice(len(values), MAX_BOOTSTRAP_VALUES, replace=False)
        values, owners = values[kept], owners[kept]
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    draws = np.empty((RESAMPLES, 2))
    for i in range(RESAMPLES):
        times_drawn = np.bincount(rng.integers(0, len(names), len(names)), minlength=len(names))
        mass = np.cumsum(times_drawn[owners])
        if mass[-1] == 0:
            draws[i] = values[[len(values) // 2, -1]]
            continue
        at = np.searchsorted(mass, [0.5 * mass[-1], 0.99 * mass[-1]])
        draws[i] = values[np.minimum(at, len(values) - 1)]
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    return Interval(float(low[0]), float(high[0])), Interval(float(low[1]), float(high[1]))


def curve(values: Floats) -> list[float]:
    """Return the quantiles 0, 0.01, ..., 1, ends included: a cumulative distribution to draw."""
    if not len(values):
        return []
    return [round(value, 4) for value in np.quantile(values, np.linspace(0, 1, CURVE_POINTS)).tolist()]


def jain_index(shares: list[float]) -> float:
    """Return (sum x)^2 / (n * sum x^2): 1 = all equal, 1/n = one has all (Jain, Chiu & Hawe 1984).

    1 when nobody got anything: then all got the same.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares > 0 else 1.0


def max_min_shares(total: float, demands: list[float], weights: list[float]) -> list[float]:
    """Divide `total` by weight without giving anyone more than it asked for (water-filling).

    Jain's index compares what users got with this (Jain, Chiu & Hawe 1984, section 4): a user who asks for
    little, and gets it, is treated fairly.
    """
    shares = [0.0] * len(demands)
    # Whoever is satisfied first, per unit of weight, first.
    order = sorted(range(len(demands)), key=lambda i: demands[i] / weights[i])
    left, weight_left = total, sum(weights)
    for i in order:
        shares[i] = min(demands[i], left * weights[i] / weight_left)
        left -= shares[i]
        weight_left -= weights[i]
    return shares
