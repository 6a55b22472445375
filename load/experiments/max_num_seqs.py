"""Throughput and inter-token latency against the sequence cap."""

from load.experiments.headway import Lab
from load.experiments.outcome import Chart, Finding, Outcome, Table
from load.plot import Line, line_chart
from load.table import Row, number

NAME = "max-num-seqs"
HELP = "throughput and ITL against max_num_seqs"
COUNTS = (1, 2, 4, 8, 16, 32)


def run(lab: Lab) -> Outcome:
    output_tokens = 16 if lab.is_quick else 48
    measured = {}
    for count in COUNTS:
        measured[count] = lab.bench(
            "engine", "--concurrency", str(count), "--requests", str(max(4, count)), "--sigma", "0",
            "--input-tokens", "32", "--output-tokens", str(output_tokens), "--seed", str(lab.seed),
        )  # fmt: skip
    speed = {count: one["output_tokens_per_s"] for count, one in measured.items()}
    gaps = {count: one["itl_ms_p50"] for count, one in measured.items()}
    rows: list[Row] = [
        (str(count), *(number(one[key]) for key in ("output_tokens_per_s", "itl_ms_p50", "itl_ms_p99")))
        for count, one in measured.items()
    ]
    return Outcome(
        name=NAME,
        title="Throughput and latency against max_num_seqs",
        findings=_findings(speed, gaps),
        tables=[Table(header=("max_num_seqs", "tokens/s", "ITL p50, ms", "ITL p99, ms"), rows=rows)],
        charts=[_chart("Output tokens per second", speed, "1/s"), _chart("ITL, P50", gaps, "ms")],
        cpu_shows=(
            "the shape of both curves. The knee comes at a few sequences, where the cores are busy; on a GPU "
            "it comes at hundreds, where compute catches up with memory bandwidth."
        ),
        data={str(count): one for count, one in measured.items()},
    )


def _findings(speed: dict[int, float], gaps: dict[int, float]) -> list[Finding]:
    fewest, most = COUNTS[0], COUNTS[-1]
    best = max(speed, key=speed.__getitem__)
    return [
        Finding(
            claim="more sequences per step bring more tokens per second, with less and less gain",
            measured=f"{speed[best] / speed[fewest]:.1f}x at {best} sequences against {fewest}",
            holds=speed[best] > speed[fewest],
        ),
        Finding(
            claim="and every sequence waits longer for each token",
            measured=f"ITL p50 {number(gaps[fewest])} ms at {fewest}, {number(gaps[most])} ms at {most}",
            holds=gaps[most] > gaps[fewest],
        ),
    ]


def _chart(title: str, values: dict[int, float], unit: str) -> Chart:
    line = Line(name=title, points=list(values.items()), has_dots=True)
    return Chart(title=title, svg=line_chart([line], "max_num_seqs", unit))
