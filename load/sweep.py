"""The knee: the highest rate at which a server still keeps its promise. The search is pure."""

import msgspec

from load.page import card, charts, html_table, page
from load.plot import Line, line_chart
from load.report import Report
from load.table import Row, markdown_table, number

HEADER = (
    "rate", "verdict", "kept", "goodput/s", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99",
    "failed",
)  # fmt: skip


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One rate that was tried."""

    rate: float
    is_kept: bool
    report: Report


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Doubles the rate until the promise breaks, then halves the interval (on a log scale)."""

    first_rate: float
    precision: float = 0.1
    """Stop when the rates that hold and break are closer than this, relatively."""
    max_probes: int = 12

    def next_rate(self, probes: list[Probe]) -> float | None:
        """Return the rate to try next, None when the search is over."""
        if len(probes) >= self.max_probes:
            return None
        if not probes:
            return self.first_rate
        held, broken = knee(probes), lowest_broken(probes)
        if broken is None:
            return max(probe.rate for probe in probes) * 2
        if held is None:
            return broken / 2
        if broken / held <= 1 + self.precision:
            return None
        return float((broken * held) ** 0.5)


def knee(probes: list[Probe]) -> float | None:
    """Return the highest rate that held below all that broke; None when none did."""
    broken = lowest_broken(probes)
    held = [probe.rate for probe in probes if probe.is_kept and (broken is None or probe.rate < broken)]
    return max(held, default=None)


def lowest_broken(probes: list[Probe]) -> float | None:
    """Return the lowest rate that broke the promise. One that held above it was luck."""
    return min((probe.rate for probe in probes if not probe.is_kept), default=None)


def sweep_rows(probes: list[Probe]) -> list[Row]:
    """Return one row per rate, ascending."""
    rows: list[Row] = []
    for probe in sorted(probes, key=lambda probe: probe.rate):
        total = probe.report.total
        ttft, itl = total.ttft_ms, total.itl_ms
        rows.append(
            (
                number(probe.rate),
                _verdict(probe),
                f"{total.goodput_fraction:.1%}",
                number(total.goodput_rps),
                number(total.output_tokens_per_s),
                *((number(ttft.p50), number(ttft.p99)) if ttft else ("-", "-")),
                *((number(itl.p50), number(itl.p99)) if itl else ("-", "-")),
                str(total.failed),
            )
        )
    return rows


def _verdict(probe: Probe) -> str:
    if not probe.report.is_valid:
        return "invalid"
    return "holds" if probe.is_kept else "breaks"


def verdict(probes: list[Probe], attainment: float) -> str:
    """Return the result in one sentence."""
    found, broken = knee(probes), lowest_broken(probes)
    if found is None:
        return f"No rate down to {min(probe.rate for probe in probes):.3g} requests/s kept the promise."
    above = "no rate tried broke it" if broken is None else f"at {broken:.3g} it breaks"
    return f"The promise holds for {attainment:.1%} of requests up to {found:.3g} requests/s; {above}."


def sweep_markdown(probes: list[Probe], attainment: float) -> str:
    """Return the sweep as a Markdown page."""
    return f"# Sweep\n\n{verdict(probes, attainment)}\n\n{markdown_table(HEADER, sweep_rows(probes))}\n"


def sweep_html(probes: list[Probe], attainment: float) -> str:
    """Return the sweep as a page: goodput and latency against the rate."""
    ordered = sorted(probes, key=lambda probe: probe.rate)
    ideal = [(probe.rate, probe.rate) for probe in ordered]
    good = [(probe.rate, probe.report.total.goodput_rps) for probe in ordered]
    goodput = [
        Line(name="goodput", points=good, has_dots=True),
        Line(name="every request kept", points=ideal),
    ]
    cards = [card("Goodput against rate", line_chart(goodput, "requests/s sent", "requests/s kept"))]
    for title, field in (("Time to first token", "ttft_ms"), ("Inter-token latency", "itl_ms")):
        lines = [
            Line(
                name=quantile,
                points=[(p.rate, getattr(getattr(p.report.total, field), quantile, None)) for p in ordered],
                has_dots=True,
            )
            for quantile in ("p50", "p99")
        ]
        cards.append(card(title, line_chart(lines, "requests/s sent", "ms")))
    parts = ["<h1>Sweep</h1>", f"<p>{verdict(probes, attainment)}</p>", charts(cards)]
    return page("Sweep", [*parts, html_table(HEADER, sweep_rows(probes))])
