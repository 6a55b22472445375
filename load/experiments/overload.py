"""Overload, and Little's law: how long the queue gets, predicted and measured."""

from itertools import pairwise
from typing import Any

import msgspec

from load.experiments.demand import Demand, here, simulated
from load.experiments.headway import NO_LIMITS, Lab
from load.experiments.outcome import NOT_AVAILABLE, Chart, Finding, Outcome, Table
from load.plot import Line, bars, line_chart
from load.report import Report
from load.statistics import Summary
from load.table import Row, number
from load.tenants import Cast

NAME = "overload"
HELP = "overload with and without limits, and Little's law"
BELOW, ABOVE = 0.7, 2.0
LIMIT_S = 2.0
TIER: dict[str, Any] = {"name": "interactive", "level": 0}
"""Whoever sends no key is of level 0."""
FREE, LIMITED = [TIER | NO_LIMITS], [TIER | {"ttft_target_ms": LIMIT_S * 1e3}]
CLAIMS = (
    "requests in the system = arrival rate x time in it (Little's law)",
    "above capacity the wait grows with every second by (rate - capacity) / capacity",
    f"limits keep the wait of those admitted near the target, {LIMIT_S:g} s",
)


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in flight on average: counted, and rate x time."""

    counted: float
    rate_times_time: float

    @property
    def holds(self) -> bool:
        return abs(self.counted - self.rate_times_time) <= 0.15 * self.rate_times_time

    def __str__(self) -> str:
        return f"{self.counted:.2f} in flight on average; rate x E2E gives {self.rate_times_time:.2f}"


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Mean queue wait above capacity."""

    served_rps: float
    offered_rps: float
    measured_s: float
    predicted_s: float

    @property
    def holds(self) -> bool:
        return abs(self.measured_s - self.predicted_s) <= 0.3 * self.predicted_s

    def __str__(self) -> str:
        return (
            f"mean wait {self.measured_s:.2f} s measured, {self.predicted_s:.2f} s predicted at "
            f"{self.offered_rps:.2f} requests/s arriving and {self.served_rps:.2f} served"
        )


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT P99 with a target and without, above capacity."""

    with_s: float
    without_s: float
    refused: int
    requests: int

    @property
    def holds(self) -> bool | None:
        return self.with_s <= 2 * LIMIT_S if self.refused else None

    def __str__(self) -> str:
        if not self.refused:
            return f"{NOT_AVAILABLE}: it refused nothing at {ABOVE:g} x capacity"
        return (
            f"TTFT p99 {self.with_s:.1f} s, {self.without_s:.1f} s without; {self.refused} of "
            f"{self.requests} were refused"
        )


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine showed."""

    little: Law
    growth: Growth
    limits: Limits
    ttft_p99_s: dict[str, float]
    """By load."""


def mean_wait_s(rate: float, capacity: float, seats: int, duration_s: float) -> float:
    """Return the mean queue wait of all who arrive within `duration_s` at a rate above capacity.

    Fluid limit: at t, rate * t have come, capacity * t have left and `seats` are being served; the rest wait
    their number over capacity. Nobody waits before t0 = seats / (rate - capacity).
    """
    surplus = rate - capacity
    if surplus * duration_s <= seats:
        return 0.0
    return float(surplus * (duration_s - seats / surplus) ** 2 / (2 * capacity * duration_s))


def run(lab: Lab) -> Outcome:
    demand, cast = here(lab), Cast()
    with lab.serving(demand.engine, tiers=FREE) as subject:
        capacity = demand.capacity(subject)
        below = demand.drive(subject, BELOW * capacity, cast)
        above = demand.drive(subject, ABOVE * capacity, cast)
    with lab.serving(demand.engine, tiers=LIMITED) as subject:
        limited = demand.drive(subject, ABOVE * capacity, cast)
    measured, gpu = _measured(demand, below, above, limited), simulate(lab)
    reports = {f"{BELOW:g} x capacity": below, f"{ABOVE:g} x": above, f"{ABOVE:g} x, limits": limited}
    lines = [_ttft(name, report) for name, report in reports.items()]
    return Outcome(
        name=NAME,
        title="Overload and Little's law",
        findings=[
            Finding(
                claim=claim,
                measured=str(one),
                holds=one.holds,
                simulated=str(other),
                simulated_holds=other.holds,
            )
            for claim, one, other in zip(CLAIMS, _parts(measured), _parts(gpu), strict=True)
        ],
        tables=[_table(reports)],
        charts=[
            Chart(title="Time to first token by arrival", svg=line_chart(lines, "seconds", "ms")),
            Chart(title="TTFT, P99, simulated", svg=bars(list(gpu.ttft_p99_s.items()), "s")),
        ],
        cpu_shows="both laws and the effect of limits in full: they do not depend on hardware.",
        gpu_shows=(
            f"the same on {simulated(lab).seats} seats of {lab.profile}. Its wait is predicted from a "
            "capacity that a run of its own measured; the one here from what the same run served."
        ),
        data={"here": msgspec.to_builtins(measured), "simulated": msgspec.to_builtins(gpu)},
    )


def _parts(overload: Overload) -> tuple[Law | Growth | Limits, ...]:
    return overload.little, overload.growth, overload.limits


def _measured(demand: Demand, below: Report, above: Report, limited: Report) -> Overload:
    duration_s = above.window_s[1]
    # Rates of this very run: a Poisson draw differs from its mean, and a machine from minute to minute.
    offered, capacity = above.total.requests / duration_s, demand.served_per_s(above)
    refused = sum(count for kind, count in limited.total.errors.items() if kind in ("http_429", "http_503"))
    waits = {"without limits": _p99_s(above), "with limits": _p99_s(limited)}
    return Overload(
        little=_little(below),
        growth=Growth(
            served_rps=capacity,
            offered_rps=offered,
            measured_s=(_mean(above.total.ttft_ms) - _mean(below.total.ttft_ms)) / 1e3,
            predicted_s=mean_wait_s(offered, capacity, demand.seats, duration_s),
        ),
        limits=Limits(
            with_s=waits["with limits"],
            without_s=waits["without limits"],
            refused=refused,
            requests=limited.total.requests,
        ),
        ttft_p99_s=waits,
    )


def simulate(lab: Lab) -> Overload:
    """Return what the lab's profile shows."""
    demand, cast = simulated(lab), Cast()
    capacity = demand.simulated_capacity(lab)
    loads = {
        name: demand.scripts(times * capacity, cast) for name, times in (("below", BELOW), ("above", ABOVE))
    }
    below, above, limited = (
        lab.simulate(loads[load], demand.engine, tiers=tiers)
        for load, tiers in (("below", FREE), ("above", FREE), ("above", LIMITED))
    )
    calm, full, held = (report["tiers"][TIER["name"]] for report in (below, above, limited))
    duration_s = demand.num_requests / (ABOVE * capacity)
    offered = above["requests"] / duration_s
    waits = {"without limits": full["ttft_ms_p99"] / 1e3, "with limits": held["ttft_ms_p99"] / 1e3}
    return Overload(
        little=Law(
            counted=below["mean_open"],
            rate_times_time=below["requests"] / below["virtual_s"] * calm["e2e_ms_mean"] / 1e3,
        ),
        growth=Growth(
            served_rps=capacity,
            offered_rps=offered,
            measured_s=(full["ttft_ms_mean"] - calm["ttft_ms_mean"]) / 1e3,
            predicted_s=mean_wait_s(offered, capacity, demand.seats, duration_s),
        ),
        limits=Limits(
            with_s=waits["with limits"],
            without_s=waits["without limits"],
            refused=int(held["refused"]),
            requests=limited["requests"],
        ),
        ttft_p99_s=waits,
    )


def _little(report: Report) -> Law:
    bins = report.series.bins
    # A bin's mean is between its ends.
    ends = [0, *(one.in_flight for one in bins)]
    mean = sum((a + b) / 2 for a, b in pairwise(ends)) / len(bins)
    span_s = len(bins) * report.series.bin_s
    rate = report.total.requests / span_s
    return Law(counted=mean, rate_times_time=rate * _mean(report.total.e2e_ms) / 1e3)


def _p99_s(report: Report) -> float:
    return report.total.ttft_ms.p99 / 1e3 if report.total.ttft_ms is not None else float("nan")


def _mean(summary: Summary | None) -> float:
    return summary.mean if summary is not None else float("nan")


def _table(reports: dict[str, Report]) -> Table:
    rows: list[Row] = [
        (
            name,
            str(report.total.requests),
            str(report.total.failed),
            number(_mean(report.total.ttft_ms)),
            number(report.total.ttft_ms.p99 if report.total.ttft_ms else None),
            number(report.total.output_tokens_per_s),
        )
        for name, report in reports.items()
    ]
    return Table(header=("load", "requests", "failed", "TTFT mean", "TTFT p99", "tokens/s"), rows=rows)


def _ttft(name: str, report: Report) -> Line:
    return Line(name=name, points=[(one.at_s, one.ttft_p50_ms) for one in report.series.bins])
