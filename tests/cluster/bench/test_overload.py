from cluster.bench.overload import NUM_ROUTERS, TIERS, Asked, Outcome, simulate
from cluster.simulation.virtual_time import run


def outcome(*asked: Asked) -> Outcome:
    return Outcome(asked=list(asked), num_finished=0, idle_fraction=0.0, ended_at=100.0)


def make_asked(
    at: float, ttft_s: float | None, predicted_s: float | None = None, tier: int = 0, router: int = 0
) -> Asked:
    return Asked(tier=tier, router=router, arrived_at=at, predicted_ttft_s=predicted_s, ttft_s=ttft_s)


def test_attainment_counts_refused_requests_and_leaves_out_those_too_late_to_tell() -> None:
    asked = [make_asked(1.0, 0.5), make_asked(2.0, 2.5), make_asked(3.0, None), make_asked(99.0, None)]
    assert outcome(*asked).attainment(TIERS[0]) == 1 / 3


def test_the_longest_gap_is_that_of_the_router_that_was_slowest() -> None:
    asked = [
        make_asked(float(at), 1.0, tier=2, router=router)
        for router in range(NUM_ROUTERS)
        for at in range(0, 100, 5)
    ]
    assert outcome(*asked).longest_gap_s(2) == 5.0
    asked = [a for a in asked if a.router or not 20 < a.arrived_at < 50]
    assert outcome(*asked).longest_gap_s(2) == 30.0


def test_within_twice_counts_both_sides() -> None:
    asked = [make_asked(0.0, ttft, 1.0) for ttft in (0.4, 0.6, 1.9, 2.1)]
    assert outcome(*asked).within_twice([0]) == 0.5


def test_one_seed_gives_one_outcome_and_light_load_keeps_every_promise() -> None:
    first = run(simulate(seed=1, duration_s=8.0, rate_per_s=4.0))
    again = run(simulate(seed=1, duration_s=8.0, rate_per_s=4.0))
    assert [a.ttft_s for a in first.asked] == [a.ttft_s for a in again.asked]
    assert first.attainment(TIERS[0]) == 1.0


def test_overload_leaves_no_seat_idle_and_the_top_tier_its_promise() -> None:
    saturated = run(simulate(seed=1, duration_s=20.0, rate_per_s=None))
    overloaded = run(simulate(seed=1, duration_s=30.0, rate_per_s=1.5 * saturated.num_finished / 20.0))
    assert overloaded.attainment(TIERS[0]) >= 0.99
    assert overloaded.idle_fraction < 0.02
