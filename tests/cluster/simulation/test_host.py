import asyncio

import pytest

from cluster.simulation.host import Host, Hosts
from cluster.simulation.replica import VirtualReplica
from cluster.simulation.virtual_time import run
from tests.cluster.simulation.small_world import CONFIG, PROFILE


def ends(host: Host, *steps: tuple[float, float]) -> list[float]:
    """When steps end that begin at these times and take so long alone."""

    async def one(starts_at: float, alone_s: float) -> float:
        await asyncio.sleep(starts_at)
        await host.work(alone_s)
        return asyncio.get_running_loop().time()

    async def all_of_them() -> list[float]:
        return list(await asyncio.gather(*(one(*step) for step in steps)))

    return run(all_of_them())


def test_a_step_without_neighbours_takes_its_time() -> None:
    assert ends(Host(2, slowdown=1.0), (0.0, 1.0), (1.0, 2.0)) == pytest.approx([1.0, 3.0])


def test_a_step_is_slowed_while_a_neighbour_works_and_only_then() -> None:
    # Half of the first step is done when the second begins; the other halves take twice as long.
    assert ends(Host(2, slowdown=1.0), (0.0, 1.0), (0.5, 1.0)) == pytest.approx([1.5, 2.0])


def test_every_further_neighbour_slows_as_much() -> None:
    assert ends(Host(3, slowdown=0.5), *[(0.0, 1.0)] * 3) == pytest.approx([2.0] * 3)


def test_neighbours_that_do_not_slow_change_nothing() -> None:
    assert ends(Host(2, slowdown=0.0), (0.0, 1.0), (0.5, 1.0)) == pytest.approx([1.0, 1.5])


def test_it_says_how_long_a_step_would_take_that_begins_now() -> None:
    host = Host(3, slowdown=0.5)

    async def factors() -> list[float]:
        found = [host.factor()]
        for _ in range(2):
            step = asyncio.create_task(host.work(1.0))
            await asyncio.sleep(0.1)
            found.append(host.factor())
        await step
        return [*found, host.factor()]

    assert run(factors()) == [1.0, 1.5, 2.0, 1.0]


def test_hosts_are_filled_one_after_the_other_and_seats_given_back_are_taken_first() -> None:
    hosts = Hosts(2, slowdown=1.0)
    first, second, third = (hosts.take_seat() for _ in range(3))
    assert first is second
    assert third is not first
    second.num_free += 1
    assert hosts.take_seat() is first
    assert hosts.take_seat() is third


def test_a_replica_that_dies_gives_its_seat_back() -> None:
    host = Hosts(2, slowdown=1.0).take_seat()

    async def live_and_die() -> None:
        replica = VirtualReplica(PROFILE.resolve(CONFIG), PROFILE.steps, 1, host=host)
        life = asyncio.create_task(replica.run())
        await asyncio.sleep(0.1)
        replica.die()
        await life

    run(live_and_die())
    assert host.num_free == 2
