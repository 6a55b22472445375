"""When requests arrive: a law of gaps over a profile of rates, drawn once. Pure; times in seconds.

Gaps are drawn with mean 1 and mapped through the inverse of the integrated rate (time change of a renewal
process): a Poisson process under a ramp is then an exact inhomogeneous Poisson process, without thinning.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec

from load.errors import LoadError

GapLaw = Literal["poisson", "constant", "gamma"]

MAX_ARRIVALS: Final = 2_000_000
DIURNAL_PIECES: Final = 96


class RatePoint(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    rate: float
    """Requests per second."""


class RateProfile(msgspec.Struct, frozen=True):
    """Rate over time, linear between points. Two points at one time are a step."""

    points: tuple[RatePoint, ...]

    @property
    def duration_s(self) -> float:
        return self.points[-1].at_s

    @property
    def expected_arrivals(self) -> float:
        pairs = zip(self.points, self.points[1:], strict=False)
        return sum((b.at_s - a.at_s) * (a.rate + b.rate) / 2 for a, b in pairs)

    def scaled(self, factor: float) -> "RateProfile":
        """Return the same shape at `factor` times the rate."""
        return RateProfile(tuple(RatePoint(p.at_s, p.rate * factor) for p in self.points))


def parse_rate(text: str, duration_s: float) -> RateProfile:
    """Read `8`, `ramp:1:20`, `steps:5,20,5` (equal parts) or `diurnal:MEAN:AMPLITUDE:PERIOD_S`.

    AMPLITUDE is a fraction of the mean. Raises LoadError, also for rates that no machine can drive.
    """
    kind, _, rest = text.rpartition(":") if text.count(":") == 0 else text.partition(":")
    try:
        profile = RateProfile(tuple(_points(kind, rest, duration_s)))
    except ValueError:
        raise LoadError(
            f"the rate {text!r} is none of 8, ramp:1:20, steps:5,20,5, diurnal:MEAN:AMPLITUDE:PERIOD_S"
        ) from None
    rates = [point.rate for point in profile.points]
    if not all(0 <= rate < math.inf for rate in rates) or profile.expected_arrivals <= 0:
        raise LoadError(f"the rate {text!r} must be finite and never negative, and not zero all the time")
    if profile.expected_arrivals > MAX_ARRIVALS:
        raise LoadError(
            f"the rate {text!r} over {duration_s:g} s means {profile.expected_arrivals:.3g} requests, more "
            f"than the {MAX_ARRIVALS} one run can hold"
        )
    return profile


def _points(kind: str, rest: str, duration_s: float) -> Iterator[RatePoint]:
    if kind == "":
        yield from (RatePoint(0.0, float(rest)), RatePoint(duration_s, float(rest)))
    elif kind == "ramp":
        first, last = rest.split(":")
        yield from (RatePoint(0.0, float(first)), RatePoint(duration_s, float(last)))
    elif kind == "steps":
        rates = [float(rate) for rate in rest.split(",")]
        width = duration_s / len(rates)
        for i, rate in enumerate(rates):
            yield from (RatePoint(i * width, rate), RatePoint((i + 1) * width, rate))
    elif kind == "diurnal":
        mean, amplitude, period_s = (float(number) for number in rest.split(":"))
        if not 0 < period_s < math.inf or not 0 <= amplitude <= 1:
            raise ValueError
        pieces = max(1, math.ceil(DIURNAL_PIECES * duration_s / period_s))
        for i in range(pieces + 1):
            at_s = duration_s * i / pieces
            # Begins in the valley, as a day does.
            yield RatePoint(at_s, mean * (1 - amplitude * math.cos(2 * math.pi * at_s / period_s)))
    else:
        raise ValueError


def unit_gaps(law: GapLaw, cv: float, rng: random.Random) -> Callable[[], float]:
    """Return a source of gaps of mean 1. `cv`: coefficient of variation, for gamma only."""
    if law == "poisson":
        return lambda: rng.expovariate(1.0)
    if law == "constant":
        return lambda: 1.0
    if not 0 < cv <= 100:
        raise LoadError(f"the coefficient of variation must be in (0, 100], not {cv:g}")
    shape = 1 / (cv * cv)
    return lambda: rng.gammavariate(shape, 1 / shape)


def draw_arrivals(profile: RateProfile, next_gap: Callable[[], float]) -> list[float]:
    """Return ascending arrival times within the profile. O(arrivals + points)."""
    times: list[float] = []
    due = next_gap()
    integrated = 0.0
    for a, b in zip(profile.points, profile.points[1:], strict=False):
        width = b.at_s - a.at_s
        area = width * (a.rate + b.rate) / 2
        while due <= integrated + area:
            if area > 0:
                times.append(a.at_s + _inverse_area(due - integrated, a.rate, b.rate, width))
            due += next_gap()
            if len(times) > 2 * MAX_ARRIVALS:
                raise LoadError(f"more than {2 * MAX_ARRIVALS} arrivals")
        integrated += area
    return times


def _inverse_area(area: float, first: float, last: float, width: float) -> float:
    """Return t with the integral of the rate from 0 to t equal to `area`, rate linear from first to last."""
    slope = (last - first) / width
    # The stable form of the quadratic's root: no cancellation as the slope goes to 0.
    root = math.sqrt(max(0.0, first * first + 2 * slope * area))
    return min(width, 2 * area / (first + root)) if first + root > 0 else width
