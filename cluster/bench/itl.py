"""`headway bench itl`: gaps of decoding streams while long prompts arrive, chunking by time on and off.

Times of the engine are real. The capacity of both modes is found by one and the same bisection over the
production engine on virtual time, with the step times learned from the real runs: in real time a bisection
would take a quarter of an hour.
"""

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cluster.arguments import at_least_one
from cluster.bench.drive import drive
from cluster.bench.engine import add_model_arguments, engine_config, identity, new_engine, warm_up
from cluster.bench.learning import LearningRunner
from cluster.bench.report import percentile, progress
from cluster.bench.workload import fixed_length_request, random_prompt
from cluster.simulation.timed_runner import TimedRunner
from replicas.api import GenerateRequest
from replicas.config import EngineConfig, ResolvedConfig
from replicas.engine import Engine
from replicas.startup import OpenedRunner, open_runner
from replicas.step import Runner
from replicas.step_time import StepTimeModel

NAME = "itl"
HELP = "gaps of 8 decoding streams beside arriving 2,000-token prompts, chunking by time on and off"

NUM_STREAMS: Final = 8
STREAM_PROMPT_TOKENS: Final = 32
STREAM_OUTPUT_TOKENS: Final = 400
TARGET_STEPS: Final = 5
"""The target is so many plain decode steps, fixed before prompts arrive."""
LOAD: Final = 0.6
"""Of the measured prefill capacity."""
TTFT_PROMPTS: Final = 5
"""The target of a prompt's first token is the time for so many lone prompts."""
WITHIN: Final = 0.99
MAX_MODEL_LEN: Final = 4096
OPENED_TARGET_MS: Final = 1e4
"""What the engine is opened with, as one that keeps a target; which one is measured then."""
PROBE_PROMPTS: Final = 60
"""A probe lasts as long as so many lone prompts."""
BISECTIONS: Final = 6


@dataclass(slots=True)
class Watched:
    """What a run beside decoding streams showed; seconds."""

    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of the decoding streams."""
    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    """Computed for prompts in `busy_s`."""
    busy_s: float = 0.0
    """While a prompt was there."""
    num_unserved: int = 0
    """Prompts that had arrived and had no first token at the end."""

    def within(self, target_s: float) -> float:
        return sum(gap <= target_s for gap in self.gaps_s) / len(self.gaps_s)


def watch(
    engine: Engine,
    clock: Callable[[], float],
    arrivals: Iterator[float],
    prompt_tokens: int,
    duration_s: float,
) -> Watched:
    """Keep the streams decoding for `duration_s` while a prompt comes at each of `arrivals` (seconds)."""
    draw = random.Random(0)
    watched = Watched()
    ids = itertools.count()
    arrived_at: dict[int, float] = {}
    last_at: dict[int, float | None] = {}
    started_at = clock()
    next_at = started_at + next(arrivals)
    while (now := clock()) < started_at + duration_s:
        while len(last_at) < NUM_STREAMS:
            # The first ones end at different times, so that their successors' prompts come one by one.
            length = STREAM_OUTPUT_TOKENS - draw.randrange(STREAM_OUTPUT_TOKENS // 2)
            last_at[add(engine, next(ids), STREAM_PROMPT_TOKENS, length, draw)] = None
        while next_at <= now:
            arrived_at[add(engine, next(ids), prompt_tokens, 1, draw)] = next_at
            next_at = started_at + next(arrivals)
        was_busy = bool(arrived_at)
        outputs = engine.step()
        ended_at = clock()
        if was_busy and engine.last_step is not None:
            watched.busy_s += ended_at - now
            watched.prompt_tokens += engine.last_step.num_prefill_tokens
        for delta in outputs.get("bench", ()):
            if delta.request_id in arrived_at:
                watched.ttft_s.append(ended_at - arrived_at.pop(delta.request_id))
                continue
            before = last_at[delta.request_id]
            if before is not None:
                watched.gaps_s.append(ended_at - before)
            last_at[delta.request_id] = ended_at
            if delta.finish_reason is not None:
                del last_at[delta.request_id]
    watched.num_unserved = len(arrived_at)
    return watched


def add(engine: Engine, request_id: int, num_input: int, num_output: int, draw: random.Random) -> int:
    """Queue a request of random tokens; returns its id."""
    engine.add(fixed_length_request(request_id, random_prompt(num_input, 1000, draw), num_output), "bench")
    return request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is fixed before prompts arrive beside the streams."""

    decode_s: float
    """A plain step of all streams, median."""
    prompt_s: float
    """A lone prompt."""
    prompt_tokens: int

    @property
    def target_s(self) -> float:
        return TARGET_STEPS * self.decode_s

    @property
    def ttft_target_s(self) -> float:
        return TTFT_PROMPTS * self.prompt_s

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prompt_s

    @property
    def capacity_ratio_by_gaps(self) -> float:
        """The most that chunking can gain where gaps alone bind: off, one step in 100 may be a prompt; on,
        prompts get what plain steps leave of the target. Longer prompts count no more, so they gain less.
        """
        rate_off = 1 / (self.prompt_s + WITHIN / (1 - WITHIN) * self.decode_s)
        return (1 - self.decode_s / self.target_s) / self.prompt_s / rate_off


def measure(opened: OpenedRunner, runner: Runner, prompt_tokens: int) -> Measured:
    """Take the time of plain decoding and of lone prompts, each computed in one step."""
    engine = new_engine(opened, "continuous", runner)
    warm_up(engine, NUM_STREAMS)
    draw = random.Random(1)

    def requests(count: int, num_input: int, num_output: int) -> list[GenerateRequest]:
        return [
            fixed_length_request(i, random_prompt(num_input, 1000, draw), num_output) for i in range(count)
        ]

    decodes = drive(engine, requests(NUM_STREAMS, STREAM_PROMPT_TOKENS, 60), NUM_STREAMS)
    prompts = drive(engine, requests(3, prompt_tokens, 1), 1)
    return Measured(
        decode_s=percentile(decodes.step_ms, 50) / 1e3,
        prompt_s=percentile(prompts.ttft_ms, 50) / 1e3,
        prompt_tokens=prompt_tokens,
    )


def capacity_rps(config: ResolvedConfig, seconds: StepTimeModel, measured: Measured, chunked: bool) -> float:
    """Find the highest rate of prompts at which both targets hold and no queue grows, on virtual time."""

    def holds(rate: float) -> bool:
        runner = TimedRunner(seconds.predict)
        engine = Engine(
            with_chunking(config, measured, chunked),
            runner,
            vocab_size=1000,
            eos_token_ids=frozenset(),
            clock=runner.clock,
        )
        watched = watch(
            engine, runner.clock, poisson(rate), measured.prompt_tokens, PROBE_PROMPTS * measured.prompt_s
        )
        return (
            watched.within(measured.target_s) >= WITHIN
            and watched.num_unserved <= 1 + rate * measured.ttft_target_s
            and percentile(watched.ttft_s, 99) <= measured.ttft_target_s
        )

    low, high = 0.0, 1.0 / measured.prompt_s
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def poisson(rate: float) -> Iterator[float]:
    """Yield arrival times, the same ones up to their scale for every rate."""
    draw = random.Random(2)
    at_s = 0.0
    while True:
        at_s += draw.expovariate(1.0) / rate
        yield at_s


def with_chunking(config: ResolvedConfig, measured: Measured, chunked: bool) -> ResolvedConfig:
    return msgspec.structs.replace(
        config, chunked_prefill=chunked, itl_target_ms=measured.target_s * 1e3 if chunked else None
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt-tokens", type=at_least_one, default=2000)
    parser.add_argument("--prompts", type=at_least_one, default=4, help="with chunking (default 4)")


def run(args: argparse.Namespace) -> dict[str, object]:
    opened = open_runner(_engine_config(args), progress)
    runner = LearningRunner(opened.runner)
    measured = measure(opened, runner, args.prompt_tokens)
    progress(f"plain step {measured.decode_s * 1e3:.1f} ms, lone prompt {measured.prompt_s:.2f} s")
    gap_s = measured.prompt_s / LOAD
    watched = {}
    for chunked, num_prompts in ((True, args.prompts), (False, max(2, args.prompts // 2))):
        engine = _engine(opened, runner, with_chunking(opened.resolved, measured, chunked))
        warm_up(engine, NUM_STREAMS)
        arrivals = itertools.count(gap_s / 2, gap_s)
        duration_s = (num_prompts + 0.5) * gap_s
        watched[chunked] = watch(engine, time.perf_counter, arrivals, args.prompt_tokens, duration_s)
        progress(f"chunking {chunked}: {watched[chunked].within(measured.target_s):.2%} of gaps in target")
    capacity = {
        chunked: capacity_rps(opened.resolved, runner.step_time, measured, chunked)
        for chunked in (True, False)
    }
    return _report(measured, watched[True], watched[False]) | {
        "capacity_rps_on": capacity[True],
        "capacity_rps_off": capacity[False],
        "capacity_ratio": capacity[True] / capacity[False] if capacity[False] else math.inf,
        "capacity_ratio_by_gaps": measured.capacity_ratio_by_gaps,
        "capacity_by": "bisection on virtual time, step times learned in this run",
        **identity(opened),
    }


def _engine(opened: OpenedRunner, runner: Runner, config: ResolvedConfig) -> Engine:
    eos = frozenset(opened.card.eos_token_ids)
    return Engine(config, runner, vocab_size=opened.card.vocab_size, eos_token_ids=eos)


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    # Without chunking a whole prompt must fit into one step.
    return msgspec.structs.replace(
        engine_config(args, max_num_seqs=2 * NUM_STREAMS),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        itl_target_ms=OPENED_TARGET_MS,
    )


def _report(measured: Measured, on: Watched, off: Watched) -> dict[str, object]:
    target_s = measured.target_s
    # Of each step as long as the target, the streams' own tokens take one plain step.
    left = measured.prefill_tokens_per_s * (1 - measured.decode_s / target_s)
    rate_on = on.prompt_tokens / on.busy_s if on.busy_s else math.nan
    return {
        "target_ms": target_s * 1e3,
        "ttft_target_ms": measured.ttft_target_s * 1e3,
        "plain_step_ms": measured.decode_s * 1e3,
        "within_target_fraction_on": on.within(target_s),
        "within_target_fraction_off": off.within(target_s),
        "max_gap_ms_on": max(on.gaps_s) * 1e3,
        "max_gap_ms_off": max(off.gaps_s) * 1e3,
        "gaps_on": len(on.gaps_s),
        "gaps_off": len(off.gaps_s),
        "prefill_tokens_per_s_on": rate_on,
        "prefill_capacity_tokens_per_s": measured.prefill_tokens_per_s,
        "prefill_share_of_what_is_left": rate_on / left,
        "ttft_ms_p50_on": percentile(on.ttft_s, 50) * 1e3,
        "ttft_ms_p50_off": percentile(off.ttft_s, 50) * 1e3,
        "prompts_on": len(on.ttft_s),
        "prompts_off": len(off.ttft_s),
    }
