"""The alerts: as rules of Prometheus, and as rules of Grafana."""

from dataclasses import dataclass
from typing import Any, Final, Literal

GROUP: Final = "headway"
INTERVAL_S: Final = 15
LOOKBACK_S: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Fires while an expression has been above a bound for long enough."""

    name: str
    expr: str
    """One series per thing that may be wrong."""
    above: float
    for_s: int
    severity: Literal["page", "ticket"]
    summary: str
    """One line; {{ $labels.x }} names a label."""


def _broken(window: str) -> str:
    """Share of the answers that broke their tier's promise."""
    by = "sum by (application, tier)"
    broken = f'{by} (rate(ray_headway_answers_total{{kept="no"}}[{window}]))'
    return f"{broken} / {by} (rate(ray_headway_answers_total[{window}]))"


def _burn(short: str, long: str) -> str:
    """How many times faster than allowed promises break, in the window where that is less.

    Two windows (Google's SRE workbook, chapter 5): the long one says that it matters, the short one that it
    has not passed.
    """
    first, second = f"({_broken(short)}) / 0.01", f"({_broken(long)}) / 0.01"
    return f"({first} < {second}) or ({second})"


ALERTS: Final = (
    Alert(
        name="HeadwayPromiseBurnsFast",
        expr=_burn("5m", "1h"),
        above=14.4,
        for_s=60,
        severity="page",
        summary="{{ $labels.application }}, tier {{ $labels.tier }}: answers break their promise 14 times as "
        "often as allowed",
    ),
    Alert(
        name="HeadwayPromiseBurnsSlowly",
        expr=_burn("30m", "6h"),
        above=3,
        for_s=300,
        severity="ticket",
        summary="{{ $labels.application }}, tier {{ $labels.tier }}: answers break their promise 3 times as "
        "often as allowed",
    ),
    Alert(
        name="HeadwayReplicaDown",
        expr='max by (application) (ray_serve_autoscaling_target_replicas{deployment="Replica"}) '
        "- min by (application) (ray_headway_connected_replicas)",
        above=0,
        for_s=300,
        severity="ticket",
        summary="{{ $labels.application }}: {{ $value }} replicas are missing",
    ),
    Alert(
        name="HeadwayNoReplica",
        expr="(1 - min by (application) (ray_headway_connected_replicas)) and (max by (application) "
        '(ray_serve_autoscaling_target_replicas{deployment="Replica"}) > 0)',
        above=0,
        for_s=30,
        severity="page",
        summary="{{ $labels.application }}: a router has no replica to use, and there should be some",
    ),
    Alert(
        name="HeadwayKvFull",
        expr="sum by (application) (ray_headway_kv_used_blocks) "
        "/ sum by (application) (ray_headway_kv_blocks)",
        above=0.95,
        for_s=120,
        severity="ticket",
        summary="{{ $labels.application }}: the KV pools are full; sequences wait or are preempted",
    ),
    Alert(
        name="HeadwayQueueOld",
        expr="max by (application, tier) (ray_headway_queue_age_s)",
        above=30,
        for_s=30,
        severity="page",
        summary="{{ $labels.application }}, tier {{ $labels.tier }}: a request has waited for {{ $value }} s",
    ),
    Alert(
        name="HeadwayStreamStalls",
        expr="max by (application, tier) (ray_headway_open_gap_ms)",
        above=10_000,
        for_s=15,
        severity="page",
        summary="{{ $labels.application }}, tier {{ $labels.tier }}: a running stream is silent",
    ),
    Alert(
        name="HeadwayLedgerDown",
        expr="1 - min by (application) (ray_headway_ledger_up)",
        above=0,
        for_s=30,
        severity="page",
        summary="{{ $labels.application }}: the ledger of quotas does not answer; limits hold locally only",
    ),
    Alert(
        name="HeadwayFailures",
        expr='sum by (application) (rate(ray_headway_requests_total{outcome="failed"}[5m])) '
        "/ sum by (application) (rate(ray_headway_requests_total[5m]))",
        above=0.01,
        for_s=120,
        severity="page",
        summary="{{ $labels.application }}: more than 1% of the requests fail",
    ),
)


def prometheus_rules() -> dict[str, Any]:
    """Return a rule file for Prometheus."""
    rules = [
        {
            "alert": alert.name,
            "expr": f"({alert.expr}) > {alert.above:g}",
            "for": f"{alert.for_s}s",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": GROUP, "interval": f"{INTERVAL_S}s", "rules": rules}]}


def grafana_group(folder_uid: str, datasource_uid: str) -> dict[str, Any]:
    """Return the rule group as Grafana's provisioning API takes it."""
    return {
        "title": GROUP,
        "folderUid": folder_uid,
        "interval": INTERVAL_S,
        "rules": [_grafana_rule(alert, folder_uid, datasource_uid) for alert in ALERTS],
    }


def _grafana_rule(alert: Alert, folder_uid: str, datasource_uid: str) -> dict[str, Any]:
    reading = {"refId": "A", "expr": alert.expr, "instant": True, "range": False}
    limit = {
        "refId": "B",
        "type": "threshold",
        "expression": "A",
        "conditions": [{"evaluator": {"type": "gt", "params": [alert.above]}}],
    }
    return {
        "uid": alert.name.lower(),
        "title": alert.name,
        "folderUID": folder_uid,
        "ruleGroup": GROUP,
        "orgID": 1,
        "condition": "B",
        "for": f"{alert.for_s}s",
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary.replace("$value", "$values.A.Value")},
        "isPaused": False,
        "data": [
            {
                "refId": "A",
                "datasourceUid": datasource_uid,
                "relativeTimeRange": {"from": LOOKBACK_S, "to": 0},
                "model": reading,
            },
            {
                "refId": "B",
                "datasourceUid": "__expr__",
                "relativeTimeRange": {"from": LOOKBACK_S, "to": 0},
                "model": limit,
            },
        ],
    }
