"""Every alert fires when it should and only then, by Prometheus' own test of rules."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy.grafana.alerts import ALERTS, GROUP, grafana_group, prometheus_rules

PROMTOOL: Final = shutil.which("promtool")
APP: Final = 'application="a"'
LONG: Final = "x140"  # half a minute each: longer than the longest short window

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (apt-get install prometheus)")


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ", ".join([APP, *(f'{key}="{value}"' for key, value in labels.items())])
    return {"series": f"ray_{name}{{{inside}}}", "values": values}


def answers(kept: str, broken: str) -> list[dict[str, str]]:
    name = "headway_answers_total"
    return [series(name, kept, kept="yes", tier="t"), series(name, broken, kept="no", tier="t")]


def wanted(count: int) -> dict[str, str]:
    name = "serve_autoscaling_target_replicas"
    return series(name, f"{count}+0{LONG}", deployment="Replica")


def gauge(name: str, value: float, **labels: str) -> dict[str, str]:
    return series(name, f"{value}+0{LONG}", **labels)


def requests(ok: int, failed: int) -> list[dict[str, str]]:
    name = "headway_requests_total"
    return [
        series(name, f"0+{ok}{LONG}", outcome="ok"),
        series(name, f"0+{failed}{LONG}", outcome="failed"),
    ]


CASES: Final[dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]]] = {
    "HeadwayPromiseBurnsFast": (
        answers(f"0+8{LONG}", f"0+2{LONG}"),
        answers(f"0+90{LONG}", f"0+10{LONG}"),
    ),
    "HeadwayPromiseBurnsSlowly": (
        answers(f"0+95{LONG}", f"0+5{LONG}"),
        answers(f"0+98{LONG}", f"0+2{LONG}"),
    ),
    "HeadwayReplicaDown": (
        [wanted(3), gauge("headway_connected_replicas", 2)],
        [wanted(2), gauge("headway_connected_replicas", 2)],
    ),
    "HeadwayNoReplica": (
        [wanted(1), gauge("headway_connected_replicas", 0)],
        [wanted(0), gauge("headway_connected_replicas", 0)],
    ),
    "HeadwayKvFull": (
        [gauge("headway_kv_used_blocks", 97), gauge("headway_kv_blocks", 100)],
        [gauge("headway_kv_used_blocks", 90), gauge("headway_kv_blocks", 100)],
    ),
    "HeadwayQueueOld": (
        [gauge("headway_queue_age_s", 31, tier="t")],
        [gauge("headway_queue_age_s", 29, tier="t")],
    ),
    "HeadwayStreamStalls": (
        [gauge("headway_open_gap_ms", 12_000, tier="t")],
        [gauge("headway_open_gap_ms", 900, tier="t")],
    ),
    "HeadwayLedgerDown": ([gauge("headway_ledger_up", 0)], [gauge("headway_ledger_up", 1)]),
    "HeadwayFailures": (requests(90, 10), requests(1000, 1)),
}


def run_promtool(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    (folder / "rules.yml").write_text(yaml.safe_dump(prometheus_rules()))
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(document))
    command = [PROMTOOL, "test", "rules", "tests.yml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def one_test(name: str, given: list[dict[str, str]], *, fires: bool) -> dict[str, Any]:
    """Firing is what is expected exactly: promtool compares labels, so those of the series are looked up."""
    (alert,) = [alert for alert in ALERTS if alert.name == name]
    by_tier = "tier" in alert.expr.partition("by (")[2].partition(")")[0]
    labels = {"application": "a", "severity": alert.severity} | ({"tier": "t"} if by_tier else {})
    firing = f'ALERTS{{alertname="{name}", alertstate="firing"}}'
    query = f"count by (alertname, application, severity, tier) ({firing})"
    found = [{"labels": _selector({"alertname": name} | labels), "value": 1}] if fires else []
    return {
        "interval": "30s",
        "input_series": given,
        "promql_expr_test": [{"expr": query, "eval_time": "68m", "exp_samples": found}],
    }


def _selector(labels: dict[str, str]) -> str:
    return "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def test_every_alert_has_its_case() -> None:
    assert list(CASES) == [alert.name for alert in ALERTS]


@needs_promtool
@pytest.mark.parametrize("fires", [True, False])
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path, fires: bool) -> None:
    tests = [one_test(name, CASES[name][not fires], fires=fires) for name in CASES]
    done = run_promtool(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(prometheus_rules()))
    command = [str(PROMTOOL), "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_grafanas_rules_ask_the_same_with_the_same_bounds() -> None:
    group = grafana_group("folder", "source")
    assert (group["title"], group["folderUid"]) == (GROUP, "folder")
    for alert, rule in zip(ALERTS, group["rules"], strict=True):
        reading, limit = rule["data"]
        assert (reading["datasourceUid"], reading["model"]["expr"]) == ("source", alert.expr)
        assert limit["model"]["conditions"][0]["evaluator"] == {"type": "gt", "params": [alert.above]}
        assert (rule["condition"], rule["for"]) == ("B", f"{alert.for_s}s")
        assert len(rule["uid"]) <= 40
