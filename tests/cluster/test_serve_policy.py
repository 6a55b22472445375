import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster import serve_policy
from cluster.autoscaling_policy import PolicyError
from cluster.autoscaling_stats import router_stats
from cluster.metrics.catalogue import Sample
from cluster.serve_policy import SlaPolicy
from router.counters import RouterCounters, TierCounters

TIERS = [{"name": "only", "level": 0, "ttft_target_ms": 2000}]
DEPLOYMENT = DeploymentID(name="Replica", app_name="app")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Exports(list[list[Sample]]):
    def __call__(self, samples: Iterable[Sample]) -> None:
        self.append(list(samples))


def context(target: int, stats: dict[str, float], *, at: float = 0.0, running: int = 1) -> AutoscalingContext:
    replicas = [ReplicaID(f"r{i}", DEPLOYMENT) for i in range(running)]
    raw = {
        name: {replica: [TimeStampedValue(at - 1, -1.0), TimeStampedValue(at, value)] for replica in replicas}
        for name, value in stats.items()
    }
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name="Replica",
        app_name="app",
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=replicas,
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics=None,
        raw_metrics=lambda: raw,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=at,
        config=AutoscalingConfig(),
    )


def nobody(*_: object) -> None:
    """Takes no notes."""


def policy(clock: Clock, **settings: Any) -> SlaPolicy:
    defaults = {"export": Exports(), "notes": nobody, "max_replicas": 9, "tiers": TIERS}
    return SlaPolicy(clock=clock, **(defaults | settings))


def busy(number: int) -> dict[str, float]:
    """Five seconds in which a replica of 1,000 tokens/s was asked for 3 s of work per second."""
    tier = TierCounters(0, num_requests=number, input_tokens=15_000 * number)
    return router_stats(RouterCounters("x", 1, number, (tier,))) | {"headway/replica/input_tokens_per_s": 1e3}


def test_it_decides_every_five_seconds_from_the_last_values() -> None:
    clock = Clock()
    decide = policy(clock)
    targets, made = [], []
    for tick in range(81):
        targets.append(decide(context(1, busy(1 + tick // 40), at=clock.now))[0])
        if not made or made[-1] is not decide.decision:
            made.append(decide.decision)
        clock.now += 0.125
    assert len(made) == 3
    assert targets[:40] == [1] * 40
    assert targets[40:] == [2] * 41


def test_figures_are_exported_every_second() -> None:
    clock, exports = Clock(), Exports()
    decide = policy(clock, export=exports)
    for tick in range(81):
        decide(context(1, busy(1 + tick // 40), at=clock.now))
        clock.now += 0.125
    assert len(exports) == 11
    values = {(s.metric.name, s.labels): s.value for s in exports[-1]}
    assert values["headway_autoscaling_target_replicas", ()] == 2
    assert values["headway_autoscaling_running_replicas", ()] == 1
    assert values["headway_autoscaling_load_replicas", ("rate",)] == pytest.approx(
        3 / decide.policy.utilisation
    )
    assert values["headway_autoscaling_reasons_total", ("rate",)] == 2


def test_a_dry_run_decides_and_changes_nothing() -> None:
    clock = Clock()
    decide = policy(clock, dry_run=True)
    for number in (1, 2, 3):
        assert decide(context(1, busy(number), at=clock.now)) == (1, {})
        clock.now += 5.0
    assert decide.decision is not None
    assert decide.decision.target == 2


def test_every_decision_is_a_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    decide = policy(clock)
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "ray.serve"):
            for number in (1, 2, 3):
                decide(context(1, busy(number), at=clock.now))
                clock.now += 5.0
    finally:
        logger.removeHandler(caplog.handler)
    lines = [json.loads(text) for text in dict.fromkeys(caplog.messages)]
    assert [line["target"] for line in lines] == [1, 2, 2]
    assert {reason["code"] for reason in lines[2]["reasons"]} == {"rate", "cold_start_limit"}
    assert lines[2]["loads"]["rate"] == round(3 / decide.policy.utilisation, 3)


def test_what_was_said_long_ago_was_not_said() -> None:
    clock = Clock()
    decide = policy(clock)
    stale = context(3, busy(1), at=clock.now)
    stale.current_time = clock.now + 16
    assert decide(stale)[0] == 3
    assert decide.decision is not None
    assert [reason.code for reason in decide.decision.reasons] == ["no_data"]


def test_an_error_holds_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("an export that fails")

    decide = policy(Clock(), export=fails)
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    try:
        assert decide(context(4, {})) == (4, {})
    finally:
        logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert "an export that fails" in caplog.text


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"min_replicas": 4, "max_replicas": 2}, "min_replicas 4 is above max_replicas 2"),
        ({"utilisation": 1.5}, "utilisation"),
        ({"utilization": 0.5}, "utilization"),
        ({"interval_s": 0.0}, "interval_s 0.0"),
        ({"metrics": {"wrok_s": "x"}}, "wrok_s is unknown; known: work_s"),
    ],
)
def test_nonsense_is_refused_with_the_reason(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PolicyError, match=complaint):
        SlaPolicy(**settings)


@pytest.fixture
def by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(serve_policy)
    yield
    cloudpickle.unregister_pickle_by_value(serve_policy)


@pytest.mark.usefixtures("by_value")
def test_it_survives_being_pickled_by_value() -> None:
    pickled = cloudpickle.dumps(SlaPolicy)
    assert b"_decide" in pickled  # the code, not a name to import it by
    copy = cloudpickle.loads(pickled)
    assert copy(clock=Clock(), export=Exports(), notes=nobody, max_replicas=3)(context(2, {})) == (2, {})


def test_serve_takes_it_by_its_path_with_json() -> None:
    settings = {"max_replicas": 3, "tiers": TIERS, "dry_run": True}
    given = AutoscalingPolicy(policy_function="cluster.serve_policy:SlaPolicy", policy_kwargs=settings)
    assert given.get_policy().__name__ == "SlaPolicy"
