"""`headway plan`: from promised latencies back to seats, chunk, KV memory and replicas."""

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cluster.bench.report import commit, progress
from cluster.config import ClusterConfig
from cluster.simulation.capacity import Capacity, Draw, broken_targets, capacity, probe
from cluster.simulation.profile import Profile
from cluster.simulation.traffic import Arrival, drawn
from cluster.simulation.traffic_options import add_traffic_arguments, configured, mix_of, profile_of, trace_of
from load.page import card, charts, html_table, page
from load.plot import Line, line_chart
from load.trace import Trace
from replicas.errors import ConfigError
from replicas.step_time import StepShape
from router.tenants import Tier

LOADS: Final = (0.5, 1.0, 2.0, 4.0)
"""Times the trace's rate, for the table of replicas."""
SEATS: Final = (1.0, 0.5, 0.25)
"""Of the largest batch within the ITL target: which numbers of seats are tried."""
MOST_SEATS: Final = 256
"""More are not planned for: a step then reads little but keys and values, and more seats gain little."""
NEARLY: Final = 0.97
"""Fewer seats are preferred when they serve this share of the best."""
LARGE_CHUNK: Final = 2048
UTILISATION: Final = 0.8
"""Of its capacity, what a replica is planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A number of seats and what one replica with so many can take."""

    max_num_seqs: int
    capacity: Capacity


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_traffic_arguments(parser)
    parser.add_argument("--itl-p99", type=_seconds, required=True, metavar="50ms", help="promised gap")
    parser.add_argument("--ttft-p99", type=_seconds, required=True, metavar="1s", help="promised first token")
    parser.add_argument("--tier", default="planned", help="name of the tier that is promised this")
    parser.add_argument("--rate", type=float, help="requests/s to plan for (default: the trace's mean)")


def _seconds(text: str) -> float:
    number, scale = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = float(number) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 50ms or 1.5s") from None
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return seconds


def run_plan(args: argparse.Namespace) -> dict[str, object]:
    """Return the plan. Raises ConfigError, also for targets that no number of replicas keeps."""
    profile, trace = profile_of(args), trace_of(args, None)
    config = _config(args)
    rate = args.rate or trace.rate
    if not rate:
        raise ConfigError("the trace has no rate of its own: give a --rate")
    output_tokens = statistics.fmean(row.output_tokens for row in trace.rows)
    input_tokens = statistics.fmean(row.input_tokens for row in trace.rows)
    context = input_tokens + output_tokens / 2
    largest = largest_batch(profile, args.itl_p99, context)
    options = []
    for share in SEATS:
        seats = max(1, int(largest * share))
        option_config = with_seats(config, seats, args.itl_p99)
        decode_s = output_tokens * profile.seconds_beside_all(_decodes(seats, context)) / seats
        most = 1.2 / (input_tokens / input_speed(profile) + decode_s)
        draw = _draw(args, trace, option_config, profile)
        options.append(Option(max_num_seqs=seats, capacity=capacity(option_config, profile, draw, most)))
        progress(f"{seats} seats: {options[-1].capacity.rate:.2f} requests/s for each replica")
    best = max(option.capacity.rate for option in options)
    if not best:
        raise ConfigError(
            f"not one replica keeps {args.ttft_p99:g} s and {args.itl_p99 * 1e3:g} ms at any rate tried"
        )
    chosen = min(
        (option for option in options if option.capacity.rate >= NEARLY * best),
        key=lambda option: option.max_num_seqs,
    )
    replicas = _replicas(rate, chosen)
    config = with_seats(config, chosen.max_num_seqs, args.itl_p99)
    draw = _draw(args, trace, config, profile)
    report: dict[str, object] = {
        "max_num_seqs": chosen.max_num_seqs,
        "replicas": replicas,
        "binding_constraint": chosen.capacity.binding,
        "rate": rate,
        "rate_per_replica": chosen.capacity.rate,
        "utilisation": UTILISATION,
        "chunk_tokens": largest_chunk(profile, args.itl_p99, chosen.max_num_seqs, context),
        "kv_tokens_needed": math.ceil(chosen.max_num_seqs * context),
        "kv_bytes_needed": math.ceil(chosen.max_num_seqs * context * profile.kv_bytes_per_token),
        "kv_bytes": profile.kv_bytes,
        "seats_tried": {str(o.max_num_seqs): o.capacity.rate for o in options},
        "replicas_by_rate": {f"{rate * load:.3g}": _replicas(rate * load, chosen) for load in LOADS},
        "twice_the_load": _what_if(config, profile, draw, 2 * rate, replicas),
        "one_replica_lost": _what_if(config, profile, draw, rate, replicas, 10.0),
        "as_planned": _what_if(config, profile, draw, rate, replicas),
        "tier": args.tier,
        "profile": profile.name,
        "profile_source": profile.source,
        "seed": args.seed,
        "commit": commit(),
    }
    if args.plot is not None:
        _write_page(args.plot, report, options, rate, chosen)
    return report


def largest_batch(profile: Profile, itl_s: float, context: float) -> int:
    """Return the most sequences that decode within the target. Raises ConfigError if not even one does."""
    if profile.seconds_beside_all(_decodes(1, context)) > itl_s:
        step_ms = profile.seconds_beside_all(_decodes(1, context)) * 1e3
        raise ConfigError(
            f"an ITL of {itl_s * 1e3:g} ms cannot be kept: a step of one sequence takes {step_ms:.1f} "
            "ms; no number of replicas helps"
        )
    most = max(1, int(profile.kv_bytes / profile.kv_bytes_per_token / context))
    low, high = 1, min(most, MOST_SEATS) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if profile.seconds_beside_all(_decodes(middle, context)) <= itl_s:
            low = middle
        else:
            high = middle
    return low


def input_speed(profile: Profile) -> float:
    """Return the prompt tokens per second of a replica that does nothing else."""
    return LARGE_CHUNK / profile.seconds_beside_all(StepShape().with_prefill(LARGE_CHUNK, 0))


def largest_chunk(profile: Profile, itl_s: float, batch: int, context: float) -> int:
    """Return the prompt tokens that fit beside a full batch of decodes into one step within the target."""
    base = _decodes(batch, context)
    chunk = 0
    while profile.seconds_beside_all(base.with_prefill(chunk + 16, 0)) <= itl_s and chunk < 65_536:
        chunk += 16
    return chunk


def _decodes(count: int, context: float) -> StepShape:
    return StepShape(num_new_tokens=count, kv_read_tokens=round(count * context), num_sampling=count)


def _config(args: argparse.Namespace) -> ClusterConfig:
    tier = Tier(name=args.tier, level=0, ttft_target_ms=args.ttft_p99 * 1e3, itl_target_ms=args.itl_p99 * 1e3)
    return msgspec.structs.replace(configured(args), tiers=(tier,))


def with_seats(config: ClusterConfig, seats: int, itl_s: float) -> ClusterConfig:
    """Return the configuration with so many seats, and room for them in a step."""
    engine = msgspec.structs.replace(
        config.engine,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, config.engine.max_num_batched_tokens),
        itl_target_ms=itl_s * 1e3,
    )
    return msgspec.structs.replace(config, engine=engine)


def _draw(args: argparse.Namespace, trace: Trace, config: ClusterConfig, profile: Profile) -> Draw:
    mix = mix_of(args, config, profile.resolve(config).max_model_len, args.seed)

    def draw(rate: float, seconds: float) -> Iterator[Arrival]:
        return drawn(trace, mix, lambda _: rate, seconds, args.cv)

    return draw


def _replicas(rate: float, option: Option) -> int:
    return math.ceil(rate / (UTILISATION * option.capacity.rate))


def _what_if(
    config: ClusterConfig, profile: Profile, draw: Draw, rate: float, replicas: int, *kills_at_s: float
) -> dict[str, object]:
    outcome = probe(config, profile, draw, rate, replicas, *kills_at_s)
    tier = outcome.measures.tiers[0]
    return {
        "ttft_attainment": tier.attainment,
        "itl_attainment": tier.itl_attainment,
        "ttft_ms_p99": tier.ttft.quantile(0.99) * 1e3,
        "itl_ms_p99": tier.itl.quantile(0.99) * 1e3,
        "refused_fraction": tier.refused / tier.requests if tier.requests else 0.0,
        "broken": broken_targets(outcome),
    }


def _write_page(
    path: Path, report: dict[str, object], options: list[Option], rate: float, chosen: Option
) -> None:
    seats = Line(
        name="requests/s within the targets",
        points=[(float(o.max_num_seqs), o.capacity.rate) for o in reversed(options)],
        has_dots=True,
    )
    rates = [rate * i / 10 for i in range(1, 41)]
    needed = Line(name="replicas", points=[(r, float(_replicas(r, chosen))) for r in rates])
    cards = [
        card("One replica", line_chart([seats], "seats", "requests/s")),
        card("Replicas", line_chart([needed], "requests/s", "replicas")),
    ]
    rows = [(key, str(value)) for key, value in report.items()]
    body = ["<h1>Headway plan</h1>", charts(cards), html_table(("", ""), rows, "plain")]
    path.write_text(page("Headway plan", body), "utf-8")
