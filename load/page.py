"""Reports as one HTML page: no script, no file beside it, no host but this one; light and dark."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

from load.plot import Line, bars, heatmap, line_chart
from load.report import Group, Report
from load.statistics import CURVE_POINTS
from load.table import GROUP_HEADER, LATENCY_HEADER, Row, group_rows, latency_rows, total_rows

STYLE: Final = Path(__file__).with_name("page.css").read_text("ascii")


def page(title: str, parts: Iterable[str]) -> str:
    """Wrap parts into a document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def card(title: str, body: str) -> str:
    """Return one chart with its title."""
    return f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'


def charts(cards: Iterable[str]) -> str:
    """Return cards side by side."""
    return f'<div class="charts">{"".join(cards)}</div>'


def html_table(header: Sequence[str], rows: Iterable[Row], kind: str = "") -> str:
    """Return a table that scrolls by itself when it is too wide."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<div class="scroll"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


def to_html(report: Report) -> str:
    """Return the report of one run as a page."""
    about = (
        f"{report.started_at}, {report.wall_s:.1f} s, measured from {report.window_s[0]:g} to "
        f"{report.window_s[1]:g} s"
    )
    parts = [f"<h1>{escape(report.name)}</h1><p>{escape(about)}</p>"]
    parts += [f'<p class="invalid">Invalid: {escape(problem)}.</p>' for problem in report.invalid_because]
    parts.append(html_table(("", ""), total_rows(report), "plain"))
    parts.append("<h2>Latency, ms</h2>" + html_table(LATENCY_HEADER, latency_rows(report.total)))
    parts.append("<h2>Over time</h2>" + charts(_over_time(report)))
    parts.append("<h2>Distributions</h2>" + charts(_distributions(report)))
    for title, groups in (("Tiers", report.tiers), ("Tenants", report.tenants)):
        if len(groups) > 1:
            parts.append(f"<h2>{title}</h2>" + html_table(GROUP_HEADER, group_rows(groups)))
            parts.append(charts(_split(groups)))
    if report.error_examples:
        rows = [(kind, detail) for kind, details in report.error_examples.items() for detail in details]
        parts.append("<h2>Errors</h2>" + html_table(("kind", "example"), rows, "plain"))
    settings = [(key, str(value)) for key, value in report.configuration.items()]
    parts.append("<h2>Configuration</h2>" + html_table(("", ""), settings, "plain"))
    return page(report.name, parts)


def _over_time(report: Report) -> list[str]:
    bins = report.series.bins

    def line(name: str, field: str) -> Line:
        return Line(name=name, points=[(one.at_s, getattr(one, field)) for one in bins])

    ttft = [line("p50", "ttft_p50_ms"), line("p99", "ttft_p99_ms")]
    itl = [line("p50", "itl_p50_ms"), line("p99", "itl_p99_ms")]
    counts = [line("sent", "sent"), line("answered", "answered"), line("failed", "failed")]
    per_bin = f"requests per {report.series.bin_s:g} s"
    return [
        card("Time to first token", line_chart(ttft, "seconds, when sent", "ms")),
        card("Inter-token latency", line_chart(itl, "seconds, when received", "ms")),
        card(
            "Output tokens per second",
            line_chart([line("tokens/s", "output_tokens_per_s")], "seconds", "1/s"),
        ),
        card("Requests", line_chart(counts, "seconds", per_bin)),
        card("In flight", line_chart([line("in flight", "in_flight")], "seconds", "requests")),
        card(
            "Gaps between tokens: how many of which length, when",
            heatmap(report.series.gap_counts, report.series.bin_s, report.series.gap_edges_ms, "gap, ms"),
        ),
    ]


def _distributions(report: Report) -> list[str]:
    curves = report.curves
    named = (("Time to first token", curves.ttft_ms), ("Inter-token latency", curves.itl_ms))
    return [card(title, _cdf(values)) for title, values in (*named, ("End to end", curves.e2e_ms))]


def _cdf(values: Sequence[float]) -> str:
    points = [(value, i / (CURVE_POINTS - 1)) for i, value in enumerate(values)]
    return line_chart([Line(name="share of values up to x", points=points)], "ms", "share", log_x=True)


def _split(groups: dict[str, Group]) -> list[str]:
    ttft = [(name, group.ttft_ms.p99) for name, group in groups.items() if group.ttft_ms]
    itl = [(name, group.itl_ms.p99) for name, group in groups.items() if group.itl_ms]
    tokens = [(name, group.output_tokens_per_s) for name, group in groups.items()]
    kept = [(name, group.goodput_fraction) for name, group in groups.items()]
    return [
        card("Time to first token, P99", bars(ttft, "ms")),
        card("Inter-token latency, P99", bars(itl, "ms")),
        card("Output tokens per second", bars(tokens, "1/s")),
        card("Promise kept", bars(kept, "share of requests", text=lambda share: f"{share:.1%}")),
    ]
