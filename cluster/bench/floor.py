"""`headway bench floor`: a single stream's step beside the time that reading the weights takes."""

import argparse
import statistics
from dataclasses import dataclass

from cluster.bench.drive import drive
from cluster.bench.engine import add_model_arguments, engine_config, identity, new_engine
from cluster.bench.report import commit, progress
from cluster.bench.workload import fixed_length_request
from replicas.config import Quantization
from replicas.engine import Engine
from replicas.hardware import available_cpus
from replicas.model_device import set_num_threads
from replicas.model_floor import llama_1b, measure_floor, random_runner
from replicas.runner import TorchRunner
from replicas.startup import open_runner

NAME = "floor"
HELP = "single-stream step time over the time that memory needs to bring the weights"

LLAMA_1B = "llama-1b"
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--random",
        choices=[LLAMA_1B],
        help="random weights of this shape instead of --model (10 GB, a minute)",
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    opened = _random(args) if args.random else _real(args)
    prompt = tuple(range(3, 3 + _PROMPT_TOKENS))
    drive(opened.engine, [fixed_length_request(-1, prompt, 8)], 1)
    opened.engine.scheduler.cache.pool.forget_all()
    measured = drive(opened.engine, [fixed_length_request(0, prompt, _OUTPUT_TOKENS)], 1)
    set_num_threads(args.num_threads or available_cpus())  # memory is read by all of them
    floor = measure_floor(opened.runner.module)
    step_s = min(measured.itl_ms) / 1e3
    return {
        "ratio": step_s / floor.seconds,
        "step_ms": step_s * 1e3,
        "step_ms_p50": statistics.median(measured.itl_ms),
        "floor_ms": floor.seconds * 1e3,
        "products_ms": floor.products_s * 1e3,
        "overhead_ms": (step_s - floor.products_s) * 1e3,
        "overhead_fraction": 1 - floor.products_s / step_s,
        "read_gb_per_s": floor.read_bytes_per_s / 1e9,
        "weight_bytes": floor.weight_bytes,
        **opened.facts,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    engine: Engine
    runner: TorchRunner
    facts: dict[str, object]


def _real(args: argparse.Namespace) -> _Opened:
    opened = open_runner(engine_config(args, max_num_seqs=1), progress)
    return _Opened(engine=new_engine(opened, "continuous"), runner=opened.runner, facts=identity(opened))


def _random(args: argparse.Namespace) -> _Opened:
    num_threads = args.num_threads or available_cpus()
    set_num_threads(num_threads)
    quantization: Quantization = args.quantization or "int8"
    made = random_runner(llama_1b(), quantization, progress)
    engine = Engine(made.resolved, made.runner, vocab_size=made.vocab_size, eos_token_ids=frozenset())
    facts = {
        "model": f"random {args.random}",
        "quantization": quantization,
        "numerics": "exact",
        "num_threads": num_threads,
        "commit": commit(),
    }
    return _Opened(engine=engine, runner=made.runner, facts=facts)
