"""Several reports side by side: what changed, and whether the runs were long enough to tell."""

from collections.abc import Sequence
from html import escape

import msgspec

from load.page import card, charts, html_table, page
from load.plot import Line, line_chart
from load.report import Report
from load.statistics import CURVE_POINTS, Summary
from load.table import MEASURES, Row, markdown_table, number


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the first report and of another."""

    measure: str
    first: float
    other: float
    is_clear: bool | None
    """The 95% intervals do not overlap; None where there are none."""

    @property
    def change(self) -> float | None:
        """Relative to the first; None where that is 0."""
        return (self.other - self.first) / self.first if self.first else None


def differences(first: Report, other: Report) -> list[Difference]:
    """Compare every figure that both have."""
    found = []
    for title, field in MEASURES:
        a: Summary | None = getattr(first.total, field)
        b: Summary | None = getattr(other.total, field)
        if a is None or b is None:
            continue
        for quantile in ("p50", "p99"):
            found.append(
                Difference(
                    measure=f"{title} {quantile}, ms",
                    first=getattr(a, quantile),
                    other=getattr(b, quantile),
                    is_clear=_is_clear(a, b, quantile),
                )
            )
    for title, field in (
        ("Output tokens/s", "output_tokens_per_s"),
        ("Goodput, requests/s", "goodput_rps"),
        ("Promise kept", "goodput_fraction"),
        ("Failed requests", "failed"),
    ):
        x, y = (float(getattr(group, field)) for group in (first.total, other.total))
        found.append(Difference(measure=title, first=x, other=y, is_clear=None))
    return found


def _is_clear(a: Summary, b: Summary, quantile: str) -> bool | None:
    one, two = getattr(a, f"{quantile}_ci"), getattr(b, f"{quantile}_ci")
    if one is None or two is None:
        return None
    return bool(one.high < two.low or two.high < one.low)


def comparison_rows(reports: Sequence[Report]) -> tuple[list[str], list[Row]]:
    """Return header and rows: the first report, then each other one with its change."""
    header = ["", reports[0].name]
    columns = []
    for other in reports[1:]:
        header += [other.name, "change", "clear"]
        columns.append({one.measure: one for one in differences(reports[0], other)})
    rows = []
    for measure in columns[0]:
        row = [measure, number(columns[0][measure].first)]
        for column in columns:
            row += _cells(column.get(measure))
        rows.append(tuple(row))
    return header, rows


def _cells(difference: Difference | None) -> list[str]:
    if difference is None:
        return ["-", "-", "-"]
    change = "-" if difference.change is None else f"{difference.change:+.1%}"
    clear = {None: "-", True: "yes", False: "no"}[difference.is_clear]
    return [number(difference.other), change, clear]


def caveats(reports: Sequence[Report]) -> list[str]:
    """Return what makes the comparison doubtful."""
    found = [f"{report.name}: {problem}" for report in reports for problem in report.invalid_because]
    ignored = {"name", "out", "html", "markdown", "json", "url", "model", "reports"}
    first = {key: value for key, value in reports[0].configuration.items() if key not in ignored}
    for other in reports[1:]:
        changed = [key for key, value in first.items() if other.configuration.get(key) != value]
        if changed:
            found.append(f"{other.name} was driven with another {', '.join(changed)}")
    return found


def comparison_markdown(reports: Sequence[Report]) -> str:
    """Return the comparison as a Markdown page."""
    header, rows = comparison_rows(reports)
    parts = ["# " + " against ".join(report.name for report in reversed(reports))]
    parts += [f"**Caution:** {caveat}." for caveat in caveats(reports)]
    parts.append(markdown_table(header, rows))
    parts.append("`clear`: the 95% confidence intervals do not overlap.")
    return "\n\n".join(parts) + "\n"


def comparison_html(reports: Sequence[Report]) -> str:
    """Return the comparison as a page, with the distributions over each other."""
    header, rows = comparison_rows(reports)
    title = " against ".join(report.name for report in reversed(reports))
    notes = [f'<p class="invalid">{escape(caveat)}.</p>' for caveat in caveats(reports)]
    drawn = charts(
        card(name, line_chart(_curves(reports, field), "ms", "share", log_x=True))
        for name, field in (
            ("Time to first token", "ttft_ms"),
            ("Inter-token latency", "itl_ms"),
            ("End to end", "e2e_ms"),
        )
    )
    return page(
        title, ["<h1>Comparison</h1>", *notes, html_table(header, rows), "<h2>Distributions</h2>", drawn]
    )


def _curves(reports: Sequence[Report], field: str) -> list[Line]:
    lines = []
    for report in reports:
        values: list[float] = getattr(report.curves, field)
        points = [(value, i / (CURVE_POINTS - 1)) for i, value in enumerate(values)]
        lines.append(Line(name=report.name, points=points))
    return lines
