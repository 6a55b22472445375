import pytest

from cluster.bench.fairness import FcfsQueue, VtcQueue, largest_gap, vtc_bound


@pytest.mark.parametrize(("num_routers", "num_steps"), [(1, 100_000), (3, 30_000)])
def test_the_gap_between_backlogged_tenants_keeps_the_bound_at_every_step(
    num_routers: int, num_steps: int
) -> None:
    queues = [VtcQueue() for _ in range(num_routers)]
    assert 0 < largest_gap(queues, num_steps, seed=1) <= vtc_bound(num_routers)


def test_first_come_first_served_breaks_the_bound() -> None:
    assert largest_gap([FcfsQueue()], 2_000, seed=1) > vtc_bound(1)
