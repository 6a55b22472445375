"""Chunked prefill: what a long prompt does to those who are being answered."""

from typing import Any

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


def scripts(prompt_tokens: int, answer_tokens: int, every_s: float, seed: int) -> list[Script]:
    """Readers of long answers begin at once; then long prompts arrive, one at a time."""
    readers = [
        Script(i, 0, (Turn(answer_tokens, (Segment(seed * 1000 + i, 32),)),)) for i in range(NUM_READERS)
    ]
    prompts = [
        Script(
            NUM_READERS + i,
            1,
            (Turn(2, (Segment(seed * 1000 + 100 + i, prompt_tokens),)),),
            every_s * (i + 1),
        )
        for i in range(NUM_PROMPTS)
    ]
    return readers + prompts


def run(lab: Lab) -> Outcome:
    prompt_tokens = 512 if lab.is_quick else 2048
    answer_tokens, every_s = (120, 2.0) if lab.is_quick else (320, 6.0)
    plan = scripts(prompt_tokens, answer_tokens, every_s, lab.seed)
    reports: dict[str, Report] = {}
    for name, engine in settings(prompt_tokens).items():
        with lab.serving(engine) as subject:
            reports[name] = subject.open(plan, CAST, every_s * NUM_PROMPTS + 1, WORKLOAD)
    gaps = {name: _longest_gap_ms(report) for name, report in reports.items()}
    over_time = [_over_time(name, report) for name, report in reports.items()]
    return Outcome(
        name=NAME,
        title="Chunked prefill and jitter",
        findings=[_finding(prompt_tokens, *gaps.values())],
        tables=[_table(reports)],
        charts=[
            Chart(title="Longest gap of a reader", svg=bars(list(gaps.items()), "ms")),
            Chart(title="P99 of all gaps over time", svg=line_chart(over_time, "seconds", "ms")),
        ],
        cpu_shows=(
            "the effect in full, larger than on a GPU: a prompt takes seconds here, a fraction of one there. "
            "Chunking by time (`itl_target_ms`) instead of by tokens is not part of this experiment."
        ),
        data={"longest_gap_ms": gaps},
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


def _finding(prompt_tokens: int, whole_ms: float, chunked_ms: float) -> Finding:
    return Finding(
        claim=f"a {prompt_tokens:,}-token prompt stalls its neighbours for its whole prefill; in "
        f"{NUM_CHUNKS} chunks for about a quarter of that",
        measured=f"longest gap of {NUM_READERS} readers {number(whole_ms)} ms whole, {number(chunked_ms)} ms "
        f"in chunks, {whole_ms / chunked_ms:.1f}x",
        holds=chunked_ms < whole_ms / 2,
    )


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


def _over_time(name: str, report: Report) -> Line:
    return Line(name=name, points=[(one.at_s, one.itl_p99_ms) for one in report.series.bins])
