"""A Grafana that keeps everything in memory: the parts of its HTTP API that a push uses, as published.

https://grafana.com/docs/grafana/latest/developers/http_api (dashboard, folder, data_source,
dashboard_versions, alerting_provisioning). Answers can be replaced, to be those of a Grafana in trouble.
"""

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "glsa_secret"
LOGIN = ("admin", "pass")


@dataclass
class FakeGrafana:
    """What is in it, and what was asked of it."""

    url: str = ""
    prefix: str = ""
    lists_versions: bool = False
    """Answer versions with a list, as before Grafana 11."""
    folders: dict[str, str] = field(default_factory=dict)
    """uid -> title"""
    datasources: dict[str, dict[str, Any]] = field(default_factory=dict)
    dashboards: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """uid -> versions, each with dashboard, folderUid and message"""
    groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    troubles: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """Method and path -> status and body to answer instead."""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] != "GET"]

    def state(self) -> tuple[Any, ...]:
        contents = {uid: versions[-1]["dashboard"] for uid, versions in self.dashboards.items()}
        return dict(self.folders), dict(self.datasources), contents, dict(self.groups)

    def edit(self, uid: str) -> None:
        """Save a dashboard as somebody does in the browser."""
        last = self.dashboards[uid][-1]
        self.dashboards[uid].append(
            last | {"message": "", "dashboard": last["dashboard"] | {"title": "mine"}}
        )

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        for pattern, handler in _ROUTES:
            if (found := re.fullmatch(pattern, f"{method} {path}")) is not None:
                status, content = handler(self, body, *map(unquote, found.groups()))
                return status, content
        return 404, {"message": "Not found"}


def _org(_grafana: FakeGrafana, _body: Any) -> tuple[int, Any]:
    return 200, {"id": 1, "name": "Main Org."}


def _folders(grafana: FakeGrafana, _body: Any) -> tuple[int, Any]:
    return 200, [{"uid": uid, "title": title} for uid, title in grafana.folders.items()]


def _new_folder(grafana: FakeGrafana, body: Any) -> tuple[int, Any]:
    if body["title"] in grafana.folders.values():
        return 409, {"message": "a folder with the same name already exists"}
    uid = f"f{len(grafana.folders) + 1}"
    grafana.folders[uid] = body["title"]
    return 200, {"uid": uid, "title": body["title"]}


def _drop_folder(grafana: FakeGrafana, _body: Any, uid: str) -> tuple[int, Any]:
    del grafana.folders[uid]
    return 200, {"message": "Folder deleted"}


def _datasource(grafana: FakeGrafana, _body: Any, name: str) -> tuple[int, Any]:
    found = grafana.datasources.get(name)
    return (404, {"message": "Data source not found"}) if found is None else (200, found)


def _new_datasource(grafana: FakeGrafana, body: Any) -> tuple[int, Any]:
    made = grafana.datasources[body["name"]] = body | {"uid": f"d{len(grafana.datasources) + 1}"}
    return 200, {"datasource": made, "message": "Datasource added"}


def _drop_datasource(grafana: FakeGrafana, _body: Any, uid: str) -> tuple[int, Any]:
    grafana.datasources = {n: one for n, one in grafana.datasources.items() if one["uid"] != uid}
    return 200, {"message": "Data source deleted"}


def _dashboard(grafana: FakeGrafana, _body: Any, uid: str) -> tuple[int, Any]:
    if uid not in grafana.dashboards:
        return 404, {"message": "Dashboard not found"}
    versions = grafana.dashboards[uid]
    content = versions[-1]["dashboard"] | {"id": 7, "version": len(versions)}
    return 200, {"dashboard": content, "meta": {"folderUid": versions[-1]["folderUid"]}}


def _versions(grafana: FakeGrafana, _body: Any, uid: str) -> tuple[int, Any]:
    last = grafana.dashboards[uid][-1]
    found = [{"version": len(grafana.dashboards[uid]), "message": last["message"]}]
    return 200, found if grafana.lists_versions else {"versions": found}


def _save_dashboard(grafana: FakeGrafana, body: Any) -> tuple[int, Any]:
    content = {key: value for key, value in body["dashboard"].items() if key not in ("id", "version")}
    versions = grafana.dashboards.setdefault(content["uid"], [])
    if versions and not body["overwrite"] and body["dashboard"].get("version") != len(versions):
        return 412, {
            "message": "The dashboard has been changed by someone else",
            "status": "version-mismatch",
        }
    versions.append({"dashboard": content, "folderUid": body["folderUid"], "message": body["message"]})
    return 200, {"uid": content["uid"], "version": len(versions), "status": "success"}


def _drop_dashboard(grafana: FakeGrafana, _body: Any, uid: str) -> tuple[int, Any]:
    del grafana.dashboards[uid]
    return 200, {"message": "Dashboard deleted"}


def _group(grafana: FakeGrafana, _body: Any, folder: str, name: str) -> tuple[int, Any]:
    found = grafana.groups.get((folder, name))
    return (404, {"message": "rule group not found"}) if found is None else (200, found)


def _save_group(grafana: FakeGrafana, body: Any, folder: str, name: str) -> tuple[int, Any]:
    rules = [rule | {"id": number, "provenance": "api"} for number, rule in enumerate(body["rules"])]
    grafana.groups[folder, name] = body | {"rules": rules}
    return 200, body


def _drop_rule(grafana: FakeGrafana, _body: Any, uid: str) -> tuple[int, Any]:
    for key, group in list(grafana.groups.items()):
        group["rules"] = [rule for rule in group["rules"] if rule["uid"] != uid]
        if not group["rules"]:
            del grafana.groups[key]
    return 200, {}


_ROUTES: list[tuple[str, Any]] = [
    ("GET /org", _org),
    ("GET /folders", _folders),
    ("POST /folders", _new_folder),
    ("DELETE /folders/([^/]+)", _drop_folder),
    ("GET /datasources/name/([^/]+)", _datasource),
    ("POST /datasources", _new_datasource),
    ("DELETE /datasources/uid/([^/]+)", _drop_datasource),
    ("GET /dashboards/uid/([^/]+)", _dashboard),
    ("GET /dashboards/uid/([^/]+)/versions", _versions),
    ("DELETE /dashboards/uid/([^/]+)", _drop_dashboard),
    ("POST /dashboards/db", _save_dashboard),
    ("GET /v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", _group),
    ("PUT /v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)", _save_group),
    ("DELETE /v1/provisioning/alert-rules/([^/]+)", _drop_rule),
]


@contextmanager
def running() -> Iterator[FakeGrafana]:
    """Serve a new one for the time of the block."""
    grafana = FakeGrafana()
    basic = "Basic " + b64encode(":".join(LOGIN).encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            path = urlsplit(self.path).path.removeprefix(f"{grafana.prefix}/api")
            grafana.calls.append((self.command, path))
            trouble = grafana.troubles.get((self.command, path))
            if trouble is not None:
                return self._send(
                    trouble[0], trouble[1], "text/html" if trouble[1][:1] == "<" else "application/json"
                )
            if self.headers.get("authorization") not in (f"Bearer {TOKEN}", basic):
                return self._send(401, '{"message": "Invalid API key"}')
            status, content = grafana.answer(self.command, path, body)
            return self._send(status, json.dumps(content))

        def _send(self, status: int, text: str, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PUT = do_DELETE = _do

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    grafana.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield grafana
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
