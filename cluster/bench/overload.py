"""`headway bench overload`: what tiers get when more is asked than there is, in virtual time.

Production routers (admission, dispatch, credits, fairness) over production engines whose runner only says
how long a step takes. Three runs: saturated, which measures the capacity; light, the standard to which
the top tier is held; and overloaded. The same seed gives the same figures on any machine.
"""

import argparse
import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster import itl_targets
from cluster.bench.report import commit, percentile, progress
from cluster.bench.workload import LognormalLengths, random_prompt
from cluster.simulation.profile import StepTimes
from cluster.simulation.replica import VOCAB_SIZE, VirtualReplica
from cluster.simulation.transport import VirtualTransport
from cluster.simulation.virtual_time import run as run_in_virtual_time
from replicas.api import SamplingParams
from replicas.config import ResolvedConfig
from router.backend import ReplicaBackend
from router.errors import ApiError
from router.tenants import Tier

NAME = "overload"
HELP = "what each tier gets at 1.5 times the capacity, in virtual time over the production code"

NUM_ROUTERS: Final = 2
NUM_REPLICAS: Final = 2
SEATS: Final = 16
AGING_S: Final = 10.0
DELAY_S: Final = 0.001
"""Of every message between a router and a replica."""
SATURATED_S: Final = 120.0
LIGHT_S: Final = 180.0
CONNECT_S: Final = 1.5
"""Before the first request: connections open, and every replica has been pinged once."""
COST: Final = StepTimes.linear(
    step_s=0.02, new_token_s=6e-4, query_key_pair_s=8.6e-7, read_token_s=1.05e-5, sample_s=0.0
)
"""What the engine's own step-time model had learned after `headway bench engine --requests 40 --concurrency
16 --input-tokens 200 --output-tokens 60`: the bundled model in int8 on two cores, made linear in the new
tokens (within 12% of it from 1 to 512 of them)."""
TIERS: Final = (
    Tier(name="interactive", level=0, ttft_target_ms=2_000.0, itl_target_ms=400.0, aging_s=AGING_S),
    Tier(name="standard", level=1, ttft_target_ms=10_000.0, itl_target_ms=400.0, aging_s=AGING_S),
    Tier(name="batch", level=2, queue_ttl_s=600.0, aging_s=AGING_S),
)
SHARES: Final = (0.2, 0.6, 0.2)
"""Of the requests, by tier: at 1.5 times the capacity the upper two alone are more than it."""
INPUT: Final = LognormalLengths(median=200, sigma=0.8, longest=1500)
OUTPUT: Final = LognormalLengths(median=60, sigma=0.7, longest=300)
CONFIG: Final = ResolvedConfig(
    max_model_len=2048,
    max_num_seqs=SEATS,
    max_num_batched_tokens=1024,
    block_size=16,
    num_blocks=SEATS * 2048 // 16,
    aging_s=AGING_S,
    tier_itl_target_ms=itl_targets.promised(TIERS),
)


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """One request and what came of it."""

    tier: int
    router: int
    arrived_at: float
    predicted_ttft_s: float | None = None
    ttft_s: float | None = None
    """None = refused, or still waiting when the run ended."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A run."""

    asked: list[Asked]
    num_finished: int
    idle_fraction: float
    """Of the seat time during which some request waited in a router; NaN if none ever did."""
    ended_at: float

    def attainment(self, tier: Tier) -> float:
        """Share of a tier's requests, refused ones included, whose first token came in time.

        Those that arrived too late for the run to tell are left out.
        """
        assert tier.ttft_target_ms is not None, f"tier {tier.name} promises nothing"
        target_s = tier.ttft_target_ms / 1e3
        judged = [a for a in self.asked if a.tier == tier.level and a.arrived_at < self.ended_at - target_s]
        return sum(a.ttft_s is not None and a.ttft_s <= target_s for a in judged) / len(judged)

    def longest_gap_s(self, tier: int) -> float:
        """Longest time in which a router brought no first token of a tier that had requests there."""
        gaps = []
        for router in range(NUM_ROUTERS):
            mine = [a for a in self.asked if (a.tier, a.router) == (tier, router)]
            begun = sorted(a.arrived_at + a.ttft_s for a in mine if a.ttft_s is not None)
            instants = [min(a.arrived_at for a in mine), *begun, self.ended_at]
            gaps += [later - earlier for earlier, later in itertools.pairwise(instants)]
        return max(gaps)

    def within_twice(self, tiers: Iterable[int]) -> float:
        """Share of the first tokens that came within half and twice the time predicted on arrival."""
        ratios = [
            a.ttft_s / a.predicted_ttft_s
            for a in self.asked
            if a.tier in tiers and a.ttft_s is not None and a.predicted_ttft_s
        ]
        return sum(0.5 <= ratio <= 2.0 for ratio in ratios) / len(ratios)


@dataclass(slots=True, eq=False)
class Cluster:
    """Routers and replicas on the running loop, and the clients' side of it."""

    draw: random.Random
    backends: list[ReplicaBackend] = field(default_factory=list)
    replicas: dict[str, VirtualReplica] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    num_finished: int = 0

    def is_wanted(self) -> bool:
        """Some request waits in a router."""
        return any(backend.num_waiting for backend in self.backends)

    async def ask(self, tier: int) -> None:
        """Send one request and read all that comes."""
        router = self.draw.randrange(NUM_ROUTERS)
        asked = Asked(tier=tier, router=router, arrived_at=asyncio.get_running_loop().time())
        self.asked.append(asked)
        sampling = SamplingParams(max_tokens=OUTPUT.draw(self.draw), ignore_eos=True)
        prompt = random_prompt(INPUT.draw(self.draw), VOCAB_SIZE, self.draw)
        tenant = f"tenant-{self.draw.randrange(3)}"
        try:
            generation = self.backends[router].generate(
                prompt_ids=prompt, sampling=sampling, tier=tier, tenant=tenant
            )
        except ApiError:
            return
        asked.predicted_ttft_s = generation.predicted_ttft_s
        async for delta in generation:
            if asked.ttft_s is None and delta.token_ids:
                asked.ttft_s = asyncio.get_running_loop().time() - asked.arrived_at
            self.num_finished += delta.finish_reason is not None and delta.error is None


async def simulate(seed: int, duration_s: float, rate_per_s: float | None) -> Outcome:
    """Serve `duration_s` of Poisson arrivals; without a rate, keep a queue of the lowest tier instead."""
    cluster = _new_cluster(seed)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(replica.run()) for replica in cluster.replicas.values()]
        for backend in cluster.backends:
            backend.start()
        await asyncio.sleep(CONNECT_S)
        until = loop.time() + duration_s
        if rate_per_s is None:
            clients = 4 * NUM_REPLICAS * SEATS
            tasks += [group.create_task(_ask_until(cluster, until)) for _ in range(clients)]
            await asyncio.sleep(duration_s)
        else:
            async for tier in _arrivals(cluster.draw, rate_per_s, until):
                tasks.append(group.create_task(cluster.ask(tier)))
        ended_at = loop.time()
        for task in tasks:
            task.cancel()
    for backend in cluster.backends:
        await backend.close()
    wanted_s = sum(replica.wanted_seat_s for replica in cluster.replicas.values())
    idle_s = sum(replica.idle_seat_s for replica in cluster.replicas.values())
    return Outcome(
        asked=cluster.asked,
        num_finished=cluster.num_finished,
        idle_fraction=idle_s / wanted_s if wanted_s else math.nan,
        ended_at=ended_at,
    )


def _new_cluster(seed: int) -> Cluster:
    cluster = Cluster(random.Random(seed))
    for i in range(NUM_REPLICAS):
        cluster.replicas[f"replica-{i}"] = VirtualReplica(CONFIG, COST, i + 1, cluster.is_wanted)
    transport = VirtualTransport(cluster.replicas, DELAY_S)
    for i in range(NUM_ROUTERS):
        backend = ReplicaBackend(
            transport, router_id=f"router-{i}", first_epoch=1, draw=random.Random(seed + i), tiers=TIERS
        )
        cluster.backends.append(backend)
    return cluster


async def _ask_until(cluster: Cluster, until: float) -> None:
    while asyncio.get_running_loop().time() < until:
        await cluster.ask(TIERS[-1].level)


async def _arrivals(draw: random.Random, rate_per_s: float, until: float) -> AsyncIterator[int]:
    """Yield the tier of each request when it arrives."""
    levels = [tier.level for tier in TIERS]
    while asyncio.get_running_loop().time() < until:
        await asyncio.sleep(draw.expovariate(rate_per_s))
        yield draw.choices(levels, SHARES)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overload", type=float, default=1.5, help="load over capacity (default 1.5)")
    parser.add_argument("--seconds", type=float, default=300.0, help="of overload, virtual (default 300)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    limit_s = args.seconds + 300.0

    def outcome(duration_s: float, rate_per_s: float | None) -> Outcome:
        return run_in_virtual_time(simulate(args.seed, duration_s, rate_per_s), limit_s)

    saturated = outcome(SATURATED_S, None)
    capacity_rps = saturated.num_finished / SATURATED_S
    progress(f"capacity: {capacity_rps:.2f} requests/s")
    light = outcome(LIGHT_S, 0.4 * capacity_rps)
    overloaded = outcome(args.seconds, args.overload * capacity_rps)
    top, middle, lowest = TIERS
    levels = [tier.level for tier in TIERS]
    report: dict[str, object] = {
        "capacity_rps": capacity_rps,
        "overload": args.overload,
        "requests": len(overloaded.asked),
        "refused_or_unserved_fraction": sum(a.ttft_s is None for a in overloaded.asked)
        / len(overloaded.asked),
        "top_attainment_light": light.attainment(top),
        "top_attainment_overload": overloaded.attainment(top),
        "middle_attainment_light": light.attainment(middle),
        "middle_attainment_overload": overloaded.attainment(middle),
        "lowest_longest_gap_s": overloaded.longest_gap_s(lowest.level),
        "lowest_aging_bound_s": lowest.level * AGING_S,
        "ttft_within_2x_fraction": overloaded.within_twice(levels),
        "ttft_within_2x_fraction_light": light.within_twice(levels),
    }
    for tier in TIERS:
        first = [a.ttft_s for a in overloaded.asked if a.tier == tier.level and a.ttft_s is not None]
        report[f"{tier.name}_ttft_within_2x_fraction"] = overloaded.within_twice([tier.level])
        report[f"{tier.name}_ttft_s_p50"] = percentile(first, 50)
        report[f"{tier.name}_ttft_s_p99"] = percentile(first, 99)
    return report | {
        "seats_idle_fraction": overloaded.idle_fraction,
        "seats_idle_fraction_saturated": saturated.idle_fraction,
        "routers": NUM_ROUTERS,
        "replicas": NUM_REPLICAS,
        "seats": SEATS,
        "virtual_s": SATURATED_S + LIGHT_S + args.seconds,
        "seed": args.seed,
        "commit": commit(),
    }
