"""Continuous against static batching."""

from load.experiments.headway import Lab
from load.experiments.outcome import Chart, Finding, Outcome, Table
from load.experiments.slots import continuous_steps, static_steps, waste
from load.plot import bars
from load.table import number

NAME = "batching"
HELP = "continuous against static batching"
SEATS = 16
SHORT, MEAN, LONGEST = 32, 64, 512


def textbook_lengths() -> list[int]:
    """Return 16 lengths of mean 64 whose longest is 512: one long answer, fifteen short ones."""
    rest = SEATS * MEAN - LONGEST
    each, left = divmod(rest, SEATS - 1)
    return [LONGEST] + [each + (i < left) for i in range(SEATS - 1)]


def run(lab: Lab) -> Outcome:
    measured = lab.bench("batching", "--seed", str(lab.seed), *(["--quick"] if lab.is_quick else []))
    speeds = [
        ("continuous", measured["continuous_tokens_per_s"]),
        ("static, live rows only", measured["static_live_rows_tokens_per_s"]),
        ("static", measured["static_tokens_per_s"]),
    ]
    ratio, live = measured["ratio"], measured["ratio_live_rows"]
    gain = Finding(
        claim="continuous batching brings 5 to 15 times the tokens per second",
        measured=f"{ratio:.1f}x; {live:.1f}x against static batches that do not compute finished rows",
        holds=ratio >= 5,
    )
    return Outcome(
        name=NAME,
        title="Continuous against static batching",
        findings=[*slot_findings(), gain],
        tables=[Table(header=("batching", "tokens/s"), rows=[(name, number(v)) for name, v in speeds])],
        charts=[Chart(title="Output tokens per second", svg=bars(speeds, "tokens/s"))],
        cpu_shows=(
            "the waste is the same on any hardware. The gain is not: a CPU's step grows with its rows, so "
            "that fuller batches cost more, where a GPU's step is bound by reading weights and does not."
        ),
        data=measured,
    )


def slot_findings() -> list[Finding]:
    """Return the textbook's examples, counted slot by slot."""
    batch = textbook_lengths()
    many = batch * 16
    short_waste = waste([SHORT], 1, LONGEST)
    batch_waste = waste(batch, SEATS, static_steps(batch, SEATS))
    static, continuous = static_steps(many, SEATS), continuous_steps(many, SEATS)
    return [
        Finding(
            claim=f"an answer of {SHORT} tokens in a batch bound to {LONGEST} wastes 94% of its slot",
            measured=f"{short_waste:.2%} (slot accounting)",
            holds=round(short_waste, 2) == 0.94,
        ),
        Finding(
            claim=f"a static batch of mean {MEAN}, longest {LONGEST} wastes 87.5% of its slots",
            measured=f"{batch_waste:.2%} (slot accounting)",
            holds=batch_waste == 0.875,
        ),
        Finding(
            claim="continuous batching needs a fraction of the steps",
            measured=f"{static} against {continuous} steps for {len(many)} such answers, "
            f"{static / continuous:.1f}x; {waste(many, SEATS, continuous):.1%} of slots wasted",
            holds=continuous < static,
        ),
    ]
