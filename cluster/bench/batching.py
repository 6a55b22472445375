"""`headway bench batching`: continuous against static batching, same engine, same kernels.

Static batching has two forms. In the textbook's, a finished sequence keeps its row and the row is still
computed until the longest member of the batch ends. In the kinder one, finished rows are left out and
only their seats stay empty. On a GPU both cost about the same, since a decode step costs by weights read
and not by rows; on a CPU rows cost, so the kinder form is the harder competitor.
"""

import argparse
import random

from cluster.arguments import at_least_one
from cluster.bench.drive import Drive, drive
from cluster.bench.engine import add_model_arguments, add_profile_argument, open_bare, warm_up
from cluster.bench.report import progress
from cluster.bench.workload import fixed_length_request, long_tailed_lengths, random_prompt
from replicas.config import Batching

NAME = "batching"
HELP = "continuous against static batching on a long-tailed output mix"
PROMPT_TOKENS = 16
MODES: tuple[Batching, ...] = ("continuous", "static", "static_live_rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_profile_argument(parser)
    parser.add_argument("--seats", type=at_least_one, default=16)
    parser.add_argument("--requests", type=at_least_one, default=128)
    parser.add_argument("--mean", type=at_least_one, default=64, help="mean output tokens")
    parser.add_argument(
        "--longest", type=at_least_one, default=512, help="longest output; one request in 16 has it"
    )
    parser.add_argument("--quick", action="store_true", help="an eighth of the lengths, same proportions")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    scale = 8 if args.quick else 1
    mean, longest = args.mean // scale, args.longest // scale
    rng = random.Random(args.seed)
    lengths = long_tailed_lengths(args.requests, mean, longest, rng)
    requests = [
        fixed_length_request(i, random_prompt(PROMPT_TOKENS, 1000, rng), length)
        for i, length in enumerate(lengths)
    ]
    measured: dict[Batching, Drive] = {}
    bare = open_bare(args, args.seats)
    for batching in MODES:
        engine = bare.new_engine(batching)
        warm_up(engine, args.seats)
        measured[batching] = drive(engine, requests, concurrency=len(requests), clock=bare.clock)
        progress(f"{batching}: {measured[batching].output_tokens_per_s:.1f} tokens/s")
    continuous = measured["continuous"].output_tokens_per_s
    static = measured["static"].output_tokens_per_s
    live_rows = measured["static_live_rows"].output_tokens_per_s
    return {
        "continuous_tokens_per_s": continuous,
        "static_tokens_per_s": static,
        "static_live_rows_tokens_per_s": live_rows,
        "ratio": continuous / static,
        "ratio_live_rows": continuous / live_rows,
        "static_waste_fraction": _waste(lengths, args.seats),
        "textbook_waste_fraction": 1 - mean / longest,
        "continuous_steps": len(measured["continuous"].step_ms),
        "static_steps": len(measured["static"].step_ms),
        "seats": args.seats,
        "requests": args.requests,
        "mean_output_tokens": sum(lengths) / len(lengths),
        "longest_output_tokens": max(lengths),
        "output_tokens": measured["continuous"].output_tokens,
        "seed": args.seed,
        **bare.identity,
    }


def _waste(lengths: list[int], seats: int) -> float:
    """Share of seat-steps that generate nothing when batches of `seats` are bound to their longest."""
    batches = [lengths[i : i + seats] for i in range(0, len(lengths), seats)]
    return 1 - sum(lengths) / sum(len(batch) * max(batch) for batch in batches)
