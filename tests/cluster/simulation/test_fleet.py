import asyncio

from cluster.simulation.fleet import Fleet, Pace
from cluster.simulation.replica import VirtualReplica
from cluster.simulation.transport import VirtualTransport
from cluster.simulation.virtual_time import run
from replicas.api import SamplingParams
from router.backend import ReplicaBackend
from tests.cluster.simulation.small_world import CONFIG, PROFILE, seeded

COLD_START_S = 10.0


def new_fleet() -> Fleet:
    resolved = PROFILE.resolve(CONFIG)
    pace = Pace(cold_start_s=COLD_START_S, notice_s=1.0, drain_s=60.0)
    return Fleet(lambda epoch: VirtualReplica(resolved, PROFILE.steps, epoch, stretch_s=1.0), pace)


def test_a_replica_serves_after_its_cold_start() -> None:
    async def main() -> None:
        fleet = new_fleet()
        fleet.start_serving(1)
        fleet.set_target(3)
        await asyncio.sleep(COLD_START_S - 0.1)
        assert len(fleet.running) == 1
        await asyncio.sleep(0.2)
        assert len(fleet.running) == 3
        assert fleet.targets == [(0.0, 1), (0.0, 3)]
        fleet.close()

    run(main())


def test_starting_replicas_are_given_up_first() -> None:
    async def main() -> None:
        fleet = new_fleet()
        fleet.start_serving(2)
        fleet.set_target(4)
        await asyncio.sleep(1.0)
        fleet.set_target(2)
        await asyncio.sleep(2 * COLD_START_S)
        assert len(fleet.running) == len(fleet.replicas) == 2
        assert fleet.replica_s() == 2 * (1.0 + 2 * COLD_START_S) + 2 * 1.0
        fleet.close()

    run(main())


def test_a_draining_replica_ends_its_streams_before_it_goes() -> None:
    async def main() -> None:
        fleet = new_fleet()
        transport = VirtualTransport(fleet.replicas, 0.001)
        fleet.attach(transport)
        backend = ReplicaBackend(transport, router_id="r", first_epoch=1, draw=seeded(), tiers=CONFIG.tiers)
        fleet.start_serving(1)
        backend.start()
        await asyncio.sleep(2.0)
        sampling = SamplingParams(max_tokens=500, ignore_eos=True)
        generation = backend.generate(prompt_ids=(2, 3, 4), sampling=sampling)
        await asyncio.sleep(0.1)
        fleet.set_target(0)
        num_tokens = sum([len(delta.token_ids) async for delta in generation])
        assert num_tokens == 500
        assert len(fleet.replicas) == 1
        await asyncio.sleep(3.0)
        assert not fleet.replicas
        await backend.close()
        fleet.close()

    run(main())


def test_a_replica_that_died_is_replaced() -> None:
    async def main() -> None:
        fleet = new_fleet()
        fleet.start_serving(2)
        fleet.kill(fleet.running[0])
        assert len(fleet.running) == 1
        await asyncio.sleep(COLD_START_S + 0.1)
        assert fleet.running == ["replica-2", "replica-3"]
        fleet.close()

    run(main())
