"""`headway bench engine`: the bare engine, no Ray and no HTTP, under a closed load."""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import msgspec

from cluster.arguments import at_least_one
from cluster.bench.drive import Drive, drive
from cluster.bench.report import commit, percentile, progress
from cluster.bench.workload import LognormalLengths, fixed_length_request, random_prompt
from cluster.config import ClusterConfig
from cluster.simulation.profile import Profile, load_profile
from cluster.simulation.timed_runner import TimedRunner
from replicas.api import GenerateRequest
from replicas.config import Batching, EngineConfig, Quantization
from replicas.engine import Engine
from replicas.errors import ConfigError
from replicas.startup import OpenedRunner, open_runner
from replicas.step import Runner

NAME = "engine"
VOCAB_SIZE: Final = 1000
"""Of the prompts."""
HELP = "output tokens/s, TTFT, ITL and step time of the bare engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_profile_argument(parser)
    parser.add_argument(
        "--batching", choices=["continuous", "static", "static_live_rows"], default="continuous"
    )
    parser.add_argument("--requests", type=at_least_one, default=24)
    parser.add_argument("--concurrency", type=at_least_one, default=16, help="requests at a time, and seats")
    parser.add_argument("--input-tokens", type=at_least_one, default=64, help="median prompt length")
    parser.add_argument("--output-tokens", type=at_least_one, default=32, help="median output length")
    parser.add_argument(
        "--max-input-tokens", type=at_least_one, help="longest prompt (default 5 x the median)"
    )
    parser.add_argument(
        "--max-output-tokens", type=at_least_one, help="longest output (default 5 x the median)"
    )
    parser.add_argument("--sigma", type=float, default=0.6, help="spread of the lognormal lengths; 0 = fixed")
    parser.add_argument("--itl-target-ms", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write-requests",
        type=Path,
        metavar="FILE",
        help="write the requests as JSON lines for cluster/bench/peers.py",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = EngineConfig()
    parser.add_argument("--model", default=defaults.model)
    parser.add_argument("--attention", default=defaults.attention, help="attention backend")
    parser.add_argument("--numerics", choices=["exact", "fast"], help="default: exact on CPU")
    parser.add_argument("--num-threads", type=at_least_one, help="CPU threads (default: all cores)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--quantization", choices=get_args(Quantization), help="default: int8 on CPUs that do it exactly"
    )


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile", metavar="P", help="instead of a model, on virtual time: h200-8b, cpu, or a JSON file"
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    requests = _requests(args, VOCAB_SIZE)
    if args.write_requests:
        args.write_requests.write_bytes(b"".join(map(_json_line, requests)))
    bare = open_bare(args, max_num_seqs=args.concurrency)
    engine = bare.new_engine(args.batching)
    warm_up(engine, args.concurrency)
    measured = drive(engine, requests, args.concurrency, bare.clock)
    engine.scheduler.check_integrity()
    report = {**speed(measured), **bare.identity, **_workload(args, measured)}
    if args.profile is not None:
        del report["scheduler_us_p50"]  # scheduling takes no virtual time
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """What a bench of the bare engine measures: a model in real time, or a profile on virtual time."""

    new_engine: Callable[[Batching], Engine]
    """A fresh engine over the same runner."""
    clock: Callable[[], float]
    identity: dict[str, object]


def open_bare(args: argparse.Namespace, max_num_seqs: int) -> Bare:
    """Open what the arguments name. Raises ConfigError or ModelError."""
    config = engine_config(args, max_num_seqs)
    if args.profile is not None:
        if config != EngineConfig(max_num_seqs=max_num_seqs, itl_target_ms=config.itl_target_ms):
            raise ConfigError("--profile stands for a model and its machine: leave out their options")
        return _profiled(load_profile(args.profile), config)
    opened = open_runner(config, progress)
    return Bare(
        new_engine=lambda batching: new_engine(opened, batching),
        clock=time.perf_counter,
        identity=identity(opened),
    )


def _profiled(profile: Profile, config: EngineConfig) -> Bare:
    resolved = profile.resolve(ClusterConfig(engine=config, tiers=()))
    runner = TimedRunner(profile.timer(random.Random(0)))

    def new(batching: Batching) -> Engine:
        return Engine(
            msgspec.structs.replace(resolved, batching=batching),
            runner,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset(),
            clock=runner.clock,
        )

    identity: dict[str, object] = {
        "profile": profile.name,
        "profile_source": profile.source,
        "commit": commit(),
    }
    return Bare(new_engine=new, clock=runner.clock, identity=identity)


def engine_config(args: argparse.Namespace, max_num_seqs: int) -> EngineConfig:
    return EngineConfig(
        model=args.model,
        device=args.device,
        attention=args.attention,
        numerics=args.numerics,
        num_threads=args.num_threads,
        quantization=args.quantization,
        max_num_seqs=max_num_seqs,
        itl_target_ms=getattr(args, "itl_target_ms", None),
    )


def new_engine(opened: OpenedRunner, batching: Batching, runner: Runner | None = None) -> Engine:
    """A fresh engine over the same runner: one set of weights serves all modes of a comparison. `runner`:
    one around it."""
    config = msgspec.structs.replace(opened.resolved, batching=batching)
    eos = frozenset(opened.card.eos_token_ids)
    return Engine(config, runner or opened.runner, vocab_size=opened.card.vocab_size, eos_token_ids=eos)


def warm_up(engine: Engine, seats: int) -> None:
    """A few steps with all seats taken, outside the measurement: pages touched, kernels loaded."""
    drive(engine, [fixed_length_request(-1 - i, (1, 2, 3, 4 + i), 4) for i in range(seats)], seats)
    engine.scheduler.cache.pool.forget_all()


def speed(measured: Drive) -> dict[str, object]:
    """The figures of a drive under their published keys."""
    return {
        "output_tokens_per_s": measured.output_tokens_per_s,
        "total_tokens_per_s": measured.total_tokens_per_s,
        "ttft_ms_p50": percentile(measured.ttft_ms, 50),
        "ttft_ms_p99": percentile(measured.ttft_ms, 99),
        "itl_ms_p50": percentile(measured.itl_ms, 50),
        "itl_ms_p99": percentile(measured.itl_ms, 99),
        "step_ms_p50": percentile(measured.step_ms, 50),
        "scheduler_us_p50": percentile(measured.scheduler_us, 50),
        "kv_utilisation": statistics.median(measured.kv_utilisation),
        "prompt_tokens": measured.prompt_tokens,
        "output_tokens": measured.output_tokens,
        "steps": len(measured.step_ms),
        "wall_s": measured.wall_s,
    }


def identity(opened: OpenedRunner) -> dict[str, object]:
    """What was measured: model, kernels, numerics, commit."""
    return {
        "model": opened.card.name,
        "attention": opened.attention,
        "quantization": opened.quantization,
        "numerics": opened.numerics,
        "num_threads": opened.num_threads,
        "commit": commit(),
    }


def _requests(args: argparse.Namespace, vocab_size: int) -> list[GenerateRequest]:
    rng = random.Random(args.seed)
    inputs = _lengths(args.input_tokens, args.max_input_tokens, args.sigma)
    outputs = _lengths(args.output_tokens, args.max_output_tokens, args.sigma)
    return [
        fixed_length_request(i, random_prompt(inputs.draw(rng), vocab_size, rng), outputs.draw(rng))
        for i in range(args.requests)
    ]


def _json_line(request: GenerateRequest) -> bytes:
    line = {"prompt_ids": request.prompt_ids, "output_tokens": request.sampling.max_tokens}
    return msgspec.json.encode(line) + b"\n"


def _lengths(median: int, longest: int | None, sigma: float) -> LognormalLengths:
    return LognormalLengths(median=median, sigma=sigma, longest=longest or 5 * median)


def _workload(args: argparse.Namespace, measured: Drive) -> dict[str, object]:
    return {
        "batching": args.batching,
        "requests": len(measured.ttft_ms),
        "concurrency": args.concurrency,
        "input_tokens": args.input_tokens,
        "output_tokens_median": args.output_tokens,
        "sigma": args.sigma,
        "itl_target_ms": args.itl_target_ms,
        "seed": args.seed,
    }
