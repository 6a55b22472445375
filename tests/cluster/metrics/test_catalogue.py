"""The catalogue against its page, and against itself."""

from pathlib import Path

import pytest

from cluster.metrics.catalogue import COMMON_LABELS, METRICS, Kind, Metric

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
UNITS = ("_ms", "_s", "_tokens", "_blocks", "_sequences", "_requests", "_seconds", "_replicas")
UNITLESS = ("headway_seats", "headway_ledger_routers", "headway_quota_left")
FLAGS = ("headway_ledger_up", "headway_engine_overloaded")


def documented() -> list[tuple[str, str, tuple[str, ...], str, bool]]:
    """The rows of the page's table: name, type, labels, meaning, whether it is event-only."""
    rows = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `headway_"):
            name, kind, labels, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            names = () if labels == "-" else tuple(labels.split(", "))
            rows.append((name.strip("`*"), kind, names, meaning, name.endswith("*")))
    return rows


def test_the_page_lists_exactly_what_there_is() -> None:
    assert documented() == [(m.name, m.kind, m.labels, m.help, m.event_only) for m in METRICS]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_say_unit_and_kind(metric: Metric) -> None:
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert bool(metric.edges) == (metric.kind is Kind.HISTOGRAM)
    if metric.kind is not Kind.COUNTER:
        assert metric.name.endswith(UNITS) or metric.name in UNITLESS + FLAGS
    assert not set(metric.labels) & {*COMMON_LABELS, "le"}


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 40
