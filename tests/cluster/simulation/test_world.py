import asyncio
import gc
from dataclasses import replace

import pytest

from cluster.simulation.clients import Habits
from cluster.simulation.profile import Noise, SharedHost
from cluster.simulation.virtual_time import run as run_in_virtual_time
from cluster.simulation.world import CONNECT_S, Outcome, World, simulate
from tests.cluster.simulation.small_world import run_small, scenario, traffic


def totals(outcome: Outcome) -> tuple[int, int, int, int]:
    tiers = outcome.measures.tiers.values()
    return (
        sum(tier.requests for tier in tiers),
        sum(tier.failed for tier in tiers),
        sum(tier.refused for tier in tiers),
        sum(tier.cancelled for tier in tiers),
    )


def test_every_request_of_a_light_load_is_served_in_time() -> None:
    outcome = run_small(rate=2.0)
    num_requests, *others = totals(outcome)
    assert num_requests == sum(1 for _ in traffic(2.0, 30.0))
    assert others == [0, 0, 0]
    assert all(tier.attainment == 1.0 for tier in outcome.measures.tiers.values())


def test_requests_are_counted_while_they_are_open() -> None:
    outcome = run_small()
    time_s = sum(tier.e2e.total for tier in outcome.measures.tiers.values())
    assert outcome.mean_open == pytest.approx(time_s / outcome.virtual_s)


def test_routers_count_the_latencies_that_clients_saw() -> None:
    async def run() -> World:
        world = World.build(scenario(num_replicas=1))
        await world.serve(traffic(6.0, 30.0))
        return world

    world = run_in_virtual_time(run(), 1000)
    for level, seen in world.measures.tiers.items():
        counted = [counts.tier(level) for counts in world.counts]
        assert sum(tier.ttft_ms.num_observed for tier in counted) == seen.ttft.count > 0
        assert sum(tier.ttft_ms.sum for tier in counted) == pytest.approx(1e3 * seen.ttft.total)
        assert sum(tier.itl_ms.num_observed for tier in counted) == seen.itl.count > 0
        assert sum(tier.itl_ms.sum for tier in counted) == pytest.approx(1e3 * seen.itl.total)


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = run_small(), run_small()
    assert first.num_events == second.num_events
    assert first.replica_s == second.replica_s
    assert [tier.itl.total for tier in first.measures.tiers.values()] == [
        tier.itl.total for tier in second.measures.tiers.values()
    ]


def test_streams_of_a_replica_that_dies_go_on_elsewhere() -> None:
    outcome = simulate(scenario(kills_at_s=(5.0, 18.0)), traffic(4.0, 30.0), 1000)
    _, failed, refused, _ = totals(outcome)
    assert (failed, refused) == (0, 0)
    longest = max(tier.itl.quantile(1.0) for tier in outcome.measures.tiers.values())
    assert longest > 0.04  # their prompts and outputs were computed again


def test_what_is_refused_counts_as_late_and_may_come_back() -> None:
    refusing = simulate(scenario(num_replicas=1), traffic(20.0, 30.0), 2000)
    _, _, refused, _ = totals(refusing)
    assert refused > 0
    patient = simulate(scenario(num_replicas=1, habits=Habits(retries=20)), traffic(20.0, 30.0), 2000)
    assert totals(patient)[2] < refused
    assert totals(patient)[0] == totals(refusing)[0]


def test_clients_that_hang_up_give_their_seats_back() -> None:
    outcome = simulate(scenario(habits=Habits(cancel_fraction=0.5, cancel_s=0.2)), traffic(3.0, 30.0), 1000)
    num_requests, failed, _, cancelled = totals(outcome)
    assert 0.1 * num_requests < cancelled <= 0.6 * num_requests
    assert failed == 0


def run_shared(slowdown: float, num_replicas: int = 2, rate: float = 4.0) -> Outcome:
    shared = SharedHost(replicas=2, slowdown=slowdown)
    return simulate(scenario(num_replicas, shared_host=shared), traffic(rate, 10.0), 1000)


def mean_gap_s(outcome: Outcome) -> float:
    tiers = outcome.measures.tiers.values()
    return sum(tier.itl.total for tier in tiers) / sum(tier.itl.count for tier in tiers)


def test_neighbours_on_a_host_slow_each_other() -> None:
    alone, shared = run_shared(0.0), run_shared(1.0)
    assert 1.2 * mean_gap_s(alone) < mean_gap_s(shared) < 2.5 * mean_gap_s(alone)
    assert 1.2 * alone.busy_s < shared.busy_s < shared.replica_s


def test_a_shared_host_slows_nobody_who_is_alone_there() -> None:
    alone = simulate(scenario(1, stretch_s=0.0), traffic(3.0, 10.0), 1000)
    shared = run_shared(1.0, 1, 3.0)
    assert (mean_gap_s(shared), shared.busy_s) == pytest.approx((mean_gap_s(alone), alone.busy_s))


def test_a_shared_host_gives_the_same_figures_for_the_same_seed() -> None:
    first, second = run_shared(0.8), run_shared(0.8)
    assert (first.num_events, first.busy_s) == (second.num_events, second.busy_s)
    assert mean_gap_s(first) == mean_gap_s(second)


def test_noise_makes_tails_longer_and_gives_the_same_figures_for_the_same_seed() -> None:
    noise = Noise(decodes=(0.5, 1.0, 1.5), prefills=(0.5, 1.0, 1.5))
    first, second = (simulate(scenario(noise=noise), traffic(4.0, 10.0), 1000) for _ in range(2))
    assert mean_gap_s(first) == mean_gap_s(second)
    plain = simulate(scenario(stretch_s=0.0), traffic(4.0, 10.0), 1000)
    assert mean_gap_s(first) == pytest.approx(mean_gap_s(plain), rel=0.1)
    spread = [
        outcome.measures.tiers[0].itl.quantile(0.9) / outcome.measures.tiers[0].itl.quantile(0.1)
        for outcome in (first, plain)
    ]
    assert spread[0] > 1.5 * spread[1]


def test_replicas_are_paid_for_while_they_live() -> None:
    outcome = run_small(seconds=20.0)
    assert outcome.replica_s == 2 * (outcome.virtual_s + outcome.started_s)
    assert 0 < outcome.busy_s < outcome.replica_s


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_memory_grows_with_live_requests_not_with_their_number() -> None:
    counts: list[int] = []

    async def serve() -> Outcome:
        loop = asyncio.get_running_loop()
        bursts = [0.0, 80.0, 160.0]
        for start_s in bursts:  # counted when nothing is open; the first one fills the prefix caches
            loop.call_at(CONNECT_S + start_s + 79.0, lambda: counts.append(num_objects()))
        arrivals = [replace(a, at_s=a.at_s + start_s) for start_s in bursts for a in traffic(3.0, 60.0)]
        last = replace(arrivals[0], at_s=240.0)
        return await World.build(scenario()).serve(iter([*arrivals, last]))

    num_requests, *_ = totals(run_in_virtual_time(serve(), 2000))
    before, after = counts[1:]
    # The step-time models still gather samples, up to a bound: fewer lists than requests.
    assert after - before < num_requests / 3
