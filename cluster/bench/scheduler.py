"""`headway bench scheduler`: what the engine costs per step when the model costs nothing."""

import argparse
import time

from cluster.arguments import at_least_one
from cluster.bench.report import commit, percentile
from replicas.api import GenerateRequest, SamplingParams
from replicas.config import ResolvedConfig
from replicas.engine import Engine
from replicas.null_runner import NullRunner

NAME = "scheduler"
HELP = "microseconds per engine step (schedule, bookkeeping, outputs, load report) with a null runner"
PROMPT_TOKENS = 200
WARMUP_STEPS = 50
VOCAB_SIZE = 32_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqs", type=at_least_one, default=256, help="running sequences (default 256)")
    parser.add_argument("--steps", type=at_least_one, default=2000, help="measured steps (default 2000)")


def run(args: argparse.Namespace) -> dict[str, object]:
    engine = decoding_engine(args.seqs, max_tokens=args.steps + WARMUP_STEPS + 100)
    for _ in range(WARMUP_STEPS):
        engine.step()
    step_us = []
    for _ in range(args.steps):
        started_at = time.perf_counter()
        engine.step()
        engine.load()
        step_us.append((time.perf_counter() - started_at) * 1e6)
    assert engine.scheduler.num_running == args.seqs
    return {
        "num_seqs": args.seqs,
        "step_us_p50": percentile(step_us, 50),
        "step_us_p99": percentile(step_us, 99),
        "steps": args.steps,
        "output_tokens": engine.counters.output_tokens,
        "commit": commit(),
    }


def decoding_engine(num_seqs: int, max_tokens: int) -> Engine:
    """Return an engine of a null runner in which so many sequences decode."""
    max_model_len = PROMPT_TOKENS + max_tokens + 1
    config = ResolvedConfig(
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        block_size=16,
        num_blocks=num_seqs * (max_model_len // 16 + 2),
    )
    runner = NullRunner(0.0, VOCAB_SIZE)
    engine = Engine(config, runner, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    for i in range(num_seqs):
        prompt = tuple(1 + (i * PROMPT_TOKENS + k) % (VOCAB_SIZE - 1) for k in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens)
        engine.add(GenerateRequest(request_id=i, prompt_ids=prompt, sampling=sampling), "bench")
    while engine.load().queued_tokens:
        engine.step()
    return engine
