"""`headway dashboards push` against a double of Grafana."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.cli import main
from deploy.grafana.alerts import ALERTS, GROUP
from deploy.grafana.boards import BOARDS
from deploy.grafana.boards.overview import OVERVIEW
from tests.deploy.grafana.double import LOGIN, TOKEN, FakeGrafana, running


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with running() as started:
        yield started


@pytest.fixture
def filled(grafana: FakeGrafana) -> FakeGrafana:
    """One that has been pushed to, with all calls forgotten."""
    assert push(grafana, "--prometheus-url", "http://prometheus:9090") == 0
    grafana.calls.clear()
    return grafana


def push(grafana: FakeGrafana, *more: str) -> int:
    return main(["dashboards", "push", "--url", grafana.url + grafana.prefix, "--token", TOKEN, *more])


def changes(text: str) -> list[tuple[str, str]]:
    return [(change["name"], change["act"]) for change in json.loads(text)["changes"]]


def test_the_first_push_makes_folder_source_dashboards_and_alerts(filled: FakeGrafana) -> None:
    assert filled.folders == {"f1": "Headway"}
    assert filled.datasources["Prometheus"]["url"] == "http://prometheus:9090"
    assert set(filled.dashboards) == {board.uid for board in BOARDS}
    (versions,) = {len(versions) for versions in filled.dashboards.values()}
    assert versions == 1
    rules = filled.groups["f1", GROUP]["rules"]
    assert [rule["title"] for rule in rules] == [alert.name for alert in ALERTS]
    assert {rule["data"][0]["datasourceUid"] for rule in rules} == {"d1"}


@pytest.mark.parametrize("lists_versions", [True, False])
def test_a_second_push_writes_nothing(
    filled: FakeGrafana, lists_versions: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    filled.lists_versions = lists_versions
    capsys.readouterr()
    assert push(filled, "--json") == 0
    assert filled.writes == []
    report = json.loads(capsys.readouterr().out)
    assert report["changes"] == []
    assert (report["dashboards"], report["alerts"]) == (len(BOARDS), len(ALERTS))
    assert report["panels"] > 40


def test_what_an_earlier_release_pushed_is_updated(
    filled: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    last = filled.dashboards[OVERVIEW.uid][-1]
    last["message"] = "headway 0123456789abcdef"
    last["dashboard"]["refresh"] = "1m"
    filled.groups["f1", GROUP]["rules"][0]["for"] = "9m"
    capsys.readouterr()
    assert push(filled, "--diff") == 0
    shown = capsys.readouterr().out
    assert f'update     dashboard {OVERVIEW.title}\n    refresh: "1m" -> "10s"' in shown
    assert 'rules[0].for: "9m" -> "60s"' in shown
    assert filled.dashboards[OVERVIEW.uid][-1]["dashboard"]["refresh"] == "10s"
    assert len(filled.writes) == 2


def test_an_edited_dashboard_is_kept_unless_forced(
    filled: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    filled.edit(OVERVIEW.uid)
    before = filled.state()
    assert push(filled) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headway: {OVERVIEW.title} was edited in Grafana")
    assert error.count("\n") == 1
    assert (filled.writes, filled.state()) == ([], before)
    assert push(filled, "--force", "--json") == 0
    assert changes(capsys.readouterr().out) == [(OVERVIEW.title, "overwrite")]
    assert filled.dashboards[OVERVIEW.uid][-1]["dashboard"]["title"] == OVERVIEW.title


def test_a_dry_run_writes_nothing(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]) -> None:
    assert push(grafana, "--dry-run", "--json", "--prometheus-url", "http://p:9090") == 0
    assert grafana.writes == []
    acts = dict(changes(capsys.readouterr().out))
    assert acts == dict.fromkeys(["Headway", "Prometheus", *(b.title for b in BOARDS), GROUP], "create")


def test_a_dashboard_in_another_folder_is_moved(filled: FakeGrafana) -> None:
    assert push(filled, "--folder", "SRE") == 0
    assert {versions[-1]["folderUid"] for versions in filled.dashboards.values()} == {"f2"}


def test_alerts_can_be_left_out(grafana: FakeGrafana) -> None:
    assert push(grafana, "--no-alerts", "--prometheus-url", "http://p:9090") == 0
    assert grafana.groups == {}


def test_grafana_may_live_below_a_path_and_ask_for_a_password(grafana: FakeGrafana) -> None:
    grafana.prefix = "/grafana"
    login = ["--user", ":".join(LOGIN), "--prometheus-url", "http://p:9090"]
    assert main(["dashboards", "push", "--url", f"{grafana.url}/grafana/", *login]) == 0
    assert len(grafana.dashboards) == len(BOARDS)


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error


def test_a_wrong_token_is_one_line(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["dashboards", "push", "--url", grafana.url, "--token", "wrong"])
    assert "does not accept this token" in refused(capsys, code)
    assert grafana.writes == []


def test_an_unreachable_grafana_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code = main(["dashboards", "push", "--url", url, "--token", TOKEN])
    assert f"{url} cannot be reached" in refused(capsys, code)


def test_a_missing_data_source_is_made_only_when_asked(
    grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--prometheus-url" in refused(capsys, push(grafana))
    assert grafana.writes == []


def test_a_data_source_of_another_kind_is_refused(
    grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    grafana.datasources["Prometheus"] = {"uid": "x", "type": "loki"}
    assert "of type loki" in refused(capsys, push(grafana))


@pytest.mark.parametrize(
    ("path", "status", "answer", "said"),
    [
        ("/org", 200, "<html>log in</html>", "not JSON"),
        ("/org", 200, '"ok"', "something unexpected"),
        ("/org", 502, "<html>no message for you</html>", "not JSON"),
        ("/org", 502, "<html>bad gateway</html>", "answers GET /org with 502"),
        ("/folders", 200, '[{"name": "x"}]', "lacks title"),
        ("/folders", 500, '{"message": "database is locked"}', "database is locked"),
    ],
)
def test_what_is_no_grafana_is_said_so(
    grafana: FakeGrafana, capsys: pytest.CaptureFixture[str], path: str, status: int, answer: str, said: str
) -> None:
    grafana.troubles["GET", path] = status, answer
    assert said in refused(capsys, push(grafana))
    assert grafana.writes == []


RULES = "/v1/provisioning/folder/f1/rule-groups/headway"


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        (("POST", "/folders"), 403, "may not POST /folders"),
        (("POST", "/datasources"), 403, "may not POST /datasources"),
        (("POST", "/dashboards/db"), 403, "may not POST /dashboards/db"),
        (("POST", "/dashboards/db"), 412, "changed by somebody else"),
        (("PUT", RULES), 409, "changed by somebody else"),
        (("PUT", RULES), 404, "older than Grafana 9"),
    ],
)
def test_a_push_that_fails_midway_leaves_nothing(
    grafana: FakeGrafana, capsys: pytest.CaptureFixture[str], call: Any, status: int, said: str
) -> None:
    grafana.troubles[call] = status, '{"message": "no"}'
    before = grafana.state()
    assert said in refused(capsys, push(grafana, "--prometheus-url", "http://p:9090"))
    assert grafana.state() == before


def test_an_update_that_fails_midway_is_taken_back(
    filled: FakeGrafana, capsys: pytest.CaptureFixture[str]
) -> None:
    for board in BOARDS:
        filled.dashboards[board.uid][-1]["message"] = "headway old"
        filled.dashboards[board.uid][-1]["dashboard"]["refresh"] = "1m"
    filled.groups["f1", GROUP]["rules"][0]["for"] = "9m"
    before = filled.state()
    filled.troubles["PUT", RULES] = 403, '{"message": "no"}'
    assert "may not PUT" in refused(capsys, push(filled))
    assert filled.state() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "http://x"],
        ["--url", "http://x", "--user", "admin"],
    ],
)
def test_without_a_login_nothing_is_tried(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("GRAFANA_TOKEN", "GRAFANA_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    assert main(["dashboards", "push", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://x", "http://x:port"])
def test_a_url_that_is_none_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert url in refused(capsys, main(["dashboards", "push", "--url", url, "--token", "t"]))
