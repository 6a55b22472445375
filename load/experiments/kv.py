"""Paged against contiguous KV memory."""

from typing import Any

from load.experiments.headway import Lab
from load.experiments.outcome import Chart, Finding, Outcome
from load.plot import bars

NAME = "kv"
HELP = "paged against contiguous KV memory"


def run(lab: Lab) -> Outcome:
    arguments = ["--seed", str(lab.seed), *(["--steps", "600"] if lab.is_quick else [])]
    measured, gpu = lab.bench("kv", *arguments), lab.simulated_bench("kv", *arguments)
    return Outcome(
        name=NAME,
        title="Paged against contiguous KV memory",
        findings=[
            Finding(
                claim="paged memory wastes less than 4%: nearly every slot holds a live token",
                measured=_live(measured),
                holds=measured["kv_utilisation"] >= 0.96,
                simulated=_live(gpu),
                simulated_holds=gpu["kv_utilisation"] >= 0.96,
            ),
            Finding(
                claim="the same memory holds 2 to 4 times the sequences",
                measured=_sequences(measured),
                holds=_gain(measured) >= 2,
                simulated=_sequences(gpu),
                simulated_holds=_gain(gpu) >= 2,
            ),
        ],
        charts=[
            _chart("Sequences at once in the same memory", measured),
            _chart(f"The same in the memory of {lab.profile}", gpu),
        ],
        cpu_shows="all of it: block accounting is the same code and the same numbers on every device.",
        gpu_shows=(
            f"the pool and the blocks of {lab.profile}. Its kernels want blocks of {gpu['block_size']} "
            "tokens; a sequence leaves half of its last block empty on average: larger blocks waste more."
        ),
        data={"here": measured, "simulated": gpu},
    )


def _live(one: dict[str, Any]) -> str:
    return f"{one['kv_utilisation']:.1%} live at block size {one['block_size']}"


def _gain(one: dict[str, Any]) -> float:
    return float(one["max_concurrent_paged"] / one["max_concurrent_contiguous"])


def _sequences(one: dict[str, Any]) -> str:
    return (
        f"{one['max_concurrent_paged']} against {one['max_concurrent_contiguous']} of {one['max_model_len']} "
        f"reserved tokens each, {_gain(one):.1f}x"
    )


def _chart(title: str, one: dict[str, Any]) -> Chart:
    rows = [("paged", one["max_concurrent_paged"]), ("contiguous", one["max_concurrent_contiguous"])]
    return Chart(title=title, svg=bars(rows, "sequences"))
