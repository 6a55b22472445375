"""`headway bench steps`: how long the steps of this engine take, as a profile for `headway simulate`."""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from cluster.bench.engine import add_model_arguments, engine_config, identity, new_engine, warm_up
from cluster.bench.neighbour import neighbour
from cluster.bench.report import percentile, progress
from cluster.bench.step_log import LoggedStep, log_steps
from cluster.bench.workload import fixed_length_request, random_prompt
from cluster.simulation.fit import fit, noise_of
from cluster.simulation.profile import Profile, SharedHost
from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.startup import OpenedRunner, open_runner
from replicas.step_time import StepShape

NAME = "steps"
HELP = "fit step times over batches, contexts and chunks; --out writes a profile for simulate"

BATCHES: Final = (1, 4, 8, 16, 32)
CONTEXTS: Final = (32, 256)
CHUNKS: Final = (16, 64, 128, 256, 512)
STEPS_EACH: Final = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile")
    parser.add_argument("--name", default="cpu", help="of the profile")
    parser.add_argument(
        "--beside", action="store_true", help="also beside a second engine: for replicas that share a host"
    )

    parser.add_argument(
        "--noise", action="store_true", help="also how steps of a kind differ; simulations are slower with it"
    )


def run(args: argparse.Namespace) -> dict[str, object]:
    started_at = time.perf_counter()
    config = msgspec.structs.replace(
        engine_config(args, max(BATCHES)), max_num_batched_tokens=max(CHUNKS), enable_prefix_caching=False
    )
    opened = open_runner(config, progress)
    start_s = time.perf_counter() - started_at
    engine = new_engine(opened, "continuous")
    warm_up(engine, max(BATCHES))
    log: list[LoggedStep] = []
    log_steps(engine, log.append)
    _run_all(engine)
    alone = list(log)
    profile = fitted_profile(args.name, opened, log, start_s)
    if args.beside:
        slowdown = _slowdown(engine, config, profile, log)
        profile = msgspec.structs.replace(profile, shared_host=SharedHost(replicas=2, slowdown=slowdown))
    if args.noise:
        noise = noise_of(profile.steps, [step.shape for step in alone], [step.seconds for step in alone])
        profile = msgspec.structs.replace(profile, noise=noise)
    if args.out is not None:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    return {
        "step_ms_batch_1": profile.steps.seconds(_decodes(1, 512)) * 1e3,
        "step_ms_batch_8": profile.steps.seconds(_decodes(8, 512)) * 1e3,
        "step_ms_batch_32": profile.steps.seconds(_decodes(32, 512)) * 1e3,
        "prefill_tokens_per_s": 512 / profile.steps.seconds(StepShape().with_prefill(512, 0)),
        "deviation_p50": percentile(deviations(profile, alone), 50),
        "deviation_p99": percentile(deviations(profile, alone), 99),
        "slowdown": None if profile.shared_host is None else profile.shared_host.slowdown,
        "start_s": start_s,
        **identity(opened),
    }


def _run_all(engine: Engine) -> None:
    draw = random.Random(0)
    for context in CONTEXTS:
        for batch in BATCHES:
            _run(engine, [(context, STEPS_EACH)] * batch, draw)
        progress(f"decodes after {context} tokens: done")
    for chunk in CHUNKS:
        for _ in range(2):
            _run(engine, [(chunk, 1)], draw)


def _slowdown(engine: Engine, config: EngineConfig, profile: Profile, log: list[LoggedStep]) -> float:
    """Return by how much of their time alone the same steps take longer beside a second engine."""
    log.clear()
    with neighbour(config):
        progress("the same beside a second engine")
        _run_all(engine)
    ratios = [step.seconds / profile.steps.seconds(step.shape) for step in log]
    return max(0.0, statistics.median(ratios) - 1.0)


def _run(engine: Engine, lengths: list[tuple[int, int]], draw: random.Random) -> None:
    for i, (num_input, num_output) in enumerate(lengths):
        engine.add(fixed_length_request(i, random_prompt(num_input, 1000, draw), num_output), "bench")
    while engine.has_work:
        engine.step()


def _decodes(count: int, context: int) -> StepShape:
    return StepShape(num_new_tokens=count, kv_read_tokens=count * context, num_sampling=count)


def fitted_profile(name: str, opened: OpenedRunner, log: Sequence[LoggedStep], start_s: float) -> Profile:
    """Return what the steps of a log took, as a profile."""
    resolved = opened.resolved
    return Profile(
        name=name,
        source=f"fitted by bench steps: {opened.card.name}, {opened.quantization}, "
        f"{opened.num_threads} threads",
        steps=fit([step.shape for step in log], [step.seconds for step in log]),
        max_position_embeddings=resolved.max_model_len,
        kv_bytes_per_token=1,
        kv_bytes=resolved.num_blocks * resolved.block_size,
        block_size=resolved.block_size,
        cold_start_s=start_s,
    )


def deviations(profile: Profile, log: Sequence[LoggedStep]) -> list[float]:
    """Return how far each measured step was from what the profile says, as a share of that."""
    return [abs(step.seconds / profile.steps.seconds(step.shape) - 1) for step in log]
