"""Every baseline is driven by hand: what it watches is set, what it wants is compared."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.simulation.baselines import Bounds, Dynamo, Hpa, Kpa, Planned, RayDefault, TtftThreshold
from cluster.simulation.clients import Clients, Habits
from cluster.simulation.fleet import Fleet, Pace
from cluster.simulation.measures import Measures
from cluster.simulation.replica import VirtualReplica
from cluster.simulation.scaling import TICK_S, Scaler, View
from cluster.simulation.virtual_time import VirtualTimeLoop
from tests.cluster.simulation.small_world import CONFIG, PROFILE, TIERS

BOUNDS = Bounds(low=1, high=10)


class Bench:
    """A fleet whose replicas start at once, and clients that do nothing by themselves."""

    def __init__(self) -> None:
        resolved = PROFILE.resolve(CONFIG)
        self.fleet = Fleet(
            lambda epoch: VirtualReplica(resolved, PROFILE.steps, epoch), Pace(cold_start_s=0.0)
        )
        self.clients = Clients([], [], Measures(TIERS, None), Habits(), random.Random(0))
        self.fleet.start_serving(2)
        self.now = 0.0

    async def targets(self, scaler: Scaler, seconds: float) -> list[int]:
        """Ask every tick for so long; return the targets that followed."""
        found = []
        for _ in range(int(seconds / TICK_S)):
            self.fleet.set_target(scaler.decide(View(now=self.now, fleet=self.fleet, clients=self.clients)))
            found.append(self.fleet.target)
            self.now += TICK_S
            await asyncio.sleep(TICK_S)
        return found


@contextmanager
def bench() -> Iterator[tuple[asyncio.Runner, Bench]]:
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(100_000.0)) as runner:

        async def new() -> Bench:
            return Bench()

        made = runner.run(new())
        yield runner, made

        async def close() -> None:
            made.fleet.close()
            await asyncio.sleep(2.0)

        runner.run(close())


def test_rays_default_goes_up_after_its_delay_and_down_after_a_longer_one() -> None:
    with bench() as (runner, made):
        scaler = RayDefault(BOUNDS, target_ongoing=10.0)
        made.clients.num_open = 60
        up = runner.run(made.targets(scaler, 60.0))
        assert up.index(6) == int(RayDefault.UP_DELAY_S / TICK_S)
        made.clients.num_open = 10
        down = runner.run(made.targets(scaler, 700.0))
        assert down[int(590 / TICK_S)] == 6
        assert down[-1] < 6


def test_the_threshold_adds_one_for_each_late_minute_and_removes_one_when_all_is_early() -> None:
    with bench() as (runner, made):
        scaler = TtftThreshold(BOUNDS)
        made.clients.slowest_ttft = 1.5
        assert runner.run(made.targets(scaler, 60.0))[-1] == 3
        assert min(runner.run(made.targets(scaler, 230.0))) == 3
        assert runner.run(made.targets(scaler, 60.0))[-1] == 2


def test_the_hpa_tolerates_a_tenth_and_keeps_five_minutes_highest() -> None:
    with bench() as (runner, made):
        scaler = Hpa(BOUNDS, target_running=10.0)
        made.clients.num_open = 21
        assert runner.run(made.targets(scaler, 60.0))[-1] == 2
        made.clients.num_open = 50
        assert runner.run(made.targets(scaler, 60.0))[-1] == 5
        made.clients.num_open = 10
        assert runner.run(made.targets(scaler, 240.0))[-1] == 5
        assert runner.run(made.targets(scaler, 120.0))[-1] < 5


def test_knative_panics_at_twice_its_capacity() -> None:
    with bench() as (runner, made):
        scaler = Kpa(BOUNDS, target_open=10.0)
        made.clients.num_open = 10
        assert runner.run(made.targets(scaler, 60.0))[-1] == 2
        made.clients.num_open = 60
        assert runner.run(made.targets(scaler, 10.0))[-1] == 9


def test_dynamo_divides_the_last_intervals_tokens_by_its_throughputs() -> None:
    with bench() as (runner, made):
        scaler = Dynamo(BOUNDS, input_tokens_per_s=1000.0, output_tokens_per_s=100.0)
        made.clients.input_tokens, made.clients.output_tokens = 180_000, 54_000
        targets = runner.run(made.targets(scaler, 190.0))
        assert targets[int(170 / TICK_S)] == 2
        assert targets[-1] == 4  # 1 s/s of prompts and 3 s/s of outputs


def test_what_is_planned_is_followed_to_its_end() -> None:
    with bench() as (runner, made):
        assert runner.run(made.targets(Planned([1, 3, 2]), 20.0)) == [1, 3, 2, 2]
