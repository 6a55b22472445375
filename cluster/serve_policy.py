"""SlaPolicy: the autoscaling policy as Serve calls it, by import path: `cluster.serve_policy:SlaPolicy`.

Serve asks ten times a second, in the loop that controls the whole cluster, and pickles this module by
value: no heavy imports here, nothing that waits, and nothing that raises.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from ray.serve.config import AutoscalingContext

from cluster.autoscaling import Decision, Observation, State, decide
from cluster.autoscaling_needs import signals
from cluster.autoscaling_policy import Policy, PolicyError
from cluster.autoscaling_stats import NAMED, Reports, read, read_named
from cluster.metrics.autoscaler import DecisionFigures
from cluster.metrics.catalogue import COMMON_LABELS, Sample
from cluster.metrics.exporter import FLUSH_S, MetricsExporter
from cluster.serve_scaling import DecisionNotes

STALE_S: Final = 15.0
"""What a replica said longer ago than this it did not say."""

Export = Callable[[Iterable[Sample]], None]
"""Takes all figures of the autoscaler, every second. Must return at once."""

Notes = Callable[[str, Observation, Decision], None]
"""Hears of every decision, with the application's name. Must return at once."""


class SlaPolicy:
    """Decides every `interval_s` and answers the same until then. One for each deployment."""

    def __init__(
        self,
        *,
        interval_s: float = 5.0,
        dry_run: bool = False,
        metrics: Mapping[str, str] | None = None,
        export: Export | None = None,
        notes: Notes | None = None,
        clock: Callable[[], float] = time.monotonic,
        **policy: Any,
    ) -> None:
        """`policy` are the fields of cluster.autoscaling_policy.Policy, as JSON has them. `metrics` maps
        names of autoscaling_stats.NAMED to what a deployment that is not ours reports. `dry_run` says what
        it would do and changes nothing. Raises PolicyError."""
        try:
            self.policy = msgspec.convert(policy, Policy)
        except msgspec.ValidationError as error:
            raise PolicyError(str(error)) from None
        if not 0.1 <= interval_s <= 60:
            raise PolicyError(f"interval_s {interval_s} is not within 0.1 to 60")
        if unknown := set(metrics or ()) - set(NAMED):
            raise PolicyError(f"metrics: {sorted(unknown)[0]} is unknown; known: {', '.join(NAMED)}")
        self._interval_s = interval_s
        self._dry_run = dry_run
        self._names = metrics
        self._export = export
        self._notes = notes
        self._exported_at = -math.inf
        self._figures = DecisionFigures()
        self._clock = clock
        self._state = State()
        self.decision: Decision | None = None
        """The last one."""
        self._decided_at = -math.inf
        self._target = 0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now = self._clock()
        try:
            if not 0 <= now - self._decided_at < self._interval_s:
                self._decided_at = now
                self._target = ctx.target_num_replicas  # what holds if this fails
                self._target = self._decide(ctx, now)
            if not 0 <= now - self._exported_at < FLUSH_S:
                self._exported_at = now
                self._export_figures(ctx)
        except Exception:
            # Raised into Serve's control loop it would keep every application from being updated.
            _logger().exception("autoscaling of %s: holding", ctx.deployment_name)
        return ctx.target_num_replicas if self._dry_run else self._target, {}

    def _decide(self, ctx: AutoscalingContext, now: float) -> int:
        reports = self._reports(ctx)
        observation = Observation(
            target=ctx.target_num_replicas,
            running=ctx.current_num_replicas,
            routers=reports.routers,
            replicas=reports.replicas,
        )
        decision = decide(observation, self._state, self.policy, now)
        self._state = decision.state
        self.decision = decision
        self._figures.note(observation, decision)
        if self._notes is None:
            self._notes = DecisionNotes()
        self._notes(ctx.app_name or "", observation, decision)
        _logger().info("%s", _line(ctx, observation, decision, self._dry_run))
        return decision.target

    def _export_figures(self, ctx: AutoscalingContext) -> None:
        if self._export is None:
            common = (ctx.app_name or "", ctx.deployment_name, "controller")
            labels = dict(zip(COMMON_LABELS, common, strict=True))
            self._export = MetricsExporter(self._figures.samples, labels).export
        self._export(self._figures.samples())

    def _reports(self, ctx: AutoscalingContext) -> Reports:
        stats: dict[str, dict[str, float]] = {}
        reported_at: dict[str, float] = {}
        for name, series_by_replica in (ctx.raw_metrics or {}).items():
            for replica, series in series_by_replica.items():
                if series and ctx.current_time - series[-1].timestamp <= STALE_S:
                    stats.setdefault(name, {})[replica.unique_id] = series[-1].value
                    reported_at[replica.unique_id] = series[-1].timestamp
        if self._names is None:
            return read(stats)
        tier = min((tier.level for tier in self.policy.tiers), default=0)
        return read_named(stats, self._names, tier, reported_at)


def _line(ctx: AutoscalingContext, observation: Observation, decision: Decision, dry_run: bool) -> str:
    """One decision as one line of JSON."""
    return json.dumps(
        {
            "event": "autoscaling",
            "application": ctx.app_name,
            "deployment": ctx.deployment_name,
            "target": decision.target,
            "before": observation.target,
            "running": observation.running,
            "starting": observation.starting,
            "dry_run": dry_run,
            "loads": {signal: round(load, 3) for signal, load in signals(decision.loads).items()},
            "reasons": [{"code": reason.code.value, "text": reason.text} for reason in decision.reasons],
        }
    )


def _logger() -> logging.Logger:
    return logging.getLogger("ray.serve")  # what the controller writes into its own file
