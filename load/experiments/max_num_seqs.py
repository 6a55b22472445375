"""Throughput and inter-token latency against the sequence cap."""

from typing import Any

import msgspec

from load.experiments.headway import Lab
from load.experiments.outcome import Chart, Finding, Outcome, Table
from load.plot import Line, line_chart
from load.table import number

NAME = "max-num-seqs"
HELP = "throughput and ITL against max_num_seqs"
COUNTS = (1, 2, 4, 8, 16, 32)
GPU_COUNTS = (1, 8, 32, 128, 256, 512)
FIGURES = ("output_tokens_per_s", "itl_ms_p50", "itl_ms_p99")


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of `bench engine` by the sequence cap."""

    measured: dict[int, dict[str, Any]]

    @property
    def counts(self) -> list[int]:
        return list(self.measured)

    def of(self, key: str) -> dict[int, float]:
        return {count: one[key] for count, one in self.measured.items()}

    @property
    def speeds_up(self) -> bool:
        speed = self.of("output_tokens_per_s")
        return max(speed.values()) > speed[self.counts[0]]

    @property
    def speed_words(self) -> str:
        speed, fewest = self.of("output_tokens_per_s"), self.counts[0]
        best = max(speed, key=speed.__getitem__)
        return f"{speed[best] / speed[fewest]:.1f}x at {best} sequences against {fewest}"

    @property
    def slows_down(self) -> bool:
        gaps = self.of("itl_ms_p50")
        return gaps[self.counts[-1]] > gaps[self.counts[0]]

    @property
    def gap_words(self) -> str:
        gaps, fewest, most = self.of("itl_ms_p50"), self.counts[0], self.counts[-1]
        return f"ITL p50 {number(gaps[fewest])} ms at {fewest}, {number(gaps[most])} ms at {most}"

    def table(self, title: str) -> Table:
        rows = [(str(count), *(number(one[key]) for key in FIGURES)) for count, one in self.measured.items()]
        return Table(header=(title, "tokens/s", "ITL p50, ms", "ITL p99, ms"), rows=rows)

    def charts(self, suffix: str) -> list[Chart]:
        return [
            self._chart(f"Output tokens per second{suffix}", "output_tokens_per_s", "1/s"),
            self._chart(f"ITL, P50{suffix}", "itl_ms_p50", "ms"),
        ]

    def _chart(self, title: str, key: str, unit: str) -> Chart:
        line = Line(name=title, points=list(self.of(key).items()), has_dots=True)
        return Chart(title=title, svg=line_chart([line], "max_num_seqs", unit))


def run(lab: Lab) -> Outcome:
    output_tokens = 16 if lab.is_quick else 48
    curve = Curve(measured={n: lab.bench("engine", *_arguments(lab, n, 32, output_tokens)) for n in COUNTS})
    gpu = Curve(
        measured={n: lab.simulated_bench("engine", *_arguments(lab, n, 128, 256)) for n in GPU_COUNTS}
    )
    return Outcome(
        name=NAME,
        title="Throughput and latency against max_num_seqs",
        findings=[
            Finding(
                claim="more sequences per step bring more tokens per second, with less and less gain",
                measured=curve.speed_words,
                holds=curve.speeds_up,
                simulated=gpu.speed_words,
                simulated_holds=gpu.speeds_up,
            ),
            Finding(
                claim="and every sequence waits longer for each token",
                measured=curve.gap_words,
                holds=curve.slows_down,
                simulated=gpu.gap_words,
                simulated_holds=gpu.slows_down,
            ),
        ],
        tables=[curve.table("max_num_seqs"), gpu.table("simulated")],
        charts=[*curve.charts(""), *gpu.charts(", simulated")],
        cpu_shows=(
            "the shape of both curves. The knee comes at a few sequences, where the cores are busy; on a GPU "
            "it comes at hundreds, where compute catches up with memory bandwidth."
        ),
        gpu_shows=(
            f"where the knee of {lab.profile} lies: a decode step reads the weights once for all sequences, "
            "so that up to some hundred of them hardly lengthen it."
        ),
        data={
            "here": {str(count): one for count, one in curve.measured.items()},
            "simulated": {str(count): one for count, one in gpu.measured.items()},
        },
    )


def _arguments(lab: Lab, count: int, input_tokens: int, output_tokens: int) -> list[str]:
    return [
        "--concurrency", str(count), "--requests", str(max(4, count)), "--sigma", "0",
        "--input-tokens", str(input_tokens), "--output-tokens", str(output_tokens), "--seed", str(lab.seed),
    ]  # fmt: skip
