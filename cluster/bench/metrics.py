"""`headway bench metrics`: what counting costs: per engine step, per token, per second to export."""

import argparse
import time
from collections.abc import Callable
from typing import Final

from cluster.arguments import at_least_one
from cluster.bench.report import commit, percentile
from cluster.metrics.catalogue import Sample
from cluster.metrics.engine import StepMeasures
from cluster.metrics.exporter import MetricsExporter
from cluster.metrics.router import measures_samples
from replicas.engine import StepReport
from router.measures import MAX_TENANTS, RouterMeasures, TenantMeasures

NAME = "metrics"
HELP = "microseconds that metrics cost: per engine step, per token in a router, per second to export"
SHORT_STEP_US: Final = 5_000.0
"""A short step of a large model on a GPU: what a step's share is taken of."""
ROUNDS: Final = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=at_least_one, default=20_000, help="calls per round (default 20,000)")


def run(args: argparse.Namespace) -> dict[str, object]:
    step_us = _each_us(_note_steps, args.calls)
    token_us = _each_us(_write_tokens, args.calls)
    measures = _busy_measures()
    samples = tuple(measures_samples(measures))
    collect_us = _each_us(lambda _: tuple(measures_samples(measures)), 1)
    exporter = MetricsExporter(lambda: samples, {"application": "a", "deployment": "d", "replica": "r"})
    export_us = _each_us(lambda _: exporter.export(samples), 1)
    return {
        "step_us": step_us,
        "step_share_of_5_ms": step_us / SHORT_STEP_US,
        "token_us": token_us,
        "router_series": sum(_num_series(sample) for sample in samples),
        "collect_ms_per_s": collect_us / 1e3,
        "export_ms_per_s": export_us / 1e3,
        "commit": commit(),
    }


def _each_us(work: Callable[[int], object], calls: int) -> float:
    """Return the median over rounds of CPU microseconds per call."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        work(calls)
        rounds.append((time.thread_time() - began) * 1e6 / calls)
    return percentile(rounds, 50)


def _note_steps(count: int) -> None:
    measures = StepMeasures()
    for _ in range(count):
        measures.note(
            StepReport(step_s=0.02, gap_s=0.021, num_sequences=32, num_decodes=31, num_prompt_tokens=64)
        )


def _write_tokens(count: int) -> None:
    timing = RouterMeasures().begin_answer(0, time.monotonic(), time.monotonic)
    for token in range(count):
        timing.wrote(0, token + 1, False)


def _busy_measures() -> RouterMeasures:
    """Return a router's figures with as many tenants as it names."""
    measures = RouterMeasures()
    for number in range(MAX_TENANTS):
        tenant = measures.tenants[f"tenant-{number}"] = TenantMeasures()
        tenant.requests["ok"] = tenant.prompt_tokens = tenant.output_tokens = 1
    return measures


def _num_series(sample: Sample) -> int:
    return len(sample.metric.edges) + 3 if sample.metric.edges else 1
