"""`headway dashboards`: dashboards and alerts into Grafana, or into files."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from replicas.errors import ConfigError

if TYPE_CHECKING:
    from deploy.grafana.push import Change

TOKEN_VARIABLE = "GRAFANA_TOKEN"
PASSWORD_VARIABLE = "GRAFANA_PASSWORD"


class DashboardsError(Exception):
    """Dashboards cannot be pushed; one line."""


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the commands; each sets `dashboards`, a function from arguments to what is printed."""
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    push = commands.add_parser("push", help="bring dashboards and alerts into a Grafana (9 to 12)")
    push.add_argument("--url", required=True, help="address of Grafana")
    login = push.add_mutually_exclusive_group()
    login.add_argument("--token", help=f"service account's token (or {TOKEN_VARIABLE})")
    login.add_argument("--user", help=f"user, or user:password (or {PASSWORD_VARIABLE})")
    push.add_argument("--folder", default="Headway", help="folder, made if missing (default Headway)")
    push.add_argument("--datasource", default="Prometheus", help="name of the data source of Prometheus")
    push.add_argument(
        "--prometheus-url", metavar="URL", help="make the data source with this address if missing"
    )
    push.add_argument("--no-alerts", action="store_true", help="leave alert rules to Prometheus")
    push.add_argument("--dry-run", action="store_true", help="say what would change, change nothing")
    push.add_argument("--diff", action="store_true", help="show what differs, line by line")
    push.add_argument("--force", action="store_true", help="overwrite dashboards that were edited in Grafana")
    push.add_argument("--insecure", action="store_true", help="do not check the certificate")
    push.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    push.set_defaults(dashboards=_push)
    write = commands.add_parser(
        "write", help="write them as files: JSON to import, a rule file for Prometheus"
    )
    write.add_argument("folder", type=Path)
    write.set_defaults(dashboards=_write)


def run(options: argparse.Namespace) -> int:
    """Run a command; returns the exit code: 1 for a Grafana that refuses, 2 for a mistake of the caller."""
    command: Callable[[argparse.Namespace], str] = options.dashboards
    try:
        print(command(options))
    except (DashboardsError, ConfigError) as error:
        print(f"headway: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _push(options: argparse.Namespace) -> str:
    try:
        from deploy.grafana.client import Grafana, GrafanaError
    except ImportError:
        raise ConfigError("grafana-api is not installed: pip install 'headway[grafana]'") from None
    from deploy.grafana.push import Push, Target

    target = Target(
        folder=options.folder,
        datasource=options.datasource,
        prometheus_url=options.prometheus_url,
        force=options.force,
        with_alerts=not options.no_alerts,
    )
    try:
        push = Push(Grafana(options.url, _login(options), verify=not options.insecure), target)
        changes = push.plan()
        if not options.dry_run:
            push.apply(changes)
    except GrafanaError as error:
        raise DashboardsError(str(error)) from None
    return _report(changes, options)


def _login(options: argparse.Namespace) -> str | tuple[str, str]:
    if options.user is not None:
        user, colon, password = options.user.partition(":")
        if not colon:
            password = os.environ.get(PASSWORD_VARIABLE, "")
        if not password:
            raise ConfigError(f"no password: --user user:password, or {PASSWORD_VARIABLE}")
        return user, password
    token: str = options.token or os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"who are you? --token TOKEN, --user USER, or {TOKEN_VARIABLE}")
    return token


def _report(changes: "list[Change]", options: argparse.Namespace) -> str:
    from deploy.grafana.alerts import ALERTS
    from deploy.grafana.boards import BOARDS

    if options.json:
        report = {
            "dashboards": len(BOARDS),
            "panels": sum(len(board.panels) for board in BOARDS),
            "alerts": 0 if options.no_alerts else len(ALERTS),
            "changes": [
                {"kind": c.kind, "name": c.name, "act": c.act, "differences": c.differences}
                for c in changes
                if c.act != "keep"
            ],
            "dry_run": options.dry_run,
        }
        return json.dumps(report)
    lines = []
    for change in changes:
        lines.append(f"{'unchanged' if change.act == 'keep' else change.act:10} {change.kind} {change.name}")
        lines += [f"    {line}" for line in change.differences if options.diff]
    if options.dry_run:
        lines.append("nothing was changed: this was a dry run")
    return "\n".join(lines)


def _write(options: argparse.Namespace) -> str:
    from deploy.grafana.alerts import prometheus_rules
    from deploy.grafana.board import render
    from deploy.grafana.boards import BOARDS

    folder: Path = options.folder
    files = {f"{board.uid}.json": json.dumps(render(board, "prometheus"), indent=1) for board in BOARDS}
    files["headway-rules.yml"] = yaml.safe_dump(prometheus_rules(), sort_keys=False, width=110)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    return "\n".join(str(folder / name) for name in files)
