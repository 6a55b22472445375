import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscaling import Code, Decision, Observation, ReplicaReport, State, decide
from cluster.autoscaling_policy import Policy
from router.counters import ITL_EDGES_MS, RouterCounters, TierCounters
from router.tenants import Tier
from tests.cluster.scaling_world import SPEED, TIER, World, num_turns, world

POLICY = Policy(max_replicas=20, tiers=(TIER,))


def codes(decision: Decision) -> set[Code]:
    return {reason.code for reason in decision.reasons}


@settings(deadline=None, max_examples=30)
@given(percent=st.integers(min_value=10, max_value=150), base=st.sampled_from([1, 2, 4]))
def test_constant_load_never_makes_it_turn(percent: int, base: int) -> None:
    made = world()
    made.target = made.running = base
    made.run(percent / 100, 1800)
    # A replica too many may go once; nothing comes and goes, or goes and comes.
    assert num_turns(made.targets) == 0
    assert len(set(made.targets[-120:])) == 1
    assert made.targets[-1] >= math.ceil(percent / 100 / POLICY.utilisation)


@settings(deadline=None, max_examples=30)
@given(
    percent=st.integers(min_value=10, max_value=150),
    base=st.sampled_from([1, 2, 4]),
    seed=st.integers(min_value=0, max_value=999),
)
def test_random_arrivals_of_a_constant_rate_make_it_turn_once_at_most(
    percent: int, base: int, seed: int
) -> None:
    made = world()
    made.target = made.running = base
    made.run_random(percent / 100, 1800, Random(seed))
    assert num_turns(made.targets) <= 1  # a burst may call one more; it is not sent away and called again


def test_a_jump_in_demand_is_answered_at_once_and_twofold_at_most() -> None:
    made = world(max_replicas=20)
    made.run(0.5, 60)
    decisions = made.run(8.0, 60)
    assert [decision.target for decision in decisions[:3]] == [2, 2, 2]
    assert Code.LIMIT in codes(decisions[0])
    assert max(made.targets) == 2
    made.run(8.0, 300)
    assert made.targets[-1] >= 10
    assert made.running == made.targets[-1]


def test_starting_replicas_count() -> None:
    made = world()
    made.run(0.5, 60)
    targets = [decision.target for decision in made.run(1.5, 50)]
    assert set(targets[5:]) == {2}  # 1.5 / 0.85 are two: the second one starts, a third is not asked for


def test_it_goes_down_one_at_a_time_after_the_delay() -> None:
    made = world(max_replicas=10)
    made.target = made.running = 5
    made.run(0.3, 900)
    steps = [b - a for a, b in itertools.pairwise(made.targets)]
    assert set(steps) == {0, -1}
    assert made.targets[0] == 5
    first = next(i for i, target in enumerate(made.targets) if target < 5)
    assert first * made.interval_s == pytest.approx(5 * made.cold_start_s, abs=2 * made.interval_s)
    assert made.targets[-1] == 1


def test_none_goes_when_the_others_could_not_bear_it() -> None:
    made = world()
    made.target = made.running = 2
    decisions = made.run(0.7, 1200)  # 0.7 / 0.85 is less than one replica, but not with a margin
    assert set(made.targets) == {2}
    assert codes(decisions[-1]) == {Code.STEADY}


def test_the_last_replica_goes_without_work_only() -> None:
    made = world(min_replicas=0)
    made.run(0.05, 900)
    assert made.targets[-1] == 1
    made.run(0.0, 900)
    assert made.targets[-1] == 0


def test_no_traffic_is_data_and_no_data_is_not_no_traffic() -> None:
    made = world(max_replicas=4)
    made.target = made.running = 3
    made.run(0.0, 900)
    assert made.targets[-1] == 1
    state, now = State(), 0.0
    for _ in range(200):
        now += 5.0
        decision = decide(Observation(target=3, running=3), state, POLICY, now)
        state = decision.state
        assert (decision.target, codes(decision)) == (3, {Code.NO_DATA})


def test_the_minimum_holds_without_data() -> None:
    policy = Policy(min_replicas=2, max_replicas=4)
    decision = decide(Observation(target=0, running=0), State(), policy, 0.0)
    assert decision.target == 2
    assert codes(decision) == {Code.NO_DATA, Code.MINIMUM}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["input_tokens_per_s", "num_running", "kv_wanted_tokens", "cold_start_s"])
def test_a_replica_that_reports_garbage_changes_nothing_and_is_named(field: str, value: float) -> None:
    made = world(max_replicas=4)
    made.target = made.running = 2
    made.run(0.6, 60)
    made.now += 5.0
    seen = made.observe()
    broken = replace(seen.replicas[0], **{field: value})
    seen = replace(seen, replicas=(broken, *seen.replicas[1:]))
    decision = decide(seen, made.state, made.policy, made.now)
    assert decision.target == 2
    assert {Code.GARBAGE, Code.SILENT} <= codes(decision)
    assert any("r0" in reason.text and field in reason.text for reason in decision.reasons)


def test_a_router_that_reports_garbage_is_not_believed() -> None:
    report = RouterCounters("router", 1, 1, (TierCounters(0, num_requests=-5),))
    decision = decide(Observation(target=2, running=2, routers=(report,)), State(), POLICY, 0.0)
    assert decision.target == 2
    assert codes(decision) == {Code.GARBAGE, Code.NO_DATA}


@pytest.mark.parametrize("jump_s", [-3600.0, -1.0, 3600.0])
def test_a_clock_that_jumps_holds_and_begins_anew(jump_s: float) -> None:
    made = world()
    made.target = made.running = 3
    made.run(0.2, 280)  # soon one may go
    made.now += jump_s - made.interval_s
    assert codes(made.tick(0.2)) == {Code.CLOCK}
    made.run(0.2, 290)
    assert set(made.targets) == {3}
    made.run(0.2, 20)
    assert made.targets[-1] == 2


def test_a_silent_router_keeps_what_there_is() -> None:
    made = world()
    made.target = made.running = 3
    made.run(0.2, 150)
    last = made.observe()
    for _ in range(6):
        made.now += 5.0
        decision = decide(last, made.state, made.policy, made.now)
        made.state = decision.state
        assert decision.target == 3
    assert Code.SILENT in codes(decision)


def itl_counters(number: int, share_over: float) -> RouterCounters:
    """2,000 gaps per report, some of them over 50 ms."""
    counts = [0] * (len(ITL_EDGES_MS) + 1)
    counts[ITL_EDGES_MS.index(20.0)] = round(2000 * number * (1 - share_over))
    counts[ITL_EDGES_MS.index(100.0)] = round(2000 * number * share_over)
    return RouterCounters("router", 1, number, (TierCounters(0, itl=tuple(counts)),))


def run_itl(share_over: float, *, is_at_floor: bool, num_running: float) -> Decision:
    policy = Policy(max_replicas=9, tiers=(Tier(name="t", level=0, itl_target_ms=50.0),))
    report = ReplicaReport(replica="r0", max_batch=8, num_running=num_running, is_at_floor=is_at_floor)
    state = State()
    for number in range(1, 20):
        reports = tuple(replace(report, replica=f"r{i}") for i in range(2))
        observation = Observation(
            target=2, running=2, routers=(itl_counters(number, share_over),), replicas=reports
        )
        decision = decide(observation, state, policy, 5.0 * number)
        state = decision.state
    return decision


def test_gaps_over_the_target_ask_for_replicas_once_the_chunk_is_at_its_floor() -> None:
    decision = run_itl(0.02, is_at_floor=True, num_running=12)
    assert decision.target == 3  # 24 sequences over 8
    assert codes(decision) == {Code.VIOLATION, Code.ITL}
    assert run_itl(0.005, is_at_floor=True, num_running=12).target == 2
    chunking = run_itl(0.02, is_at_floor=False, num_running=12)
    assert (chunking.target, Code.VIOLATION in codes(chunking)) == (2, True)


def test_a_promise_that_no_number_can_keep_holds_no_replica() -> None:
    policy = Policy(
        max_replicas=9, downscale_delay_s=30, tiers=(Tier(name="t", level=0, itl_target_ms=50.0),)
    )
    state, target = State(), 3
    for number in range(1, 60):
        reports = tuple(
            ReplicaReport(replica=f"r{i}", max_batch=1, step_s=0.08, is_at_floor=True) for i in range(target)
        )
        routers = (itl_counters(number, 0.9),)
        observation = Observation(target=target, running=target, routers=routers, replicas=reports)
        decision = decide(observation, state, policy, 5.0 * number)
        state, target = decision.state, decision.target
    assert target == 1


def test_kv_that_is_wanted_for_long_asks_for_replicas() -> None:
    report = ReplicaReport(replica="r0", kv_tokens=1000, kv_wanted_tokens=2500)
    state = State()
    for number in range(1, 5):
        routers = (RouterCounters("router", 1, number),)
        observation = Observation(target=1, running=1, routers=routers, replicas=(report,))
        decision = decide(observation, state, replace_max(POLICY, 3), 5.0 * number)
        state = decision.state
    assert (decision.target, codes(decision)) == (2, {Code.KV, Code.LIMIT})


def replace_max(policy: Policy, number: int) -> Policy:
    return Policy(max_replicas=number, tiers=policy.tiers)


def test_an_impossible_promise_is_reported_once_with_the_number() -> None:
    tiers = (Tier(name="fast", level=0, ttft_target_ms=500.0, itl_target_ms=20.0),)
    policy = Policy(max_replicas=9, tiers=tiers)
    report = ReplicaReport(replica="r0", input_tokens_per_s=SPEED, step_s=0.035, max_batch=1)
    state, texts = State(), []
    for number in range(1, 30):
        tier = TierCounters(0, num_requests=10 * number, input_tokens=10 * number * 1300)
        observation = Observation(
            target=9, running=1, routers=(RouterCounters("x", 1, number, (tier,)),), replicas=(report,)
        )
        decision = decide(observation, state, policy, 5.0 * number)
        state = decision.state
        texts += [reason.text for reason in decision.reasons if reason.code is Code.INFEASIBLE]
    assert len(texts) == 2
    assert "20 ms" in texts[0]
    assert "35.0 ms" in texts[0]
    assert "500 ms" in texts[1]
    assert "1300 ms" in texts[1]


def test_tiers_without_a_target_ask_for_nothing_by_waiting() -> None:
    tiers = (TIER, Tier(name="batch", level=1))
    report = ReplicaReport(replica="r0", input_tokens_per_s=SPEED)

    def run(level: int) -> int:
        state = State()
        for number in range(1, 6):
            waiting = TierCounters(level, queued_input_tokens=3500)
            observation = Observation(
                target=1,
                running=1,
                routers=(RouterCounters("x", 1, number, (waiting,)),),
                replicas=(report,),
            )
            decision = decide(observation, state, Policy(max_replicas=9, tiers=tiers), 5.0 * number)
            state = decision.state
        return decision.target

    assert (run(0), run(1)) == (2, 1)


def refuse(made: World, seconds: float, share: float, load: float = 0.5) -> list[Decision]:
    """A demand of so much of a replica's time, of which a share is refused: bursts, unseen in the mean."""
    decisions = []
    for _ in range(round(seconds / made.interval_s)):
        before = made.counters
        made.now += made.interval_s
        made.counters = TierCounters(
            0,
            num_requests=before.num_requests + 100,
            num_rejected=before.num_rejected + round(100 * share),
            input_tokens=before.input_tokens + round(load * SPEED * made.interval_s),
        )
        decision = decide(made.observe(), made.state, made.policy, made.now)
        made.state = decision.state
        made.target = made.running = decision.target
        decisions.append(decision)
    return decisions


def test_refusals_ask_for_one_more_and_are_remembered() -> None:
    made = world(downscale_delay_s=60)
    decisions = refuse(made, 60, 0.05)
    (up,) = (decision for decision in decisions if Code.RATE in codes(decision))
    assert (up.target, Code.VIOLATION in codes(up)) == (2, True)
    assert any("2.00 times for bursts" in reason.text for reason in up.reasons)
    refuse(made, 600, 0.0)
    assert made.target == 2  # without a memory it would go, and come back with the next burst
    refuse(made, 2 * 3600, 0.0)
    assert made.target == 1


def test_refusals_with_little_work_are_no_lack_of_replicas() -> None:
    made = world()
    assert {decision.target for decision in refuse(made, 600, 0.05, load=0.2)} == {1}
