"""`headway bench autoscaling`: the policy and others over recorded rates, beside an oracle, in virtual time.

Fourteen days at full rate are more than a simulation of every request can cover, so rates are scaled down
and stretches are sampled at equal distances over the whole record. Each stretch begins with the oracle's
number of replicas and is judged after a warm-up.
"""

import argparse
import csv
import gc
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

from cluster.arguments import at_least_one
from cluster.autoscaling_policy import Policy
from cluster.bench.judgement import Judgement, score
from cluster.bench.report import commit, progress
from cluster.config import ClusterConfig, RouterConfig
from cluster.simulation.autoscaler import SlaScaler
from cluster.simulation.baselines import Bounds, Dynamo, Hpa, Kpa, Planned, RayDefault, TtftThreshold
from cluster.simulation.capacity import Capacity, capacity
from cluster.simulation.fleet import Pace
from cluster.simulation.oracle import Mean, counts, work_by_tick
from cluster.simulation.plan import input_speed
from cluster.simulation.profile import Profile, load_profile
from cluster.simulation.scaling import Fixed, Scaler
from cluster.simulation.traffic import Arrival, Mix, drawn
from cluster.simulation.world import Outcome, Scenario, simulate
from load.trace import Trace, read_trace
from replicas.config import EngineConfig
from replicas.errors import ConfigError
from replicas.step_time import StepShape
from router.tenants import Tier

NAME = "autoscaling"
HELP = "replica-hours, minutes within the targets and changes of direction, beside others and an oracle"

TIERS: Final = (
    Tier(name="interactive", level=0, ttft_target_ms=2_000.0, itl_target_ms=50.0),
    Tier(name="standard", level=1, ttft_target_ms=10_000.0, itl_target_ms=100.0),
)
SHARES: Final = {0: 0.7, 1: 0.3}
ENGINE: Final = EngineConfig(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=16_384)
CONFIG: Final = ClusterConfig(engine=ENGINE, tiers=TIERS, router=RouterConfig(replicas=2))
WARM_UP_S: Final = 300.0
WINDOW_S: Final = 600.0
"""Of the recorded rates."""
UTILISATIONS: Final = (0.9, 0.75, 0.6)
"""What the oracle tries to load replicas to, most first."""
WANTED: Final = 0.99
"""Of the minutes, that must meet both targets of every tier."""
CONCURRENCY: Final = 0.8
"""Of the requests that are open at capacity, what those baselines aim at that ask for a concurrency."""
LIMIT_S: Final = 20_000.0
CAPACITY_DRAWS: Final = 5
MOST_RATE: Final = 20.0
"""Of one replica, in requests/s."""
PROBE_CV: Final = 1.14


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A piece of the record."""

    rates: tuple[float, ...]
    """By WINDOW_S, one more than the piece is long."""
    seconds: float
    seed: int

    def rate(self, now: float) -> float:
        """Straight lines between the recorded values."""
        place = min(len(self.rates) - 2, int(now / WINDOW_S))
        part = now / WINDOW_S - place
        return self.rates[place] * (1 - part) + self.rates[place + 1] * part


POLICIES: Final = ("headway", "ray_default", "ttft_threshold", "hpa", "kpa", "dynamo", "static_peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all policies of a comparison share."""

    profile: Profile
    trace: Trace
    cv: float
    capacity: Capacity
    max_replicas: int

    def arrivals(self, stretch: Stretch) -> Iterator[Arrival]:
        return drawn(self.trace, _mix(stretch.seed), stretch.rate, stretch.seconds, self.cv)

    def mean(self) -> Mean:
        """The trace's mean request on this profile."""
        rows = self.trace.rows
        input_tokens = statistics.fmean(row.input_tokens for row in rows)
        output_tokens = statistics.fmean(row.output_tokens for row in rows)
        batch = max(1, round(self.capacity.mean_open))
        shape = StepShape(
            num_new_tokens=batch, kv_read_tokens=round(batch * input_tokens), num_sampling=batch
        )
        step_s = self.profile.steps.seconds(shape)
        prefill_s = input_tokens / input_speed(self.profile)
        return Mean(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            rate=self.capacity.rate,
            input_share=prefill_s / (prefill_s + output_tokens * step_s / batch),
            output_token_s=step_s,
        )

    def work(self, stretch: Stretch) -> list[float]:
        """Replicas that its requests keep busy, by tick."""
        return work_by_tick(self.arrivals(stretch), self.mean(), stretch.seconds)

    def serve(self, stretch: Stretch, scaler: Scaler, first: int, cold_start_s: float) -> Outcome:
        scenario = Scenario(
            config=CONFIG,
            profile=self.profile,
            num_replicas=first,
            pace=Pace(cold_start_s=cold_start_s),
            seed=stretch.seed,
        )
        return simulate(scenario, self.arrivals(stretch), LIMIT_S, scaler)


def oracle(setting: Setting, stretch: Stretch) -> tuple[list[int], Judgement]:
    """Return the least replicas by tick, and what became of them: the highest utilisation that meets it."""
    work = setting.work(stretch)
    for utilisation in UTILISATIONS:
        plan = counts(work, utilisation)
        outcome = setting.serve(stretch, Planned(plan), plan[0], 0.0)
        found = Judgement.of(outcome, WARM_UP_S)
        if found.met >= WANTED * found.minutes:
            break
    return plan, found


def policies(
    setting: Setting, most: int, utilisation: float, cold_start_s: float
) -> dict[str, Callable[[], Scaler]]:
    """Return what is compared: each makes a fresh scaler. `most`: what static peak keeps."""
    bounds = Bounds(low=1, high=setting.max_replicas)
    concurrency = CONCURRENCY * setting.capacity.mean_open
    mean = setting.mean()
    policy = Policy(
        min_replicas=1,
        max_replicas=setting.max_replicas,
        tiers=TIERS,
        utilisation=utilisation,
        cold_start_s=cold_start_s,
    )
    return {
        "headway": lambda: SlaScaler(policy),
        "ray_default": lambda: RayDefault(bounds, concurrency),
        "ttft_threshold": lambda: TtftThreshold(bounds),
        "hpa": lambda: Hpa(bounds, concurrency),
        "kpa": lambda: Kpa(bounds, setting.capacity.mean_open),
        "dynamo": lambda: Dynamo(
            bounds,
            mean.rate * mean.input_tokens / mean.input_share,
            mean.rate * mean.output_tokens / (1 - mean.input_share),
        ),
        "static_peak": lambda: Fixed(most),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=Path, required=True, help="CSV of requests/s by 10 minutes")
    parser.add_argument("--clients", type=Path, help="JSON of clients: the CV of their gaps (default 1.14)")
    parser.add_argument("--column", default="m_large_rps")
    parser.add_argument("--trace", default="servegen-m-large", help="lengths")
    parser.add_argument("--scale", type=float, default=0.1, help="of the recorded rates (default 0.1)")
    parser.add_argument("--stretches", type=at_least_one, default=2, help="sampled over the record")
    parser.add_argument("--minutes", type=at_least_one, default=15, help="of each, warm-up included")
    parser.add_argument(
        "--cold-start",
        type=float,
        nargs="+",
        default=[60.0],
        metavar="S",
        help="of all policies; further ones of headway alone",
    )
    parser.add_argument(
        "--utilisation", type=float, default=Policy().utilisation, help="that headway plans for"
    )
    parser.add_argument("--profile", default="h200-8b")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=at_least_one, default=1, help="processes, a stretch each (default 1)")


def run(args: argparse.Namespace) -> dict[str, object]:
    gc.set_threshold(200_000, 100, 1000)
    profile, trace = load_profile(args.profile), read_trace(args.trace)
    cv = PROBE_CV if args.clients is None else rate_weighted_cv(args.clients, "m-large")
    rates = [args.scale * rate for rate in _column(args.rates, args.column)]
    stretches = sample(rates, args.stretches, 60.0 * args.minutes, args.seed)
    one = typical_capacity(profile, trace, args.seed)
    progress(f"one replica: {one}")
    setting = Setting(
        profile=profile, trace=trace, cv=cv, capacity=one, max_replicas=4 * math.ceil(max(rates) / one.rate)
    )
    most = max(max(counts(setting.work(stretch), UTILISATIONS[0])) for stretch in stretches)
    comparison = Comparison(
        setting=setting,
        cases=cases(args.policies, args.cold_start),
        utilisation=args.utilisation,
        most=most,
    )
    judgements = compare(comparison, stretches, args.jobs)
    return {
        "policies": scores(judgements),
        "rate_per_replica": one.rate,
        "mean_rate": statistics.fmean(rate for stretch in stretches for rate in stretch.rates),
        "cv": cv,
        "cold_start_s": args.cold_start,
        "utilisation": args.utilisation,
        "stretches": len(stretches),
        "minutes_recorded": len(rates) * WINDOW_S / 60,
        "scale": args.scale,
        "profile": profile.name,
        "seed": args.seed,
        "commit": commit(),
    }


def typical_capacity(profile: Profile, trace: Trace, seed: int) -> Capacity:
    """Return the median of several draws of who is in which tier, as stretches differ in that, too."""

    def draw(rate: float, seconds: float, mix: Mix) -> Iterator[Arrival]:
        return drawn(trace, mix, lambda _: rate, seconds, PROBE_CV)

    mixes = [_mix(seed + i) for i in range(CAPACITY_DRAWS)]
    found = [capacity(CONFIG, profile, partial(draw, mix=mix), most=MOST_RATE) for mix in mixes]
    return sorted(found, key=attrgetter("rate"))[CAPACITY_DRAWS // 2]


def _mix(seed: int) -> Mix:
    return Mix(shares=SHARES, max_tokens=ENGINE.max_model_len or 0, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is served on every stretch."""

    setting: Setting
    cases: Sequence[tuple[str, float]]
    utilisation: float
    """That headway plans for."""
    most: int
    """What static peak keeps."""

    def judge(self, stretch: Stretch) -> dict[str, Judgement]:
        """Serve one stretch with the oracle and in every case; by name."""
        plan, best = oracle(self.setting, stretch)
        judged = {"oracle": best}
        for name, cold_start_s in self.cases:
            found = policies(self.setting, self.most, self.utilisation, cold_start_s)
            scaler = found[name.partition("@")[0]]()
            first = self.most if name == "static_peak" else plan[0]
            outcome = self.setting.serve(stretch, scaler, first, cold_start_s)
            judged[name] = Judgement.of(outcome, WARM_UP_S)
        return judged


def compare(comparison: Comparison, stretches: Sequence[Stretch], jobs: int) -> dict[str, list[Judgement]]:
    """Judge all stretches, far ones first, and say the figures so far: it may be stopped at any time."""
    judgements: dict[str, list[Judgement]] = {}
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        for judged in pool.map(comparison.judge, spread(stretches)):
            for name, judgement in judged.items():
                judgements.setdefault(name, []).append(judgement)
            progress(json.dumps(scores(judgements)))
    return judgements


def cases(names: Sequence[str], cold_starts_s: Sequence[float]) -> list[tuple[str, float]]:
    """Return the policies to serve with, by the name of their figures, and their cold starts."""
    first, *others = cold_starts_s
    again = others if "headway" in names else []
    return [(name, first) for name in names] + [(f"headway@{seconds:g}s", seconds) for seconds in again]


def scores(judgements: Mapping[str, Sequence[Judgement]]) -> dict[str, object]:
    return {name: score(found, judgements["oracle"]) for name, found in judgements.items()}


def spread(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Order stretches so that the first few lie all over the record: by their places' bits, reversed."""
    bits = max(1, (len(stretches) - 1).bit_length())
    places = sorted(range(len(stretches)), key=lambda place: f"{place:0{bits}b}"[::-1])
    return [stretches[place] for place in places]


def sample(rates: Sequence[float], count: int, seconds: float, seed: int) -> list[Stretch]:
    """Return pieces at equal distances over the record, the first in the middle of its part."""
    num_windows = math.ceil(seconds / WINDOW_S) + 1
    if count * num_windows > len(rates):
        raise ConfigError(f"the record has no room for {count} stretches of {seconds:g} s")
    distance = len(rates) / count
    starts = [int((i + 0.5) * distance - num_windows / 2) for i in range(count)]
    return [
        Stretch(rates=tuple(rates[start : start + num_windows]), seconds=seconds, seed=seed + i)
        for i, start in enumerate(starts)
    ]


def rate_weighted_cv(path: Path, model: str) -> float:
    """Return the mean CV of the clients' gaps, weighted by their rates."""
    clients = [c for c in json.loads(path.read_text())["clients"] if c["model"] == model]
    known = [c for c in clients if c.get("cv_iat_rate_weighted")]
    total = sum(c["mean_rps"] for c in known)
    return float(sum(c["mean_rps"] * c["cv_iat_rate_weighted"] for c in known) / total)


def _column(path: Path, column: str) -> list[float]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or column not in rows[0]:
        raise ConfigError(f"{path} has no column {column}")
    return [float(row[column]) for row in rows if row[column]]
