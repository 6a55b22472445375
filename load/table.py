"""A report as tables: for the terminal, for Markdown, and inside the HTML page."""

from collections.abc import Iterable, Sequence
from typing import Final

from load.report import Group, Report
from load.statistics import Summary

MEASURES: Final = (
    ("TTFT", "ttft_ms"),
    ("ITL", "itl_ms"),
    ("Event gap", "event_gap_ms"),
    ("Max gap per request", "max_gap_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2e_ms"),
    ("Queue wait", "queue_wait_ms"),
    ("Retry wait", "retry_wait_ms"),
)
LATENCY_HEADER: Final = ("ms", "p50", "p90", "p99", "mean", "max", "95% CI of p50", "95% CI of p99", "n")
GROUP_HEADER: Final = (
    "", "requests", "failed", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "tokens/s", "goodput/s", "kept",
    "SLO",
)  # fmt: skip

Row = tuple[str, ...]


def number(value: float | None) -> str:
    """Return three significant digits, or as many as a large number has before its point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def latency_rows(group: Group) -> list[Row]:
    """Return one row per measure that has values."""
    rows = []
    for title, field in MEASURES:
        summary: Summary | None = getattr(group, field)
        if summary is not None:
            values = (summary.p50, summary.p90, summary.p99, summary.mean, summary.max)
            intervals = (
                f"{number(interval.low)} .. {number(interval.high)}" if interval is not None else "-"
                for interval in (summary.p50_ci, summary.p99_ci)
            )
            rows.append((title, *map(number, values), *intervals, str(summary.count)))
    return rows


def group_rows(groups: dict[str, Group]) -> list[Row]:
    """Return one row per tier or tenant."""
    return [
        (
            name,
            str(group.requests),
            str(group.failed),
            *_p50_p99(group.ttft_ms),
            *_p50_p99(group.itl_ms),
            number(group.output_tokens_per_s),
            number(group.goodput_rps),
            f"{group.goodput_fraction:.1%}",
            str(group.slo or "none"),
        )
        for name, group in groups.items()
    ]


def _p50_p99(summary: Summary | None) -> tuple[str, str]:
    return ("-", "-") if summary is None else (number(summary.p50), number(summary.p99))


def total_rows(report: Report) -> list[Row]:
    """Return what a run comes to, apart from latencies."""
    total, driver = report.total, report.driver
    errors = ", ".join(f"{name} {count}" for name, count in total.errors.items()) or "none"
    promise = "" if total.slo is None else f" ({total.slo})"
    per_token = number(driver.cpu_us_per_token)
    speed = f"{number(total.requests_per_s)} requests/s, {number(total.output_tokens_per_s)} tokens/s"
    rows: list[Row] = [
        ("Requests", f"{total.requests}: {total.answered} answered, {total.cancelled} hung up on, "
                     f"{total.slow} read slowly"),
        ("Errors", errors),
        ("Throughput", speed),
        ("Goodput", f"{number(total.goodput_rps)} requests/s, {total.goodput_fraction:.1%} kept{promise}"),
        ("Tokens", f"{total.prompt_tokens} in ({total.cached_tokens} cached), {total.output_tokens} out"),
        ("Usage", f"{report.usage_mismatches} mismatches, {report.usage_missing} missing, "
                  f"{report.bundled_tokens} tokens without an event of their own"),
        ("Driver", f"late by {number(driver.lateness_ms_p99)} ms (P99), {per_token} us of CPU per token, "
                   f"{driver.workers} workers"),
    ]  # fmt: skip
    if len(report.tenants) > 1:
        rows.append(("Jain index", f"{report.jain_index:.3f} over {len(report.tenants)} tenants"))
    if report.prompt_token_error is not None:
        rows.append(("Prompt length", f"{report.prompt_token_error:.1%} mean error against the plan"))
    return rows


def markdown_table(header: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a Markdown table; numbers are aligned to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def to_markdown(report: Report) -> str:
    """Return the report as a Markdown page."""
    window = f"window {report.window_s[0]:g} to {report.window_s[1]:g} s"
    parts = [f"# {report.name}", f"{report.started_at}, {report.wall_s:.1f} s, {window}."]
    parts += [f"**Invalid:** {problem}." for problem in report.invalid_because]
    parts.append(markdown_table(("", ""), total_rows(report)))
    parts.append(markdown_table(LATENCY_HEADER, latency_rows(report.total)))
    if len(report.tiers) > 1:
        parts += ["## Tiers", markdown_table(GROUP_HEADER, group_rows(report.tiers))]
    if len(report.tenants) > 1:
        parts += ["## Tenants", markdown_table(GROUP_HEADER, group_rows(report.tenants))]
    if report.error_examples:
        rows = [(kind, detail) for kind, details in report.error_examples.items() for detail in details]
        parts += ["## Errors", markdown_table(("kind", "example"), rows)]
    return "\n\n".join(parts) + "\n"
