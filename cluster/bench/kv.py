"""`headway bench kv`: how much of the allocated KV memory holds live tokens, paged and contiguous."""

import argparse
import random
import statistics

from cluster.arguments import at_least_one
from cluster.bench.report import commit
from cluster.bench.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT
from cluster.simulation.profile import load_profile
from replicas.api import GenerateRequest, SamplingParams
from replicas.config import ResolvedConfig
from replicas.engine import Engine
from replicas.null_runner import NullRunner

NAME = "kv"
HELP = "KV block use under ShareGPT-like lengths, and concurrency against contiguous allocation"
MAX_MODEL_LEN = 9216
VOCAB_SIZE = 32_000
POOL_TOKENS = 320_000
BLOCK_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool-tokens", type=at_least_one, help=f"tokens the pool holds ({POOL_TOKENS})")
    parser.add_argument("--block-size", type=at_least_one, help=f"tokens of a block ({BLOCK_SIZE})")
    parser.add_argument("--profile", metavar="P", help="pool and blocks of h200-8b, cpu, or a JSON file")
    parser.add_argument("--steps", type=at_least_one, default=1500)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, object]:
    pool_tokens, block_size = args.pool_tokens or POOL_TOKENS, args.block_size or BLOCK_SIZE
    if args.profile is not None:
        profile = load_profile(args.profile)
        pool_tokens = args.pool_tokens or profile.kv_bytes // profile.kv_bytes_per_token
        block_size = args.block_size or profile.block_size
    config = ResolvedConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4096,
        max_num_batched_tokens=8192,
        block_size=block_size,
        num_blocks=pool_tokens // block_size,
        enable_prefix_caching=False,
    )
    engine = Engine(config, NullRunner(0.0, VOCAB_SIZE), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    rng = random.Random(args.seed)
    num_requests = 0
    utilisation, concurrent = [], []
    for step in range(args.steps):
        while engine.scheduler.num_waiting < 8:
            prompt = (1,) * SHAREGPT_INPUT.draw(rng)
            sampling = SamplingParams(max_tokens=SHAREGPT_OUTPUT.draw(rng), ignore_eos=True)
            request = GenerateRequest(request_id=num_requests, prompt_ids=prompt, sampling=sampling)
            engine.add(request, "bench")
            num_requests += 1
        engine.step()
        if step >= args.steps // 3:  # the pool is full and lengths are mixed
            utilisation.append(engine.kv_utilisation())
            concurrent.append(engine.scheduler.num_running)
    engine.scheduler.check_integrity()
    return {
        "kv_utilisation": statistics.median(utilisation),
        "kv_utilisation_min": min(utilisation),
        "max_concurrent_paged": max(concurrent),
        "median_concurrent_paged": statistics.median(concurrent),
        "max_concurrent_contiguous": pool_tokens // MAX_MODEL_LEN,
        "block_size": block_size,
        "pool_tokens": pool_tokens,
        "max_model_len": MAX_MODEL_LEN,
        "requests": num_requests,
        "preemptions": engine.scheduler.num_preemptions,
        "seed": args.seed,
        "commit": commit(),
    }
