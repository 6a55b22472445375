"""Routers over replicas with real engines and sessions, on virtual time."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random

from cluster.simulation.profile import StepTimes
from cluster.simulation.replica import VirtualReplica
from cluster.simulation.transport import VirtualTransport
from replicas.api import SamplingParams
from replicas.config import ResolvedConfig
from router.backend import ReplicaBackend
from router.replica_generation import ReplicaGeneration
from router.tenants import DEFAULT_TIERS, Tier

STEP_S = 0.01
COST = StepTimes.linear(step_s=STEP_S)
PROMPT_TOKENS = 99


@asynccontextmanager
async def several_serving(
    num_routers: int,
    num_replicas: int,
    *,
    seats: int = 1,
    preemption: bool = True,
    tiers: Iterable[Tier] = DEFAULT_TIERS,
    delay_s: float = 0.0,
) -> AsyncIterator[tuple[list[ReplicaBackend], dict[str, VirtualReplica]]]:
    """Started routers over replicas a, b, ...; every message between them takes `delay_s`."""
    config = ResolvedConfig(
        max_model_len=1024,
        max_num_seqs=seats,
        max_num_batched_tokens=1024,
        block_size=16,
        num_blocks=256 * seats,
        preemption=preemption,
    )
    replicas = {name: VirtualReplica(config, COST, i + 1) for i, name in enumerate("abc"[:num_replicas])}
    backends = [
        ReplicaBackend(
            VirtualTransport(replicas, delay_s),
            router_id=f"r{i}",
            first_epoch=1,
            draw=Random(i),
            tiers=tiers,
        )
        for i in range(num_routers)
    ]
    tasks = [asyncio.ensure_future(replica.run()) for replica in replicas.values()]
    for backend in backends:
        backend.start()
    await asyncio.sleep(STEP_S)
    try:
        yield backends, replicas
    finally:
        for backend in backends:
            await backend.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def serving(
    num_replicas: int, preemption: bool = True
) -> AsyncIterator[tuple[ReplicaBackend, dict[str, VirtualReplica]]]:
    """One router over replicas of one seat, behind which one request may wait."""
    async with several_serving(1, num_replicas, preemption=preemption) as ((backend,), replicas):
        yield backend, replicas


def ask(backend: ReplicaBackend, max_tokens: int, tier: int = 0, tenant: str = "t") -> ReplicaGeneration:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompt = (backend.num_generations + 1,) * PROMPT_TOKENS  # nothing of it is cached
    return backend.generate(prompt_ids=prompt, sampling=sampling, tier=tier, tenant=tenant)
