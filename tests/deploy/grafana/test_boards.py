"""The dashboards as data, against the catalogue of metrics and Grafana's model."""

import json
import re
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.metrics.catalogue import COMMON_LABELS, METRICS, PREFIX, Kind
from deploy.grafana.alerts import ALERTS
from deploy.grafana.board import WIDTH, Board, render
from deploy.grafana.boards import BOARDS

SERIES = {
    f"{PREFIX}{m.name}{end}" for m in METRICS if m.kind is Kind.HISTOGRAM for end in ("_bucket", "_sum")
}
SERIES |= {f"{PREFIX}{metric.name}" for metric in METRICS if metric.kind is not Kind.HISTOGRAM}
SERVES_OWN = {"ray_serve_autoscaling_target_replicas"}
LABELS = {label for metric in METRICS for label in metric.labels} | {*COMMON_LABELS, "le"}


def expressions(board: Board) -> list[str]:
    return [query.expr for panel in board.panels for query in panel.queries] + [
        annotation.expr for annotation in board.annotations
    ]


def named_series(expr: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", expr))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_query_names_metrics_and_labels_that_there_are(board: Board) -> None:
    for expr in expressions(board):
        assert named_series(expr) <= SERIES | SERVES_OWN
        for labels in re.findall(r"\bby \(([^)]*)\)", expr):
            assert {label for label in labels.split(", ") if label} <= LABELS


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_query_is_of_the_chosen_application(board: Board) -> None:
    for expr in expressions(board):
        assert expr.count('application=~"$application"') == len(re.findall(r"\bray_\w+", expr))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_lie_side_by_side_and_do_not_overlap(board: Board) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in render(board, "p")["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        covered = {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
        assert not covered & cells
        cells |= covered


def test_the_data_source_is_that_of_the_push_everywhere() -> None:
    for board in BOARDS:
        drawn = render(board, "uid-1")
        assert drawn["templating"]["list"][0]["current"]["value"] == "uid-1"
        sources = {target["datasource"]["uid"] for panel in drawn["panels"] for target in panel["targets"]}
        assert sources == {"${datasource}"}


def test_every_metric_is_shown_or_watched_somewhere() -> None:
    shown = {name for board in BOARDS for expr in expressions(board) for name in named_series(expr)}
    shown |= {name for alert in ALERTS for name in named_series(alert.expr)}
    stems = {name.removesuffix("_bucket") for name in shown}
    hidden = {metric.name for metric in METRICS if f"{PREFIX}{metric.name}" not in stems}
    assert hidden == {
        "headway_late_starts_total",  # the parts of headway_answers_total
        "headway_late_gaps_total",
        "headway_request_duration_ms",  # says more about the lengths asked for than about us
        "headway_tenant_requests_total",
        "headway_engine_prompt_tokens_total",
    }


def test_names_do_not_collide() -> None:
    assert len({board.uid for board in BOARDS}) == len({board.title for board in BOARDS}) == len(BOARDS)


def test_files_are_written_to_import_by_hand(tmp_path: Path) -> None:
    assert main(["dashboards", "write", str(tmp_path / "new")]) == 0
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written == {*(f"{board.uid}.json" for board in BOARDS), "headway-rules.yml"}
    overview = json.loads((tmp_path / "new" / "headway-overview.json").read_text())
    assert overview["title"] == "Headway / Overview"


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["dashboards", "write", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
