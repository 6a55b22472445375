import pytest

from cluster.autoscaling_needs import ReplicaReport
from cluster.autoscaling_stats import ROUTER, read, read_named, replica_stats, router_stats
from replicas.api import ReplicaLoad, TierLoad
from replicas.capability import Capability
from router.counters import RouterCounters, TierCounters

TIER = TierCounters(
    1,
    num_requests=7,
    num_rejected=2,
    input_tokens=700,
    cached_tokens=30,
    output_tokens=90,
    ttft=(0, 3, 0, 4),
    itl=(5,),
    queued_input_tokens=11,
    queued_output_tokens=22,
    num_stalled=1,
)


def by_name(stats: dict[str, float], replica: str) -> dict[str, dict[str, float]]:
    return {name: {replica: value} for name, value in stats.items()}


def test_a_router_comes_back_as_it_was() -> None:
    counters = RouterCounters("abc", 1_700_000_000_123_456_789, 42, (TierCounters(0), TIER))
    (found,) = read(by_name(router_stats(counters), "r1")).routers
    assert found == counters


def test_the_latest_epoch_of_a_router_counts() -> None:
    old, new = (RouterCounters("abc", epoch, 5, (TierCounters(0, num_requests=epoch),)) for epoch in (1, 2))
    (found,) = read(by_name(router_stats(new) | router_stats(old), "r1")).routers
    assert found == new


def test_a_router_may_report_through_several_replicas() -> None:
    stats: dict[str, dict[str, float]] = {}
    for replica, number in (("r1", 3), ("r2", 4)):
        for name, value in router_stats(RouterCounters("abc", 1, number)).items():
            stats.setdefault(name, {})[replica] = value
    assert {counters.number for counters in read(stats).routers} == {3, 4}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 2.0**60])
def test_numbers_that_count_nothing_are_dropped(value: float) -> None:
    stats = router_stats(RouterCounters("abc", 1, 3, (TIER,))) | {f"{ROUTER}abc/1/1/num_requests": value}
    assert read(by_name(stats, "r1")).routers == ()


def test_a_replica_comes_back_with_what_it_holds_and_can() -> None:
    tiers = (TierLoad(0, 2, 1, 300, 10, 5), TierLoad(2, 1, 0, 0))
    load = ReplicaLoad(num_running=3, free_blocks=60, num_blocks=100, overloaded=True, tiers=tiers)
    able = Capability(input_tokens_per_s=900.0, output_tokens_per_s=80.0, max_batch=8, step_s=0.02)
    (found,) = read(by_name(replica_stats(load, able, 16, 4.5), "r1")).replicas
    assert found == ReplicaReport(
        replica="r1",
        input_tokens_per_s=900.0,
        output_tokens_per_s=80.0,
        max_batch=8,
        step_s=0.02,
        num_running=3,
        kv_tokens=1600,
        kv_wanted_tokens=45 * 16,
        is_at_floor=True,
        queued_tokens={0: 300, 2: 0},
        cold_start_s=4.5,
    )


def test_another_deployment_reports_under_its_own_names() -> None:
    stats = {"busy_seconds": {"a": 12.5, "b": 1.0}, "backlog": {"a": 3.0}, "slots": {"a": 4.0, "b": 4.0}}
    names = {"work_s": "busy_seconds", "queued_work_s": "backlog", "max_running": "slots"}
    reports = read_named(stats, names, 0, {"a": 100.0, "b": 101.0})
    first, second = reports.routers
    assert (first.router, first.number, first.tiers[0].input_tokens) == ("a", 100_000, 12_500)
    assert (first.tiers[0].queued_input_tokens, second.tiers[0].queued_input_tokens) == (3000, 0)
    assert [report.max_batch for report in reports.replicas] == [4.0, 4.0]
    assert reports.replicas[0].input_tokens_per_s == 1000.0
