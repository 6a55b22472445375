"""Overload, and Little's law: how long the queue gets, predicted and measured."""

from itertools import pairwise
from typing import Any

import msgspec

from load.arrivals import parse_rate
from load.experiments.headway import NO_LIMITS, Lab, Subject
from load.experiments.outcome import NOT_AVAILABLE, Chart, Finding, Outcome, Table
from load.lengths import Lengths
from load.plot import Line, line_chart
from load.report import Report
from load.statistics import Summary
from load.table import Row, number
from load.tenants import Cast
from load.workload import OpenLoop, Workload, open_schedule

NAME = "overload"
HELP = "overload with and without limits, and Little's law"
SEATS = 4
CAPACITY_S = 10.0
"""How long the capacity is measured."""
NUM_REQUESTS = (150, 40)
"""Of each load; the second for quick runs. Slow machines take longer instead of seeing less."""
BELOW, ABOVE = 0.7, 2.0
LIMIT_S = 2.0
TIER: dict[str, Any] = {"name": "interactive", "level": 0}
"""Whoever sends no key is of level 0."""
OUTPUT_TOKENS = 24
WORKLOAD = Workload(
    input_tokens=Lengths(law="fixed", a=32), output_tokens=Lengths(law="fixed", a=OUTPUT_TOKENS)
)


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
    num_requests = NUM_REQUESTS[lab.is_quick]
    engine = {"max_num_seqs": SEATS, "enable_prefix_caching": False}
    with lab.serving(engine, tiers=[TIER | NO_LIMITS]) as subject:
        capacity = _served_per_s(subject.closed(SEATS, WORKLOAD, CAPACITY_S))
        below = _drive(subject, BELOW * capacity, num_requests)
        above = _drive(subject, ABOVE * capacity, num_requests)
    with lab.serving(engine, tiers=[TIER | {"ttft_target_ms": LIMIT_S * 1e3}]) as subject:
        limited = _drive(subject, ABOVE * capacity, num_requests)
    law, growth = _little(below), _growth(above, _mean(below.total.ttft_ms))
    reports = {f"{BELOW:g} x capacity": below, f"{ABOVE:g} x": above, f"{ABOVE:g} x, limits": limited}
    lines = [_ttft(name, report) for name, report in reports.items()]
    return Outcome(
        name=NAME,
        title="Overload and Little's law",
        findings=[_law_finding(law), _growth_finding(growth), _limits_finding(above, limited)],
        tables=[_table(reports)],
        charts=[Chart(title="Time to first token by arrival", svg=line_chart(lines, "seconds", "ms"))],
        cpu_shows="both laws and the effect of limits in full: they do not depend on hardware.",
        data={"little": msgspec.to_builtins(law), "growth": msgspec.to_builtins(growth)},
    )


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in flight on average: counted, and rate x time."""

    counted: float
    rate_times_time: float


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Mean queue wait above capacity."""

    served_rps: float
    offered_rps: float
    measured_s: float
    predicted_s: float


def _served_per_s(report: Report) -> float:
    # By tokens: answers that are half done at the end count by half.
    return report.total.output_tokens_per_s / OUTPUT_TOKENS


def _growth(above: Report, unloaded_ttft_ms: float) -> Growth:
    duration_s = above.window_s[1]
    # Rates of this very run: a Poisson draw differs from its mean, and a machine from minute to minute.
    offered, capacity = above.total.requests / duration_s, _served_per_s(above)
    return Growth(
        served_rps=capacity,
        offered_rps=offered,
        measured_s=(_mean(above.total.ttft_ms) - unloaded_ttft_ms) / 1e3,
        predicted_s=mean_wait_s(offered, capacity, SEATS, duration_s),
    )


def _law_finding(law: Law) -> Finding:
    return Finding(
        claim="requests in the system = arrival rate x time in it (Little's law)",
        measured=f"{law.counted:.2f} in flight on average; rate x E2E gives {law.rate_times_time:.2f}",
        holds=abs(law.counted - law.rate_times_time) <= 0.15 * law.rate_times_time,
    )


def _growth_finding(growth: Growth) -> Finding:
    return Finding(
        claim="above capacity the wait grows with every second by (rate - capacity) / capacity",
        measured=f"mean wait {growth.measured_s:.2f} s measured, {growth.predicted_s:.2f} s predicted at "
        f"{growth.offered_rps:.2f} requests/s arriving and {growth.served_rps:.2f} served",
        holds=abs(growth.measured_s - growth.predicted_s) <= 0.3 * growth.predicted_s,
    )


def _limits_finding(above: Report, limited: Report) -> Finding:
    claim = f"limits keep the wait of those admitted near the target, {LIMIT_S:g} s"
    refused = sum(count for kind, count in limited.total.errors.items() if kind in ("http_429", "http_503"))
    if not refused:
        return Finding(claim=claim, measured=f"{NOT_AVAILABLE}: it refused nothing at {ABOVE:g} x capacity")
    with_s, without_s = (_p99(report.total.ttft_ms) / 1e3 for report in (limited, above))
    return Finding(
        claim=claim,
        measured=f"TTFT p99 {with_s:.1f} s, {without_s:.1f} s without; {refused} of {limited.total.requests} "
        "were refused",
        holds=with_s <= 2 * LIMIT_S,
    )


def _drive(subject: Subject, rate: float, num_requests: int) -> Report:
    duration_s = num_requests / rate
    loop = OpenLoop(profile=parse_rate(f"{rate}", duration_s))
    cast = Cast()
    return subject.open(open_schedule(loop, WORKLOAD, cast.sources), cast, duration_s, WORKLOAD)


def _little(report: Report) -> Law:
    bins = report.series.bins
    # A bin's mean is between its ends.
    ends = [0, *(one.in_flight for one in bins)]
    mean = sum((a + b) / 2 for a, b in pairwise(ends)) / len(bins)
    span_s = len(bins) * report.series.bin_s
    rate = report.total.requests / span_s
    return Law(counted=mean, rate_times_time=rate * _mean(report.total.e2e_ms) / 1e3)


def _p99(summary: Summary | None) -> float:
    return summary.p99 if summary is not None else float("nan")


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
