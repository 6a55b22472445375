"""`headway simulate`: what a configuration would do under recorded or drawn traffic, on virtual time."""

import argparse
import gc
from collections.abc import Iterator
from typing import Final

import msgspec

from cluster.arguments import at_least_one
from cluster.autoscaling_policy import Policy
from cluster.bench.report import commit, progress
from cluster.config import AutoscalingConfig, ClusterConfig
from cluster.simulation.autoscaler import SlaScaler
from cluster.simulation.charts import write_page
from cluster.simulation.clients import Habits
from cluster.simulation.fleet import Pace
from cluster.simulation.profile import Profile
from cluster.simulation.summary import summary
from cluster.simulation.traffic import Arrival
from cluster.simulation.traffic_options import (
    add_traffic_arguments,
    arrivals_of,
    configured,
    mix_of,
    profile_of,
    trace_of,
)
from cluster.simulation.world import TAIL_S, Outcome, Scenario, simulate
from load.trace import Trace

MAX_REPLICAS: Final = 100
"""With --autoscale, where the configuration names no bounds."""
MARGIN_S: Final = 3600.0
"""Virtual time beyond the last request after which a run must be stuck."""


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add_traffic_arguments(parser)
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--replicas", type=at_least_one, metavar="N", help="instead of the configured number")
    count.add_argument(
        "--autoscale", action="store_true", help="by the configuration's section `autoscaling`"
    )
    parser.add_argument(
        "--rate", type=float, metavar="R", help="requests/s drawn from the trace, instead of replaying it"
    )
    parser.add_argument("--seconds", type=float, help="of traffic (default: the trace; 60 with --rate)")
    parser.add_argument("--seeds", type=at_least_one, default=1, help="runs, each with the next seed")
    parser.add_argument(
        "--cold-start", type=float, metavar="S", help="of a replica, instead of the profile's"
    )
    parser.add_argument(
        "--stale", type=float, default=1.0, metavar="S", help="until routers hear of replicas"
    )
    parser.add_argument(
        "--kill", type=float, action="append", default=[], metavar="AT_S", help="a replica dies then (repeat)"
    )
    parser.add_argument("--retries", type=int, default=0, help="how often refused clients come back")
    parser.add_argument("--cancel-fraction", type=float, default=0.0, help="clients that hang up early")


def run_simulate(args: argparse.Namespace) -> dict[str, object]:
    """Return the report. Raises ConfigError."""
    config, profile = configured(args), profile_of(args)
    trace = trace_of(args, args.seconds if args.rate is None else None)
    seconds = args.seconds or (60.0 if args.rate is not None else trace.rows[-1].at_s)
    outcomes = []
    # Nothing here makes cycles fast, and a full collection walks every KV block of the fleet.
    gc.freeze()
    gc.set_threshold(200_000, 100, 1000)
    for seed in range(args.seed, args.seed + args.seeds):
        outcomes.append(_run(args, config, profile, trace, seed, seconds))
        progress(f"seed {seed}: {outcomes[-1].wall_s:.1f} s")
    if args.plot is not None:
        write_page(args.plot, outcomes, config.tiers)
    return summary(outcomes, config.tiers) | {
        "replicas": args.replicas or config.replicas,
        "routers": config.router.replicas,
        "profile": profile.name,
        "profile_source": profile.source,
        "cold_start_s": profile.cold_start_s,
        "trace": args.trace,
        "rate": args.rate,
        "seed": args.seed,
        "commit": commit(),
    }


def _run(
    args: argparse.Namespace,
    config: ClusterConfig,
    profile: Profile,
    trace: Trace,
    seed: int,
    seconds: float,
) -> Outcome:
    max_tokens = profile.resolve(config).max_model_len
    mix = mix_of(args, config, max_tokens, seed)
    scenario = Scenario(
        config=config,
        profile=profile,
        num_replicas=args.replicas or config.replicas,
        pace=Pace(cold_start_s=profile.cold_start_s, notice_s=args.stale, drain_s=config.drain_s),
        habits=Habits(retries=args.retries, cancel_fraction=args.cancel_fraction),
        kills_at_s=tuple(args.kill),
        seed=seed,
    )
    arrivals: Iterator[Arrival] = arrivals_of(args, trace, mix, args.rate, seconds)
    scaler = SlaScaler(_policy(config, profile)) if args.autoscale else None
    return simulate(scenario, arrivals, seconds + TAIL_S + MARGIN_S, scaler)


def _policy(config: ClusterConfig, profile: Profile) -> Policy:
    scaling = config.autoscaling or AutoscalingConfig(max_replicas=MAX_REPLICAS)
    return msgspec.structs.replace(scaling, tiers=config.tiers, cold_start_s=profile.cold_start_s)
