"""What priority is worth: TTFT of a sooner tier under a backlog of a later one."""

from load.arrivals import parse_rate
from load.experiments.headway import NO_LIMITS, Lab, Subject
from load.experiments.outcome import Chart, Finding, Outcome, Table
from load.lengths import Lengths
from load.plan import Tenant
from load.plot import bars
from load.report import Report
from load.table import GROUP_HEADER, group_rows, number
from load.tenants import Cast, Source
from load.workload import OpenLoop, Workload, open_schedule

NAME = "tiers"
HELP = "TTFT of a sooner tier under a backlog of a later one"
SEATS = 4
CAPACITY_S = 10.0
"""How long the capacity is measured."""
NUM_REQUESTS = (200, 60)
"""Of each load; the second for quick runs. Slow machines take longer instead of seeing less."""
OVERLOAD = 2.0
"""Offered work over capacity."""
SOONER_SHARE = 0.2
SOONER, LATER = "interactive", "batch"
OUTPUT_TOKENS = 24
WORKLOAD = Workload(
    input_tokens=Lengths(law="fixed", a=32), output_tokens=Lengths(law="fixed", a=OUTPUT_TOKENS)
)


TIERS = ({"name": SOONER, "level": 0, **NO_LIMITS}, {"name": LATER, "level": 2, **NO_LIMITS})
TENANTS = ({"name": LATER, "tier": LATER}, {"name": SOONER, "tier": SOONER})


def cast(keys: dict[str, str], *, has_tiers: bool) -> Cast:
    """One request in five is of the sooner tier; without tiers all come from one tenant of the later one."""
    key = keys[SOONER if has_tiers else LATER]
    return Cast(
        sources=(
            Source(tenant=Tenant(name=SOONER, tier=SOONER, api_key=key), share=SOONER_SHARE),
            Source(tenant=Tenant(name=LATER, tier=LATER, api_key=keys[LATER]), share=1 - SOONER_SHARE),
        )
    )


def run(lab: Lab) -> Outcome:
    engine = {"max_num_seqs": SEATS, "enable_prefix_caching": False}
    with lab.serving(engine, tiers=TIERS, tenants=TENANTS) as subject:
        alone = subject.closed(SEATS, WORKLOAD, CAPACITY_S)
        rate = OVERLOAD * alone.total.output_tokens_per_s / OUTPUT_TOKENS
        duration_s = NUM_REQUESTS[lab.is_quick] / rate
        reports = {
            "no tiers": _overload(subject, cast(subject.keys, has_tiers=False), rate, duration_s),
            "tiers": _overload(subject, cast(subject.keys, has_tiers=True), rate, duration_s),
        }
    ttft = {
        f"{mode}: {name}": _ttft_p50(report, name)
        for mode, report in reports.items()
        for name in (SOONER, LATER)
    }
    rows = [
        (f"{mode}: {row[0]}", *row[1:])
        for mode, report in reports.items()
        for row in group_rows(report.tenants)
    ]
    return Outcome(
        name=NAME,
        title="Priority tiers under overload",
        findings=[_finding(*ttft.values())],
        tables=[Table(header=GROUP_HEADER, rows=rows)],
        charts=[
            Chart(
                title="Time to first token, P50",
                svg=bars([(k, v) for k, v in ttft.items() if v is not None], "ms"),
            )
        ],
        cpu_shows=(
            f"the order in full, at {number(rate)} requests/s on {SEATS} seats, {OVERLOAD:g} times what they "
            "can serve. Absolute waits are those of this machine."
        ),
        data={"offered_rps": rate, "ttft_ms_p50": ttft},
    )


def _finding(without: float | None, _: float | None, sooner: float | None, later: float | None) -> Finding:
    return Finding(
        claim="a tier that follows from the API key does not wait behind a later tier's backlog",
        measured=f"TTFT p50 of {SOONER} {number(sooner)} ms with tiers, {number(without)} ms without; "
        f"{LATER} {number(later)} ms",
        holds=sooner < without / 2 if sooner is not None and without is not None else None,
    )


def _overload(subject: Subject, who: Cast, rate: float, duration_s: float) -> Report:
    loop = OpenLoop(profile=parse_rate(f"{rate}", duration_s))
    return subject.open(open_schedule(loop, WORKLOAD, who.sources), who, duration_s, WORKLOAD)


def _ttft_p50(report: Report, tenant: str) -> float | None:
    summary = report.tenants[tenant].ttft_ms
    return None if summary is None else summary.p50
