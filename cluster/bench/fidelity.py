"""`headway bench fidelity`: the simulator against the real thing, on the same requests.

Arrivals are served in real time, by one bare engine or by replicas behind Ray Serve; how long steps took is
learned in that very run; then the simulator serves the same arrivals with replicas of those times. Of a bare
engine its own times are compared, of replicas those of a client over HTTP.
"""

import argparse
from collections.abc import Sequence
from typing import Final

import msgspec

from cluster.arguments import at_least_one
from cluster.bench.engine import add_model_arguments, engine_config
from cluster.bench.fidelity_engine import measure_engine
from cluster.bench.fidelity_served import measure_served
from cluster.bench.fidelity_times import Measured
from cluster.bench.report import commit, percentile, progress
from cluster.config import ClusterConfig
from cluster.simulation.fleet import Pace
from cluster.simulation.profile import Profile
from cluster.simulation.traffic import Arrival, Mix, replay
from cluster.simulation.world import Outcome, Scenario, simulate
from load.trace import cut, read_trace, rescale
from replicas.errors import ConfigError
from router.tenants import Tier

NAME = "fidelity"
HELP = "ITL, E2E and TTFT of the simulator against those of real replicas, on the same requests"

MAX_TOKENS: Final = 1024
SEATS: Final = 16
LIMIT_S: Final = 10_000.0
TIER: Final = Tier(name="all", level=0, max_queue=10_000, queue_ttl_s=3600.0)


def arrivals_of(name: str, length_factor: float, rate: float, seconds: float) -> list[Arrival]:
    """Return the beginning of a trace, its time stretched to this rate; no prompts share a prefix.

    Raises LoadError, TraceError.
    """
    trace = read_trace(name)
    if not trace.rate:
        raise ConfigError(f"{name} does not say when its requests came")
    trace = rescale(trace, rate_factor=rate / trace.rate, length_factor=length_factor)
    trace = cut(trace, duration_s=seconds, max_total_tokens=None)
    rows = tuple(msgspec.structs.replace(row, blocks=()) for row in trace.rows)
    mix = Mix(shares={TIER.level: 1.0}, max_tokens=MAX_TOKENS, seed=0)
    return list(replay(msgspec.structs.replace(trace, rows=rows), mix))


def simulated(profile: Profile, config: ClusterConfig, arrivals: Sequence[Arrival], seed: int) -> Outcome:
    """Serve the arrivals with virtual replicas. Messages take no time: what they take is added afterwards."""
    scenario = Scenario(
        config=config,
        profile=profile,
        num_replicas=config.replicas,
        pace=Pace(cold_start_s=0.0),
        delay_s=0.0,
        seed=seed,
    )
    return simulate(scenario, iter(arrivals), LIMIT_S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--replicas", type=at_least_one, metavar="N", help="behind Ray Serve, instead of one bare engine"
    )
    parser.add_argument("--trace", default="azure2023-conv")
    parser.add_argument("--length-factor", type=float, default=0.1, help="of the trace's lengths (0.1)")
    parser.add_argument(
        "--rate", type=float, default=0.5, help="requests/s to which the trace is stretched (default 0.5)"
    )
    parser.add_argument("--seconds", type=float, help="of arrivals (default: 30, or 600 with --replicas)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and routers")


def run(args: argparse.Namespace) -> dict[str, object]:
    engine = msgspec.structs.replace(
        engine_config(args, SEATS), max_model_len=MAX_TOKENS, max_num_batched_tokens=512
    )
    config = ClusterConfig(engine=engine, replicas=args.replicas or 1, tiers=(TIER,))
    seconds = args.seconds or (600 if args.replicas else 30)
    arrivals = arrivals_of(args.trace, args.length_factor, args.rate, seconds)
    if args.replicas:
        measured = measure_served(config, arrivals, args.seed)
    else:
        measured = measure_engine(engine, arrivals)
    progress(f"served {len(arrivals)} requests; now the simulator")
    outcome = simulated(measured.profile, config, arrivals, args.seed)
    return {
        **compared(measured, outcome),
        "requests": len(arrivals),
        "gaps": len(measured.times.gaps_s),
        "replicas": args.replicas,
        "rate": args.rate,
        "seconds": seconds,
        "seed": args.seed,
        "commit": commit(),
        **measured.facts,
    }


def compared(measured: Measured, outcome: Outcome) -> dict[str, object]:
    """Return the figures of both sides, milliseconds, and by how much the simulator is off."""
    real, virtual, delay_s = measured.times, outcome.measures.tiers[TIER.level], measured.delay_s
    figures = {
        "itl_ms_p50": (percentile(real.gaps_s, 50), virtual.itl.quantile(0.5)),
        "itl_ms_p99": (percentile(real.gaps_s, 99), virtual.itl.quantile(0.99)),
        "e2e_ms_p50": (percentile(real.e2e_s, 50), virtual.e2e.quantile(0.5) + delay_s),
        "ttft_ms_p50": (percentile(real.ttft_s, 50), virtual.ttft.quantile(0.5) + delay_s),
        "ttft_ms_p99": (percentile(real.ttft_s, 99), virtual.ttft.quantile(0.99) + delay_s),
    }
    return {
        "error_fraction": {name: found / true - 1 for name, (true, found) in figures.items()},
        "real": {name: true * 1e3 for name, (true, _) in figures.items()},
        "simulator": {name: found * 1e3 for name, (_, found) in figures.items()},
    }
