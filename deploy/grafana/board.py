"""Board: a dashboard as data, and the JSON that Grafana 9 to 12 reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

SCHEMA_VERSION: Final = 37
"""Grafana 9's; later ones raise it by themselves."""
WIDTH: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
APP: Final = 'application=~"$application"'
"""In the braces of every selector: the applications that are chosen at the board's top."""
WINDOW: Final = "[$__rate_interval]"

Form = Literal["timeseries", "stat", "heatmap", "bargauge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A PromQL expression, and what its series are called."""

    expr: str
    legend: str = "__auto"
    event_only: bool = False
    """Has no data until something happens that need not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """One of Grafana's: ms, s, percentunit, reqps, short, ..."""
    form: Form = "timeseries"
    width: int = 8
    """Of 24."""
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Marks on all pictures of a board."""

    name: str
    expr: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    annotations: tuple[Annotation, ...] = ()


def quantiles(metric: str, by: str, *shares: float, event_only: bool = False) -> tuple[Query, ...]:
    """Return queries of a histogram's percentiles, merged over all processes; `by` is a label or empty."""
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket{{{APP}}}{WINDOW}))"
    return tuple(
        Query(
            expr=f"histogram_quantile({share}, {rate})",
            legend=f"{{{{{by}}}}} p{share * 100:g}" if by else f"p{share * 100:g}",
            event_only=event_only,
        )
        for share in shares
    )


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Return the rate of a counter, added up by a label or over all; `more` are further matchers."""
    selector = f"{APP}, {more}" if more else APP
    return f"sum by ({by}) (rate({metric}{{{selector}}}{WINDOW}))"


def total(metric: str, by: str = "", function: str = "sum") -> str:
    """Return a gauge, added up (or the like) by a label or over all."""
    return f"{function} by ({by}) ({metric}{{{APP}}})"


def heatmap(title: str, metric: str, unit: str = "ms") -> Panel:
    """Return a panel of how a histogram's values are spread over time."""
    expr = f"sum by (le) (increase({metric}_bucket{{{APP}}}{WINDOW}))"
    return Panel(
        title=title, queries=(Query(expr=expr, legend="{{le}}"),), unit=unit, form="heatmap", width=12
    )


def render(board: Board, datasource_uid: str) -> dict[str, Any]:
    """Return the dashboard's JSON, without id and version: Grafana's own business."""
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["headway"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(datasource_uid)},
        "annotations": {"list": [_annotation(annotation) for annotation in board.annotations]},
        "panels": _placed(board.panels),
    }


def _variables(datasource_uid: str) -> list[dict[str, Any]]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": datasource_uid, "value": datasource_uid},
        },
        {
            "name": "application",
            "label": "Application",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(ray_headway_seats, application)", "refId": "application"},
            "definition": "label_values(ray_headway_seats, application)",
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _annotation(annotation: Annotation) -> dict[str, Any]:
    return {
        "name": annotation.name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": annotation.expr,
        "titleFormat": annotation.text,
        "step": "5s",
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Put panels side by side until the next one does not fit."""
    placed = []
    x = y = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y = 0, y + HEIGHT
        placed.append(_panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT}})
        x += panel.width
    return placed


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    is_heatmap = panel.form == "heatmap"
    drawn: dict[str, Any] = {
        "id": number,
        "type": panel.form,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [_target(query, position, is_heatmap) for position, query in enumerate(panel.queries)],
        "options": {},
    }
    if is_heatmap:
        drawn["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}}
    return drawn


def _target(query: Query, position: int, is_heatmap: bool) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + position),
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": True,
        "format": "heatmap" if is_heatmap else "time_series",
    }
