"""Push: brings dashboards and alerts into a Grafana, whole or not at all.

Everything is looked at before anything is written; a failure in between is undone. A dashboard's last
version says who wrote it: our own carry the digest of their content, so that an edited copy is recognised,
whatever Grafana makes of the JSON, and an unchanged one is left alone.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote

from deploy.grafana.alerts import ALERTS, GROUP, grafana_group
from deploy.grafana.board import Board, render
from deploy.grafana.boards import BOARDS
from deploy.grafana.client import Grafana, GrafanaError

SIGNATURE: Final = "headway"
"""First word of the messages of versions that were pushed."""

Act = Literal["create", "update", "overwrite", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a push does to one thing."""

    kind: Literal["folder", "data source", "dashboard", "alerts"]
    name: str
    act: Act
    differences: tuple[str, ...] = ()
    """Lines, as of `diff`, for an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to push to."""

    folder: str
    """Title of the folder."""
    datasource: str
    """Name of the Prometheus data source."""
    prometheus_url: str | None = None
    """Of the data source to create, if there is none."""
    force: bool = False
    """Overwrite dashboards that somebody has edited."""
    with_alerts: bool = True


class EditedError(GrafanaError):
    """Somebody has edited a dashboard since it was pushed."""


class Push:
    """One push: `plan` looks, `apply` writes."""

    def __init__(self, grafana: Grafana, target: Target) -> None:
        self._grafana = grafana
        self._target = target
        self._undo: list[Callable[[], None]] = []
        self._folder_uid: str | None = None
        self._datasource_uid: str | None = None

    def plan(self) -> list[Change]:
        """Look at all there is, and return what would change. Writes nothing.

        Raises GrafanaError, EditedError unless forced.
        """
        self._grafana.get("/org")  # the login, before anything else is said
        changes = [self._plan_folder(), self._plan_datasource()]
        changes += [self._plan_dashboard(board) for board in BOARDS]
        if self._target.with_alerts:
            changes.append(self._plan_alerts())
        return changes

    def apply(self, changes: list[Change]) -> None:
        """Carry out a plan. Raises GrafanaError; then all is as it was before."""
        wanted = {(change.kind, change.name): change for change in changes if change.act != "keep"}
        try:
            if ("folder", self._target.folder) in wanted:
                self._create_folder()
            if ("data source", self._target.datasource) in wanted:
                self._create_datasource()
            for board in BOARDS:
                if (change := wanted.get(("dashboard", board.title))) is not None:
                    self._write_dashboard(board, is_new=change.act == "create")
            if (change := wanted.get(("alerts", GROUP))) is not None:
                self._write_alerts()
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        for undo in reversed(self._undo):
            with contextlib.suppress(GrafanaError):  # the first error is the one to tell
                undo()

    # Folder and data source

    def _plan_folder(self) -> Change:
        title = self._target.folder
        for folder in self._grafana.get("/folders?limit=1000") or ():
            if _text(folder, "title") == title:
                self._folder_uid = _text(folder, "uid")
                return Change(kind="folder", name=title, act="keep")
        return Change(kind="folder", name=title, act="create")

    def _create_folder(self) -> None:
        created = self._grafana.post("/folders", {"title": self._target.folder})
        uid = self._folder_uid = _text(created, "uid")
        self._undo.append(lambda: self._grafana.delete(f"/folders/{uid}?forceDeleteRules=true"))

    def _plan_datasource(self) -> Change:
        name = self._target.datasource
        found = self._grafana.get(f"/datasources/name/{quote(name, safe='')}")
        if found is not None:
            if (kind := _text(found, "type")) != "prometheus":
                raise GrafanaError(f"the data source {name} is of type {kind}, not prometheus")
            self._datasource_uid = _text(found, "uid")
            return Change(kind="data source", name=name, act="keep")
        if self._target.prometheus_url is None:
            raise GrafanaError(f"there is no data source {name}; --prometheus-url URL creates it")
        return Change(kind="data source", name=name, act="create")

    def _create_datasource(self) -> None:
        body = {
            "name": self._target.datasource,
            "type": "prometheus",
            "access": "proxy",
            "url": self._target.prometheus_url,
            "jsonData": {"httpMethod": "POST", "timeInterval": "5s"},
        }
        created = self._grafana.post("/datasources", body)
        uid = self._datasource_uid = _text(created, "datasource", "uid")
        self._undo.append(lambda: self._grafana.delete(f"/datasources/uid/{uid}"))

    # Dashboards

    def _plan_dashboard(self, board: Board) -> Change:
        there = self._grafana.get(f"/dashboards/uid/{board.uid}")
        if there is None:
            return Change(kind="dashboard", name=board.title, act="create")
        wanted = self._rendered(board)
        author, digest = self._last_author(board)
        in_place = there.get("meta", {}).get("folderUid") == self._folder_uid
        if author == SIGNATURE and digest == _digest(wanted) and in_place:
            return Change(kind="dashboard", name=board.title, act="keep")
        if author != SIGNATURE and not self._target.force:
            raise EditedError(
                f"{board.title} was edited in Grafana: save it under another name, or use --force"
            )
        act: Act = "update" if author == SIGNATURE else "overwrite"
        lines = tuple(_differences(there.get("dashboard"), wanted))
        return Change(kind="dashboard", name=board.title, act=act, differences=lines)

    def _last_author(self, board: Board) -> tuple[str, str]:
        """Return the first two words of the last version's message."""
        found = self._grafana.get(f"/dashboards/uid/{board.uid}/versions?limit=1") or []
        versions = found["versions"] if isinstance(found, dict) else found  # since Grafana 11 an object
        message = str(versions[0].get("message", "")) if versions else ""
        author, _, digest = message.partition(" ")
        return author, digest

    def _write_dashboard(self, board: Board, *, is_new: bool) -> None:
        before = None if is_new else self._grafana.get(f"/dashboards/uid/{board.uid}")
        content = self._rendered(board)
        version = before["dashboard"].get("version") if before else None
        self._grafana.post(
            "/dashboards/db",
            {
                "dashboard": content | ({} if version is None else {"version": version}),
                "folderUid": self._folder_uid,
                "message": f"{SIGNATURE} {_digest(content)}",
                "overwrite": False,  # the version tells Grafana of changes that came in between
            },
        )
        if before is None:
            self._undo.append(lambda: self._grafana.delete(f"/dashboards/uid/{board.uid}"))
        else:
            self._undo.append(lambda: self._put_back(before))

    def _put_back(self, before: dict[str, Any]) -> None:
        """Write a dashboard as it was; its history shows both."""
        content = {key: value for key, value in before["dashboard"].items() if key not in ("id", "version")}
        folder = before["meta"].get("folderUid")
        self._grafana.post(
            "/dashboards/db",
            {"dashboard": content, "folderUid": folder, "message": "a push was undone", "overwrite": True},
        )

    def _rendered(self, board: Board) -> dict[str, Any]:
        return render(board, self._datasource_uid or self._target.datasource)

    # Alerts

    def _plan_alerts(self) -> Change:
        if self._folder_uid is None or self._datasource_uid is None:
            return Change(kind="alerts", name=GROUP, act="create")
        there = self._grafana.get(self._group_path())
        if there is None:
            return Change(kind="alerts", name=GROUP, act="create")
        lines = tuple(_differences(there, grafana_group(self._folder_uid, self._datasource_uid)))
        return Change(kind="alerts", name=GROUP, act="update" if lines else "keep", differences=lines)

    def _write_alerts(self) -> None:
        assert self._folder_uid is not None, "alerts need a folder"
        assert self._datasource_uid is not None, "alerts need a data source"
        path = self._group_path()
        before = self._grafana.get(path)
        if before is not None:
            self._undo.append(lambda: self._grafana.put(path, before))
        else:
            self._undo.append(self._delete_alerts)
        self._grafana.put(path, grafana_group(self._folder_uid, self._datasource_uid))

    def _delete_alerts(self) -> None:
        for alert in ALERTS:
            self._grafana.delete(f"/v1/provisioning/alert-rules/{alert.name.lower()}")

    def _group_path(self) -> str:
        return f"/v1/provisioning/folder/{self._folder_uid}/rule-groups/{GROUP}"


def _text(answer: Any, *path: str) -> str:
    """Return a text inside an answer. Raises GrafanaError when it is not there."""
    for key in path:
        answer = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(answer, str):
        raise GrafanaError(f"an answer lacks {'.'.join(path)}: no Grafana?")
    return answer


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _differences(there: Any, wanted: Any, path: str = "") -> list[str]:
    """Say where what is wanted is not there; what Grafana has beyond it is its own business."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        return [
            line
            for key, value in wanted.items()
            for line in _differences(there.get(key), value, f"{path}.{key}" if path else key)
        ]
    if isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        return [
            line
            for position, (one, other) in enumerate(zip(there, wanted, strict=True))
            for line in _differences(one, other, f"{path}[{position}]")
        ]
    return [] if there == wanted else [f"{path}: {_short(there)} -> {_short(wanted)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
