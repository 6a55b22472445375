"""`headway bench watch`: what the live page costs an engine, in CPU time of its thread."""

import argparse
import time

import msgspec

from cluster.arguments import at_least_one
from cluster.bench.report import commit, percentile
from cluster.bench.scheduler import decoding_engine
from replicas.engine import Engine
from replicas.step_record import StepWatch
from replicas.step_recorder import StepRecorder

NAME = "watch"
HELP = "share of an engine's time that recording its steps takes, while pages watch and while none does"
POLL_S = 0.2
"""As router/step_feed.py."""
WARMUP_STEPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqs", type=at_least_one, default=32, help="running sequences (default 32)")
    parser.add_argument("--pages", type=at_least_one, default=1, help="pages that watch (default 1)")
    parser.add_argument("--steps", type=at_least_one, default=3000, help="measured steps (default 3000)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="time between two steps (default 5)")


def run(args: argparse.Namespace) -> dict[str, object]:
    engine = decoding_engine(args.seqs, max_tokens=args.steps + WARMUP_STEPS + 100)
    for _ in range(WARMUP_STEPS):
        engine.step()
    step_s = args.step_ms / 1e3
    watched = _Watched(step_s, args.pages)
    alone = _Watched(step_s, 0)
    for _ in range(args.steps):
        engine.step()
        # Both see the same step: what drifts between runs falls out.
        watched.end_step(engine)
        alone.end_step(engine)
    records_us = sorted(watched.records_us)
    return {
        "num_seqs": args.seqs,
        "pages": args.pages,
        "step_ms": args.step_ms,
        "cost_fraction": watched.cost_s / (args.steps * step_s),
        "cost_fraction_unwatched": alone.cost_s / (args.steps * step_s),
        "record_us_p50": percentile(records_us, 50),
        "record_us_p99": percentile(records_us, 99),
        "bytes_per_step": watched.num_bytes / args.steps,
        "recorded_fraction": len(records_us) / args.steps,
        "commit": commit(),
    }


class _Watched:
    """A recorder and its pages, on a clock by which every step takes the same time."""

    def __init__(self, step_s: float, num_pages: int) -> None:
        self.cost_s = 0.0
        self.num_bytes = 0
        self.records_us: list[float] = []
        self._step_s = step_s
        self._now = 0.0
        self._asked_at = -POLL_S
        self._cursors = [0] * num_pages
        self._recorder = StepRecorder(lambda: self._now, time.thread_time)

    def end_step(self, engine: Engine) -> None:
        """What the pump does after a step, and the pages when it is time."""
        self._now += self._step_s
        if self._now - self._asked_at >= POLL_S:
            self._asked_at = self._now
            self._ask()
        load, sent_at = engine.load(), time.time()
        started_at = time.thread_time()
        is_due = self._recorder.is_due(self._now, is_last=False)
        if is_due:
            self._recorder.note(engine.last_step, load, sent_at)
        cost_s = time.thread_time() - started_at
        self.cost_s += cost_s
        if is_due:
            self.records_us.append(cost_s * 1e6)

    def _ask(self) -> None:
        started_at = time.thread_time()
        for page, cursor in enumerate(self._cursors):
            news = self._recorder.read(StepWatch(cursor))
            self.num_bytes += len(msgspec.msgpack.encode(news))
            self._cursors[page] = news.cursor
        self.cost_s += time.thread_time() - started_at
