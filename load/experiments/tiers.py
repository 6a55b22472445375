"""What priority is worth: TTFT of a sooner tier under a backlog of a later one."""

from load.experiments.demand import here, simulated
from load.experiments.headway import NO_LIMITS, Lab
from load.experiments.outcome import Chart, Finding, Outcome, Table
from load.plan import Tenant
from load.plot import bars
from load.report import Report
from load.table import GROUP_HEADER, group_rows, number
from load.tenants import Cast, Source

NAME = "tiers"
HELP = "TTFT of a sooner tier under a backlog of a later one"
OVERLOAD = 2.0
"""Offered work over capacity."""
SOONER, LATER = "interactive", "batch"
SHARES = {SOONER: 0.2, LATER: 0.8}
TIERS = ({"name": SOONER, "level": 0, **NO_LIMITS}, {"name": LATER, "level": 2, **NO_LIMITS})
TENANTS = ({"name": LATER, "tier": LATER}, {"name": SOONER, "tier": SOONER})

Waits = dict[str, float | None]
"""TTFT, P50, in ms, of the sooner and the later tier, without tiers and with them."""


def cast(keys: dict[str, str], *, has_tiers: bool) -> Cast:
    """One request in five is of the sooner tier; without tiers all come from one tenant of the later one."""
    key = keys.get(SOONER if has_tiers else LATER)
    return Cast(
        sources=(
            Source(tenant=Tenant(name=SOONER, tier=SOONER, api_key=key), share=SHARES[SOONER]),
            Source(tenant=Tenant(name=LATER, tier=LATER, api_key=keys.get(LATER)), share=SHARES[LATER]),
        )
    )


def run(lab: Lab) -> Outcome:
    demand = here(lab)
    with lab.serving(demand.engine, tiers=TIERS, tenants=TENANTS) as subject:
        rate = OVERLOAD * demand.capacity(subject)
        reports = {
            "no tiers": demand.drive(subject, rate, cast(subject.keys, has_tiers=False)),
            "tiers": demand.drive(subject, rate, cast(subject.keys, has_tiers=True)),
        }
    waits = {
        f"{mode}: {name}": _ttft_p50(report, name)
        for mode, report in reports.items()
        for name in (SOONER, LATER)
    }
    gpu_waits = simulate(lab)
    rows = [
        (f"{mode}: {row[0]}", *row[1:])
        for mode, report in reports.items()
        for row in group_rows(report.tenants)
    ]
    gpu_rows = [(name, number(ms)) for name, ms in gpu_waits.items()]
    return Outcome(
        name=NAME,
        title="Priority tiers under overload",
        findings=[
            Finding(
                claim="a tier that follows from the API key does not wait behind a later tier's backlog",
                measured=_words(waits),
                holds=_holds(waits),
                simulated=_words(gpu_waits),
                simulated_holds=_holds(gpu_waits),
            )
        ],
        tables=[
            Table(header=GROUP_HEADER, rows=rows),
            Table(header=("simulated", "TTFT p50, ms"), rows=gpu_rows),
        ],
        charts=[_chart("Time to first token, P50", waits), _chart("The same, simulated", gpu_waits)],
        cpu_shows=(
            f"the order in full, at {number(rate)} requests/s on {demand.seats} seats, {OVERLOAD:g} times "
            "what they can serve. Absolute waits are those of this machine."
        ),
        gpu_shows=(
            f"the same routers and scheduler at {OVERLOAD:g} times the capacity of {simulated(lab).seats} "
            f"seats of {lab.profile}. Without tiers all requests are alike, so both have the same wait."
        ),
        data={"offered_rps": rate, "ttft_ms_p50": waits, "simulated_ttft_ms_p50": gpu_waits},
    )


def simulate(lab: Lab) -> Waits:
    """Return the waits for the lab's profile."""
    demand = simulated(lab)
    scripts = demand.scripts(OVERLOAD * demand.simulated_capacity(lab), Cast())
    alike = lab.simulate(scripts, demand.engine, tiers=TIERS, shares={LATER: 1.0})["tiers"][LATER]
    tiers = lab.simulate(scripts, demand.engine, tiers=TIERS, shares=SHARES)["tiers"]
    waits: Waits = {f"no tiers: {name}": alike["ttft_ms_p50"] for name in (SOONER, LATER)}
    return waits | {f"tiers: {name}": tiers[name]["ttft_ms_p50"] for name in (SOONER, LATER)}


def _words(waits: Waits) -> str:
    without, _, sooner, later = waits.values()
    return (
        f"TTFT p50 of {SOONER} {number(sooner)} ms with tiers, {number(without)} ms without; "
        f"{LATER} {number(later)} ms"
    )


def _holds(waits: Waits) -> bool | None:
    without, _, sooner, _ = waits.values()
    return sooner < without / 2 if sooner is not None and without is not None else None


def _chart(title: str, waits: Waits) -> Chart:
    return Chart(title=title, svg=bars([(k, v) for k, v in waits.items() if v is not None], "ms"))


def _ttft_p50(report: Report, tenant: str) -> float | None:
    summary = report.tenants[tenant].ttft_ms
    return None if summary is None else summary.p50
