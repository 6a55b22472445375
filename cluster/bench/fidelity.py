"""`headway bench fidelity`: the simulator against the engine it simulates, on the same requests.

The engine serves arrivals in real time; its step times are learned in that very run; then the simulator
serves the same arrivals with a replica of those times. What is compared are the engine's own times, so the
simulator's messages take no time here.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cluster.arguments import at_least_one
from cluster.bench.engine import add_model_arguments, engine_config, identity, new_engine, warm_up
from cluster.bench.report import percentile, progress
from cluster.bench.step_log import StepLog
from cluster.bench.steps import deviations, fitted_profile
from cluster.bench.workload import fixed_length_request
from cluster.config import ClusterConfig
from cluster.simulation.fleet import Pace
from cluster.simulation.profile import Profile
from cluster.simulation.traffic import Arrival, Mix, drawn
from cluster.simulation.world import Outcome, Scenario, simulate
from load.trace import read_trace, rescale
from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.startup import open_runner
from router.tenants import Tier

NAME = "fidelity"
HELP = "ITL, E2E and TTFT of the simulator against those of the real engine, on the same requests"

MAX_TOKENS: Final = 1024
SEATS: Final = 16
LIMIT_S: Final = 10_000.0
TIER: Final = Tier(name="all", level=0, max_queue=10_000, queue_ttl_s=3600.0)


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds, one of each per request, and all gaps."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def serve(engine: Engine, arrivals: Sequence[Arrival]) -> Times:
    """Serve arrivals in real time, each when it is due; the engine must be idle."""
    times = Times()
    last_at: dict[int, float] = {}
    started_at = time.perf_counter()
    num_added = 0
    while num_added < len(arrivals) or engine.has_work:
        now = time.perf_counter() - started_at
        while num_added < len(arrivals) and arrivals[num_added].at_s <= now:
            arrival = arrivals[num_added]
            engine.add(fixed_length_request(num_added, arrival.prompt_ids, arrival.output_tokens), "bench")
            num_added += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[num_added].at_s - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - started_at
        for delta in outputs.get("bench", ()):
            due_s = arrivals[delta.request_id].at_s
            if delta.request_id in last_at:
                times.gaps_s.append(now - last_at[delta.request_id])
            else:
                times.ttft_s.append(now - due_s)
            last_at[delta.request_id] = now
            if delta.finish_reason is not None:
                times.e2e_s.append(now - due_s)
    return times


def simulated(profile: Profile, engine: EngineConfig, arrivals: Sequence[Arrival]) -> Outcome:
    """Serve the same arrivals with one virtual replica."""
    scenario = Scenario(
        config=ClusterConfig(engine=engine, tiers=(TIER,)),
        profile=profile,
        num_replicas=1,
        pace=Pace(cold_start_s=0.0),
        delay_s=0.0,
    )
    return simulate(scenario, iter(arrivals), LIMIT_S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--trace", default="azure2023-conv")
    parser.add_argument("--length-factor", type=float, default=0.1, help="of the trace's lengths (0.1)")
    parser.add_argument("--rate", type=float, default=0.5, help="requests/s (default 0.5)")
    parser.add_argument("--seconds", type=at_least_one, default=30)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    config = msgspec.structs.replace(
        engine_config(args, SEATS), max_model_len=MAX_TOKENS, max_num_batched_tokens=512
    )
    trace = rescale(read_trace(args.trace), length_factor=args.length_factor)
    mix = Mix(shares={0: 1.0}, max_tokens=MAX_TOKENS, seed=args.seed)
    arrivals = list(drawn(trace, mix, lambda _: args.rate, args.seconds, 1.0))
    opened = open_runner(config, progress)
    engine = new_engine(opened, "continuous")
    warm_up(engine, SEATS)
    log = StepLog(engine)
    real = serve(engine, arrivals)
    profile = fitted_profile("measured", opened, log, 0.0)
    virtual_config = msgspec.structs.replace(config, max_model_len=MAX_TOKENS)
    tier = simulated(profile, virtual_config, arrivals).measures.tiers[TIER.level]
    figures = {
        "itl_ms_p50": (percentile(real.gaps_s, 50), tier.itl.quantile(0.5)),
        "itl_ms_p99": (percentile(real.gaps_s, 99), tier.itl.quantile(0.99)),
        "e2e_ms_p50": (percentile(real.e2e_s, 50), tier.e2e.quantile(0.5)),
        "ttft_ms_p50": (percentile(real.ttft_s, 50), tier.ttft.quantile(0.5)),
        "ttft_ms_p99": (percentile(real.ttft_s, 99), tier.ttft.quantile(0.99)),
    }
    return {
        "error_fraction": {name: virtual / true - 1 for name, (true, virtual) in figures.items()},
        "engine": {name: true * 1e3 for name, (true, _) in figures.items()},
        "simulator": {name: virtual * 1e3 for name, (_, virtual) in figures.items()},
        "requests": len(arrivals),
        "gaps": len(real.gaps_s),
        "deviation_p50": percentile(deviations(profile, log), 50),
        "deviation_p99": percentile(deviations(profile, log), 99),
        "rate": args.rate,
        "seed": args.seed,
        **identity(opened),
    }
