"""World: routers, replicas and clients on one virtual clock, and what came of a run."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cluster.config import ClusterConfig
from cluster.simulation.clients import Clients, Habits
from cluster.simulation.fleet import Fleet, Pace
from cluster.simulation.host import Hosts
from cluster.simulation.measures import Measures
from cluster.simulation.profile import Profile
from cluster.simulation.replica import VirtualReplica
from cluster.simulation.scaling import Scaler, control
from cluster.simulation.traffic import Arrival
from cluster.simulation.transport import VirtualTransport
from cluster.simulation.virtual_time import VirtualTimeLoop
from cluster.simulation.virtual_time import run as run_in_virtual_time
from router.backend import ReplicaBackend
from router.measures import RouterMeasures

CONNECT_S: Final = 2.5
"""Before the first request: routers have found the replicas and heard from each."""
TAIL_S: Final = 300.0
"""Longest wait for the answers that are open when no more requests come."""
STRETCH_S: Final = 1.0
"""Routers hear of tokens at least so often."""
DELAY_S: Final = 0.001
"""Of every message between a router and a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated."""

    config: ClusterConfig
    profile: Profile
    num_replicas: int
    """At the beginning."""
    pace: Pace
    habits: Habits = field(default_factory=Habits)
    kills_at_s: tuple[float, ...] = ()
    """At each of these moments a replica drawn at random dies."""
    delay_s: float = DELAY_S
    stretch_s: float = STRETCH_S
    """Decode steps are taken together up to so many seconds of them; 0 = each for itself."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it."""

    measures: Measures
    virtual_s: float
    """From the first moment at which requests may come to the last answer."""
    started_s: float
    """When that was."""
    traffic_s: float
    """Until the last request came."""
    wall_s: float
    cpu_s: float
    """Processor time: what wall_s would be on a core of its own."""
    num_events: int
    """Rounds of the event loop."""
    num_steps: int
    """Of all engines, those of replicas that have died left out."""
    replica_s: float
    busy_s: float
    mean_open: float
    """Requests that were open at a time, counted as they came and went."""
    targets: list[tuple[float, int]]
    """Seconds and number of replicas wanted from then on."""


@dataclass(slots=True, eq=False)
class World:
    """Everything on the running loop."""

    scenario: Scenario
    measures: Measures
    fleet: Fleet
    clients: Clients
    draw: random.Random
    routers: list[ReplicaBackend]
    counts: list[RouterMeasures]
    """Of each router."""

    @classmethod
    def build(cls, scenario: Scenario) -> "World":
        config, profile = scenario.config, scenario.profile
        resolved = profile.resolve(config)
        measures = Measures(config.tiers, config.engine.itl_target_ms)
        draw = random.Random(f"{scenario.seed}/world")
        routers: list[ReplicaBackend] = []
        counts = [RouterMeasures(config.tiers) for _ in range(config.router.replicas)]
        clients = Clients(routers, counts, measures, scenario.habits, draw)
        shared = profile.shared_host
        hosts = None if shared is None else Hosts(shared.replicas, shared.slowdown)

        def make(epoch: int) -> VirtualReplica:
            noise, source = profile.noise, random.Random(f"{scenario.seed}/noise-{epoch}")
            return VirtualReplica(
                resolved,
                profile.steps,
                epoch,
                gaps=clients.gaps,
                stretch_s=scenario.stretch_s,
                host=None if hosts is None else hosts.take_seat(),
                noise=None if noise is None else lambda shape: noise.draw(shape, source),
            )

        fleet = Fleet(make, scenario.pace)
        for i in range(config.router.replicas):
            transport = VirtualTransport(fleet.replicas, scenario.delay_s)
            fleet.attach(transport)
            backend = ReplicaBackend(
                transport,
                router_id=f"router-{i}",
                first_epoch=1,
                draw=random.Random(f"{scenario.seed}/router-{i}"),
                tiers=config.tiers,
                measures=counts[i],
            )
            routers.append(backend)
        return cls(scenario, measures, fleet, clients, draw, routers, counts)

    async def serve(self, arrivals: Iterator[Arrival], scaler: Scaler | None = None) -> Outcome:
        """See all arrivals through; without a scaler the number of replicas stays."""
        started_at, cpu_at = time.perf_counter(), time.process_time()
        loop = asyncio.get_running_loop()
        self.fleet.start_serving(self.scenario.num_replicas)
        for router in self.routers:
            router.start()
        await asyncio.sleep(CONNECT_S)
        scaling = None if scaler is None else loop.create_task(control(scaler, self.fleet, self.clients))
        for at_s in self.scenario.kills_at_s:
            loop.call_at(CONNECT_S + at_s, self._kill_one)
        asked: set[asyncio.Task[None]] = set()
        for arrival in arrivals:
            await asyncio.sleep(CONNECT_S + arrival.at_s - loop.time())
            task = loop.create_task(self.clients.ask(arrival))
            asked.add(task)
            task.add_done_callback(asked.discard)
        traffic_s = loop.time() - CONNECT_S
        if asked:
            await asyncio.wait(asked, timeout=TAIL_S)
        if scaling is not None:
            scaling.cancel()
        virtual_s, replica_s = loop.time() - CONNECT_S, self.fleet.replica_s()
        num_steps = sum(r.engine.counters.steps for r in self.fleet.replicas.values())
        busy_s = self.fleet.busy_s + sum(r.busy_s for r in self.fleet.replicas.values())
        for router in self.routers:
            await router.close()
        self.fleet.close()
        return Outcome(
            measures=self.measures,
            virtual_s=virtual_s,
            started_s=CONNECT_S,
            traffic_s=traffic_s,
            wall_s=time.perf_counter() - started_at,
            cpu_s=time.process_time() - cpu_at,
            num_events=loop.num_turns if isinstance(loop, VirtualTimeLoop) else 0,
            num_steps=num_steps,
            replica_s=replica_s,
            busy_s=busy_s,
            mean_open=self.clients.open_s / virtual_s,
            targets=self.fleet.targets,
        )

    def _kill_one(self) -> None:
        running = self.fleet.running
        if running:
            self.fleet.kill(self.draw.choice(running))


def simulate(
    scenario: Scenario, arrivals: Iterator[Arrival], limit_s: float, scaler: Scaler | None = None
) -> Outcome:
    """Run a scenario; `limit_s`: virtual seconds after which something must have gone wrong."""

    async def run() -> Outcome:
        return await World.build(scenario).serve(arrivals, scaler)

    return run_in_virtual_time(run(), limit_s)
