"""Continuous against static batching."""

from typing import Any

from load.experiments.headway import Lab
from load.experiments.outcome import Chart, Finding, Outcome, Table
from load.experiments.slots import continuous_steps, static_steps, waste
from load.plot import bars
from load.table import number

NAME = "batching"
HELP = "continuous against static batching"
SEATS = 16
GPU_REQUESTS = 1024
SPEEDS = {
    "continuous": "continuous_tokens_per_s",
    "static, live rows only": "static_live_rows_tokens_per_s",
    "static": "static_tokens_per_s",
}
SHORT, MEAN, LONGEST = 32, 64, 512


def textbook_lengths() -> list[int]:
    """Return 16 lengths of mean 64 whose longest is 512: one long answer, fifteen short ones."""
    rest = SEATS * MEAN - LONGEST
    each, left = divmod(rest, SEATS - 1)
    return [LONGEST] + [each + (i < left) for i in range(SEATS - 1)]


def run(lab: Lab) -> Outcome:
    measured = lab.bench("batching", "--seed", str(lab.seed), *(["--quick"] if lab.is_quick else []))
    gpu = lab.simulated_bench("batching", "--seed", str(lab.seed), "--requests", str(GPU_REQUESTS))
    gain = Finding(
        claim="continuous batching brings 5 to 15 times the tokens per second",
        measured=_gain(measured),
        holds=measured["ratio"] >= 5,
        simulated=_gain(gpu),
        simulated_holds=gpu["ratio"] >= 5,
    )
    rows = [(name, number(measured[key]), number(gpu[key])) for name, key in SPEEDS.items()]
    return Outcome(
        name=NAME,
        title="Continuous against static batching",
        findings=[*slot_findings(), gain],
        tables=[Table(header=("batching", "tokens/s here", "simulated"), rows=rows)],
        charts=[_chart("Output tokens per second", measured), _chart("The same, simulated", gpu)],
        cpu_shows=(
            "the waste is the same on any hardware. The gain is not: a CPU's step grows with its rows, so "
            "that fuller batches cost more, where a GPU's step is bound by reading weights and does not."
        ),
        gpu_shows=(
            f"the gain that {lab.profile} leaves of the waste: its step hardly grows with its rows, so that "
            "leaving finished rows out brings nothing, and an empty seat costs as much as a full one. "
            f"{GPU_REQUESTS} requests instead of {measured['requests']}: the last long answer runs alone, "
            "which counts for less the longer the load is."
        ),
        data={"here": measured, "simulated": gpu},
    )


def _gain(one: dict[str, Any]) -> str:
    return (
        f"{one['ratio']:.1f}x; {one['ratio_live_rows']:.1f}x against static batches that do not compute "
        "finished rows"
    )


def _chart(title: str, one: dict[str, Any]) -> Chart:
    return Chart(title=title, svg=bars([(name, one[key]) for name, key in SPEEDS.items()], "tokens/s"))


def slot_findings() -> list[Finding]:
    """Return the textbook's examples, counted slot by slot."""
    batch = textbook_lengths()
    many = batch * 16
    short_waste = waste([SHORT], 1, LONGEST)
    batch_waste = waste(batch, SEATS, static_steps(batch, SEATS))
    static, continuous = static_steps(many, SEATS), continuous_steps(many, SEATS)
    return [
        _slot_finding(
            f"an answer of {SHORT} tokens in a batch bound to {LONGEST} wastes 94% of its slot",
            f"{short_waste:.2%} (slot accounting)",
            round(short_waste, 2) == 0.94,
        ),
        _slot_finding(
            f"a static batch of mean {MEAN}, longest {LONGEST} wastes 87.5% of its slots",
            f"{batch_waste:.2%} (slot accounting)",
            batch_waste == 0.875,
        ),
        _slot_finding(
            "continuous batching needs a fraction of the steps",
            f"{static} against {continuous} steps for {len(many)} such answers, "
            f"{static / continuous:.1f}x; {waste(many, SEATS, continuous):.1%} of slots wasted",
            continuous < static,
        ),
    ]


def _slot_finding(claim: str, counted: str, holds: bool) -> Finding:
    # Slots are counted, not timed: no hardware has a part in it.
    return Finding(claim=claim, measured=counted, holds=holds, simulated="the same", simulated_holds=holds)
