"""What an experiment found: claims beside what was measured here and simulated for a GPU."""

from collections.abc import Sequence
from html import escape
from typing import Any, Final

import msgspec

from load.page import card, charts, html_table, page
from load.table import Row, markdown_table

HEADER: Final = ("claim", "measured here (CPU)", "holds", "simulated (GPU profile)", "holds")
NOT_AVAILABLE: Final = "not available in this server"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and what became of it."""

    claim: str
    measured: str
    holds: bool | None = None
    """None: not a yes-or-no claim, or not measurable here."""
    simulated: str
    simulated_holds: bool | None = None


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Figures behind the findings."""

    header: tuple[str, ...]
    rows: Sequence[Row]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A drawing."""

    title: str
    svg: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment."""

    name: str
    title: str
    findings: list[Finding]
    tables: list[Table] = []
    charts: list[Chart] = []
    cpu_shows: str
    """What a CPU can show of the claim, and what it cannot."""
    gpu_shows: str
    """What the simulator's profile of a GPU shows of it."""
    data: dict[str, Any] = {}
    """The raw figures."""


def outcomes_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return everything but the drawings."""
    plain = [{k: v for k, v in msgspec.to_builtins(one).items() if k != "charts"} for one in outcomes]
    return {"kind": "headway-load-experiments", "schema_version": 1, "experiments": plain}


def _finding_rows(outcome: Outcome) -> list[Row]:
    words = {None: "-", True: "yes", False: "no"}
    return [
        (one.claim, one.measured, words[one.holds], one.simulated, words[one.simulated_holds])
        for one in outcome.findings
    ]


def outcomes_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return all experiments as one Markdown page."""
    parts = ["# Experiments"]
    for one in outcomes:
        parts += [f"## {one.title}", markdown_table(HEADER, _finding_rows(one))]
        parts += [markdown_table(table.header, table.rows) for table in one.tables]
        parts += [f"On a CPU: {one.cpu_shows}", f"Simulated: {one.gpu_shows}"]
    return "\n\n".join(parts) + "\n"


def outcomes_html(outcomes: Sequence[Outcome]) -> str:
    """Return all experiments as one page."""
    parts = ["<h1>Experiments</h1>"]
    for one in outcomes:
        parts.append(f"<h2>{escape(one.title)}</h2>{html_table(HEADER, _finding_rows(one), 'plain')}")
        if one.charts:
            parts.append(charts(card(chart.title, chart.svg) for chart in one.charts))
        parts += [html_table(table.header, table.rows) for table in one.tables]
        parts.append(f"<p>On a CPU: {escape(one.cpu_shows)}</p><p>Simulated: {escape(one.gpu_shows)}</p>")
    return page("Experiments", parts)
