"""A small simulated cluster: one router, replicas of eight seats, steps of 10 ms."""

import random
from collections.abc import Iterator

import msgspec

from cluster.config import ClusterConfig
from cluster.simulation.clients import Habits
from cluster.simulation.fleet import Pace
from cluster.simulation.profile import Noise, Profile, SharedHost, StepTimes
from cluster.simulation.traffic import Arrival, Mix, drawn
from cluster.simulation.world import Outcome, Scenario, simulate
from load.trace import Trace, TraceRow
from replicas.config import EngineConfig
from router.tenants import Tier

TIERS = (
    Tier(name="high", level=0, ttft_target_ms=1000.0, itl_target_ms=50.0),
    Tier(name="low", level=1, ttft_target_ms=5000.0),
)
CONFIG = ClusterConfig(
    engine=EngineConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024), tiers=TIERS
)
PROFILE = Profile(
    name="test",
    source="made up",
    steps=StepTimes.linear(
        step_s=0.01, new_token_s=1e-4, query_key_pair_s=1e-8, read_token_s=1e-6, sample_s=1e-4
    ),
    max_position_embeddings=1024,
    kv_bytes_per_token=1,
    kv_bytes=8192,
    block_size=16,
    cold_start_s=10.0,
)
TRACE = Trace(
    name="test",
    rows=tuple(TraceRow(float(i), 50 + 10 * i, 20 + 5 * i, (), f"client-{i % 3}") for i in range(20)),
    has_arrivals=True,
)


def traffic(rate: float, seconds: float, seed: int = 0) -> Iterator[Arrival]:
    mix = Mix(shares={0: 0.5, 1: 0.5}, max_tokens=1024, seed=seed)
    return drawn(TRACE, mix, lambda _: rate, seconds, 1.0)


def scenario(
    num_replicas: int = 2,
    kills_at_s: tuple[float, ...] = (),
    habits: Habits | None = None,
    stretch_s: float = 1.0,
    shared_host: SharedHost | None = None,
    noise: Noise | None = None,
) -> Scenario:
    return Scenario(
        config=CONFIG,
        profile=msgspec.structs.replace(PROFILE, shared_host=shared_host, noise=noise),
        num_replicas=num_replicas,
        pace=Pace(cold_start_s=PROFILE.cold_start_s),
        habits=habits or Habits(),
        kills_at_s=kills_at_s,
        stretch_s=stretch_s,
    )


def run_small(rate: float = 3.0, seconds: float = 30.0, *, stretch_s: float = 1.0) -> Outcome:
    return simulate(scenario(stretch_s=stretch_s), traffic(rate, seconds), seconds + 1000)


def seeded() -> random.Random:
    return random.Random(0)
