"""Goodness of fit: whether arrivals are what they should be."""

import math

import numpy as np

from load.statistics import Floats


def kolmogorov_p_value(values: Floats, cdf: Floats) -> float:
    """Return the asymptotic p-value of the Kolmogorov-Smirnov test.

    `values` sorted ascending, `cdf` the distribution to test against at those values. Series of Kolmogorov
    (1933), with Stephens' (1970) correction for small samples.
    """
    n = len(values)
    above = np.arange(1, n + 1) / n - cdf
    below = cdf - np.arange(n) / n
    distance = max(float(above.max()), float(below.max()))
    scaled = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    if scaled < 0.2:
        return 1.0
    terms = (2.0 * (-1.0) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))


def dispersion(times: Floats, bin_s: float, duration_s: float) -> float:
    """Return variance over mean of the arrivals per bin: 1 for a Poisson process."""
    num_bins = int(duration_s / bin_s)
    counts = np.histogram(times, bins=num_bins, range=(0.0, num_bins * bin_s))[0]
    return float(counts.var(ddof=1) / counts.mean())
