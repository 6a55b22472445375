"""Chunked prefill: what a long prompt does to those who are being answered."""

from typing import Any

import msgspec

from load.experiments.headway import Lab
from load.experiments.outcome import Chart, Finding, Outcome, Table
from load.lengths import Lengths
from load.plan import Script, Segment, Tenant, Turn
from load.plot import Line, bars, line_chart
from load.report import Report
from load.table import Row, number
from load.tenants import Cast, Source
from load.workload import Workload

NAME = "chunked-prefill"
HELP = "chunked prefill and ITL jitter"
NUM_CHUNKS = 4
NUM_READERS = 4
NUM_PROMPTS = 2
READER, PROMPT = "readers", "long prompts"
WORKLOAD = Workload(input_tokens=Lengths(law="fixed", a=1), output_tokens=Lengths(law="fixed", a=1))
"""Unused by scripts that are given."""
CAST = Cast(sources=(Source(tenant=Tenant(name=READER)), Source(tenant=Tenant(name=PROMPT))))


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long the readers read, and when the prompts come: while they do."""

    answer_tokens: int
    every_s: float


HERE = Timing(answer_tokens=600, every_s=4.0)
QUICK = Timing(answer_tokens=240, every_s=2.0)
GPU = Timing(answer_tokens=600, every_s=0.8)
GPU_PROMPT_TOKENS = 2048


def scripts(prompt_tokens: int, timing: Timing, seed: int) -> list[Script]:
    """Readers of long answers begin at once; then long prompts arrive, one at a time."""
    readers = [
        Script(i, 0, (Turn(timing.answer_tokens, (Segment(seed * 1000 + i, 32),)),))
        for i in range(NUM_READERS)
    ]
    prompts = [
        Script(
            NUM_READERS + i,
            1,
            (Turn(2, (Segment(seed * 1000 + 100 + i, prompt_tokens),)),),
            timing.every_s * (i + 1),
        )
        for i in range(NUM_PROMPTS)
    ]
    return readers + prompts


def run(lab: Lab) -> Outcome:
    prompt_tokens = 512 if lab.is_quick else 2048
    here = QUICK if lab.is_quick else HERE
    reports: dict[str, Report] = {}
    for name, engine in settings(prompt_tokens).items():
        with lab.serving(engine) as subject:
            plan = scripts(prompt_tokens, here, lab.seed)
            reports[name] = subject.open(plan, CAST, here.every_s * NUM_PROMPTS + 1, WORKLOAD)
    gaps = {name: _longest_gap_ms(report) for name, report in reports.items()}
    gpu = {
        name: lab.simulate(scripts(GPU_PROMPT_TOKENS, GPU, lab.seed), engine)["tiers"]["interactive"]
        for name, engine in settings(GPU_PROMPT_TOKENS).items()
    }
    gpu_gaps = {name: float(one["itl_ms_max"]) for name, one in gpu.items()}
    over_time = [_over_time(name, report) for name, report in reports.items()]
    return Outcome(
        name=NAME,
        title="Chunked prefill and jitter",
        findings=[
            Finding(
                claim=f"a {prompt_tokens:,}-token prompt stalls its neighbours for its whole prefill; in "
                f"{NUM_CHUNKS} chunks for about a quarter of that",
                measured=_words(gaps),
                holds=_holds(gaps),
                simulated=_words(gpu_gaps),
                simulated_holds=_holds(gpu_gaps),
            )
        ],
        tables=[_table(reports), _simulated_table(gpu)],
        charts=[
            Chart(title="Longest gap of a reader", svg=bars(list(gaps.items()), "ms")),
            Chart(title="P99 of all gaps over time", svg=line_chart(over_time, "seconds", "ms")),
            Chart(title="Longest gap, simulated", svg=bars(list(gpu_gaps.items()), "ms")),
        ],
        cpu_shows=(
            "the effect in full, larger than on a GPU: a prompt takes seconds here, a fraction of one there. "
            "Chunking by time (`itl_target_ms`) instead of by tokens is not part of this experiment."
        ),
        gpu_shows=(
            f"the same prompts of {GPU_PROMPT_TOKENS:,} tokens on {lab.profile}: whole they stand out, in "
            "chunks they cost a few steps each. The stall itself is short enough to go unseen in a chat."
        ),
        data={"longest_gap_ms": gaps, "simulated_longest_gap_ms": gpu_gaps},
    )


def settings(prompt_tokens: int) -> dict[str, dict[str, Any]]:
    """Return the engine settings that are compared; the first takes a prompt in one step."""
    chunk, longest = prompt_tokens // NUM_CHUNKS, prompt_tokens + 256
    common = {"max_num_seqs": 8, "max_model_len": longest, "enable_prefix_caching": False}
    return {
        "whole prompt in one step": {
            **common, "chunked_prefill": False, "max_num_batched_tokens": longest
        },
        f"{NUM_CHUNKS} x {chunk} tokens": {**common, "max_num_batched_tokens": chunk},
    }  # fmt: skip


def _words(gaps: dict[str, float]) -> str:
    whole_ms, chunked_ms = gaps.values()
    return (
        f"longest gap of {NUM_READERS} readers {number(whole_ms)} ms whole, {number(chunked_ms)} ms in "
        f"chunks, {whole_ms / chunked_ms:.1f}x"
    )


def _holds(gaps: dict[str, float]) -> bool:
    whole_ms, chunked_ms = gaps.values()
    return chunked_ms < whole_ms / 2


def _longest_gap_ms(report: Report) -> float:
    summary = report.tenants[READER].max_gap_ms
    return summary.max if summary is not None else float("nan")


def _table(reports: dict[str, Report]) -> Table:
    rows: list[Row] = []
    for name, report in reports.items():
        readers, prompts = report.tenants[READER], report.tenants[PROMPT]
        itl, ttft = readers.itl_ms, prompts.ttft_ms
        rows.append(
            (
                name,
                *((number(itl.p50), number(itl.p99), number(itl.max)) if itl else ("-", "-", "-")),
                number(ttft.p50 if ttft else None),
                str(report.total.failed),
            )
        )
    header = ("prefill", "ITL p50", "ITL p99", "longest gap", "TTFT of the long prompts p50", "failed")
    return Table(header=header, rows=rows)


def _simulated_table(simulated: dict[str, dict[str, float]]) -> Table:
    # The long prompts' first tokens are the latest of all.
    keys = ("itl_ms_p50", "itl_ms_p99", "itl_ms_max", "ttft_ms_p99")
    rows = [(name, *(number(one[key]) for key in keys)) for name, one in simulated.items()]
    return Table(header=("simulated", "ITL p50", "ITL p99", "longest gap", "TTFT p99"), rows=rows)


def _over_time(name: str, report: Report) -> Line:
    return Line(name=name, points=[(one.at_s, one.itl_p99_ms) for one in report.series.bins])
