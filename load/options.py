"""The options of a load, and the job they describe."""

import argparse
import math
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from load.arrivals import parse_rate
from load.completion import Dialect
from load.connection import Target, parse_target
from load.errors import LoadError, TraceError
from load.files import read_file
from load.lengths import parse_lengths
from load.plan import Script, Tenant
from load.preflight import PREFLIGHT_S, Calibration, Server
from load.run import ClosedLoop, Job
from load.servegen import PREFIX, servegen_trace
from load.tenants import Cast, Source, parse_slo, read_cast
from load.trace import Trace, cut, jittered, read_trace, rescale
from load.words import WORDS
from load.workload import OpenLoop, UserPrompt, Workload, open_schedule, trace_schedule

API_KEY_VARIABLE: Final = "HEADWAY_LOAD_API_KEY"
DEFAULT_DURATION_S: Final = 20.0
DEFAULT_RATE: Final = "4"
MAX_USERS: Final = 100_000
MAX_WORKERS: Final = 64
"""Each is a process of its own."""
_SECRETS: Final = ("api_key", "load")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, and how."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", required=True, help="base URL, as http://127.0.0.1:8000")
    group.add_argument("--model", help="default: the first model the server lists")
    group.add_argument("--api", choices=("chat", "completions"), default="chat")
    group.add_argument("--api-key", help=f"default: ${API_KEY_VARIABLE}")
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="into every body")
    group.add_argument(
        "--ignore-eos", action="store_true", help="ask for answers of exactly the length drawn"
    )
    group.add_argument("--timeout-s", type=positive, default=300.0, help="give a request up after (300)")
    group.add_argument(
        "--retries", type=_count, default=0, metavar="N",
        help="obey Retry-After of 429 and 503 up to N times per request (0: count them as errors)",
    )  # fmt: skip


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """What is asked, and by whom."""
    group = parser.add_argument_group("requests")
    group.add_argument("--input-tokens", default="128", metavar="L", help="256, uniform:16:512, or")
    group.add_argument("--output-tokens", default="64", metavar="L", help="lognormal:MEDIAN:SIGMA[:MOST]")
    group.add_argument("--lengths", metavar="TRACE", help="draw input and output lengths from a trace's rows")
    group.add_argument("--length-factor", type=positive, default=1.0, help="scale a trace's lengths")
    group.add_argument("--prompts", type=Path, metavar="JSONL", help='lines of {"prompt"|"messages": ...}')
    group.add_argument("--prefix-tokens", type=_count, default=0, help="shared system message of this length")
    group.add_argument("--prefix-groups", type=at_least_one, default=1, help="different ones (1)")
    group.add_argument("--turns", default="1", metavar="L", help="requests of one session, as lengths above")
    group.add_argument("--think-s", type=not_negative, default=0.0, help="mean pause of a user (0)")
    group.add_argument("--cancel-fraction", type=_fraction, default=0.0, help="requests to hang up on midway")
    group.add_argument("--slow-fraction", type=_fraction, default=0.0, help="requests to read slowly")
    group.add_argument("--slow-bytes-per-s", type=positive, default=1000.0, help="how slowly (1000)")
    group.add_argument("--max-total-tokens", type=at_least_one, help="leave longer rows of a trace out")
    group.add_argument("--tenants", type=Path, metavar="YAML", help="tenants with keys, tiers, shares, rates")
    group.add_argument(
        "--slo", action="append", default=[], metavar="[TIER:]ttft=500,itl=50",
        help="promise in ms, also tpot and e2e; counts goodput",
    )  # fmt: skip


def add_arrival_options(parser: argparse.ArgumentParser) -> None:
    """When requests come."""
    group = parser.add_argument_group("arrivals")
    group.add_argument("--rate", help="8, ramp:1:20, steps:5,20,5, diurnal:MEAN:AMPLITUDE:PERIOD_S (4)")
    group.add_argument(
        "--users", type=at_most(MAX_USERS), help="closed loop: users who wait for their answers"
    )
    group.add_argument(
        "--trace", metavar="NAME", help="replay a CSV file, a bundled trace, or draw servegen:MODEL"
    )
    add_gap_options(parser)
    parser.add_argument("--name", help="title of the report")
    group.add_argument("--duration-s", type=positive, help=f"default {DEFAULT_DURATION_S:g}")
    group.add_argument("--requests", type=at_least_one, help="stop after this many requests or sessions")
    group.add_argument("--rate-factor", type=positive, default=1.0, help="replay a trace this much faster")
    group.add_argument("--jitter-s", type=not_negative, default=0.0, help="spread a trace's arrivals")


def add_gap_options(parser: argparse.ArgumentParser) -> None:
    """The law of gaps between arrivals."""
    parser.add_argument("--arrivals", choices=("poisson", "constant", "gamma"), default="poisson")
    parser.add_argument("--cv", type=positive, default=2.0, help="variation of gamma gaps (2)")


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """How to search a rate."""
    group = parser.add_argument_group("search")
    group.add_argument("--first-rate", type=positive, default=1.0, help="requests/s to begin with (1)")
    group.add_argument("--attainment", type=_fraction, default=0.99, help="share that must be kept (0.99)")
    group.add_argument(
        "--precision", type=positive, default=0.1, help="stop when this close, relatively (0.1)"
    )
    group.add_argument("--max-probes", type=at_least_one, default=12, help="rates to try at most (12)")
    group.add_argument("--duration-s", type=positive, default=DEFAULT_DURATION_S, help="of each rate (20)")
    group.add_argument("--requests", type=at_least_one, help="at most, at each rate")
    add_gap_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How the tool works."""
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--workers", type=at_most(MAX_WORKERS), default=1, help="driver processes (1)")
    group.add_argument("--warmup-s", type=not_negative, default=0.0, help="leave out what is due before")
    group.add_argument("--cooldown-s", type=not_negative, default=0.0, help="... and in the last seconds")
    group.add_argument(
        "--max-lateness-ms", type=positive, default=20.0, help="a driver later than this voids the run (20)"
    )


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as the report keeps them, keys left out."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in sorted(vars(options).items())
        if name not in _SECRETS and not callable(value)
    }


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What stays the same over all runs of one command."""

    target: Target
    dialect: Dialect
    cast: Cast
    workload: Workload
    calibration: Calibration


def prepare(options: argparse.Namespace) -> Setting:
    """Read the files and look at the server. Raises LoadError."""
    _refuse_idle(options)
    api_key = options.api_key or os.environ.get(API_KEY_VARIABLE)
    cast = _cast(options, api_key)
    for key in (api_key, *(tenant.api_key for tenant in cast.tenants)):
        if key is not None and not (key.isascii() and key.isprintable()):
            raise LoadError("an API key holds characters that no HTTP header can carry")
    workload = _workload(options)
    target = parse_target(options.url)
    first_key = next((tenant.api_key for tenant in cast.tenants if tenant.api_key), api_key)
    with Server(target, first_key, min(PREFLIGHT_S, options.timeout_s)) as server:
        model = server.check_model(options.model)
        calibration = server.calibrate(WORDS, model, options.api)
    extra = options.extra_body | ({"ignore_eos": True} if options.ignore_eos else {})
    dialect = Dialect(api=options.api, model=model, extra_body=extra)
    return Setting(target=target, dialect=dialect, cast=cast, workload=workload, calibration=calibration)


def new_job(setting: Setting, options: argparse.Namespace) -> Job:
    """Draw the plan of one run. Raises LoadError."""
    scripts: list[Script] = []
    closed = None
    duration_s = options.duration_s or DEFAULT_DURATION_S
    if sum(given is not None for given in (options.rate, options.users, options.trace)) > 1:
        raise LoadError("--rate, --users and --trace exclude each other")
    if options.users is not None:
        closed = ClosedLoop(num_users=options.users, num_scripts=options.requests)
        duration_s = options.duration_s or (math.inf if options.requests else DEFAULT_DURATION_S)
    elif options.trace is not None:
        trace = _trace(options)
        scripts = trace_schedule(trace, setting.workload, setting.cast.sources)[: options.requests]
        duration_s = options.duration_s or max(1.0, scripts[-1].at_s)
    else:
        scripts, duration_s = open_plan(setting, options, options.rate or DEFAULT_RATE)
    return job(setting, options, scripts, duration_s, closed)


def job(
    setting: Setting,
    options: argparse.Namespace,
    scripts: list[Script],
    duration_s: float,
    closed: ClosedLoop | None = None,
) -> Job:
    """Put a plan together with how to run it."""
    return Job(
        **{name: getattr(setting, name) for name in Setting.__struct_fields__},
        scripts=tuple(scripts),
        closed=closed,
        duration_s=duration_s,
        num_workers=options.workers,
        request_timeout_s=options.timeout_s,
        max_retries=options.retries,
    )


def open_plan(setting: Setting, options: argparse.Namespace, rate: str) -> tuple[list[Script], float]:
    """Return the scripts of an open loop, and how long it lasts."""
    requests: int | None = options.requests
    duration_s: float = options.duration_s or DEFAULT_DURATION_S
    if requests is not None and options.duration_s is None and ":" not in rate:
        # Long enough for the last of them whatever gaps are drawn.
        duration_s = (requests + 10 * math.sqrt(requests) + 10) * max(1.0, options.cv) / _rate(rate)
    loop = OpenLoop(profile=parse_rate(rate, duration_s), law=options.arrivals, cv=options.cv)
    scripts = open_schedule(loop, setting.workload, setting.cast.sources)[:requests]
    if requests is not None and len(scripts) == requests and options.duration_s is None:
        duration_s = scripts[-1].at_s
    return scripts, duration_s


def _refuse_idle(options: argparse.Namespace) -> None:
    """Raise LoadError for an option that does nothing beside the others."""
    trace, users = getattr(options, "trace", None), getattr(options, "users", None)
    has_rows = trace is not None or options.lengths is not None
    needs = (
        ("rate_factor", 1.0, trace is not None, "with --trace"),
        ("jitter_s", 0.0, trace is not None, "with --trace"),
        ("lengths", None, trace is None, "without --trace"),
        ("length_factor", 1.0, has_rows, "with --trace or --lengths"),
        ("max_total_tokens", None, has_rows, "with --trace or --lengths"),
        ("arrivals", "poisson", trace is None and users is None, "without --trace and --users"),
        ("cv", 2.0, options.arrivals == "gamma", "with --arrivals gamma"),
        ("input_tokens", "128", not has_rows and options.prompts is None, "where nothing else gives lengths"),
        ("output_tokens", "64", not has_rows, "without --trace and --lengths"),
        ("prefix_groups", 1, options.prefix_tokens > 0, "with --prefix-tokens"),
        ("slow_bytes_per_s", 1000.0, options.slow_fraction > 0, "with --slow-fraction"),
        ("think_s", 0.0, users is not None or options.turns != "1", "with --users or --turns"),
    )
    for name, default, has_effect, where in needs:
        if not has_effect and getattr(options, name, default) != default:
            raise LoadError(f"--{name.replace('_', '-')} does something {where} only")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    # What is not a rate is refused with the right words by parse_rate.
    return rate if 0 < rate < math.inf else 1.0


def _cast(options: argparse.Namespace, api_key: str | None) -> Cast:
    if options.tenants is not None:
        cast = read_cast(options.tenants)
    else:
        cast = Cast(sources=(Source(tenant=Tenant(api_key=api_key)),))
    slos = cast.slos | parse_slo(options.slo)
    unknown = set(slos) - {tenant.tier for tenant in cast.tenants} - {""}
    if unknown:
        raise LoadError(f"no tenant is of the tier {sorted(unknown)[0]!r} that has an SLO")
    return msgspec.structs.replace(cast, slos=slos)


def _workload(options: argparse.Namespace) -> Workload:
    return Workload(
        seed=options.seed,
        input_tokens=parse_lengths(options.input_tokens),
        output_tokens=parse_lengths(options.output_tokens),
        length_pairs=_length_pairs(options),
        prompts=read_prompts(options.prompts) if options.prompts is not None else (),
        prefix_tokens=options.prefix_tokens,
        prefix_groups=options.prefix_groups,
        turns=parse_lengths(options.turns),
        think_s=options.think_s,
        cancel_fraction=options.cancel_fraction,
        slow_fraction=options.slow_fraction,
        slow_bytes_per_s=options.slow_bytes_per_s,
    )


def _length_pairs(options: argparse.Namespace) -> tuple[Any, ...]:
    if options.lengths is None:
        return ()
    trace = rescale(read_trace(options.lengths), length_factor=options.length_factor)
    return cut(trace, duration_s=math.inf, max_total_tokens=options.max_total_tokens).rows


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace.startswith(PREFIX):
        drawn_s = (options.duration_s or DEFAULT_DURATION_S) * options.rate_factor
        trace = servegen_trace(options.trace.removeprefix(PREFIX), drawn_s, random.Random(options.seed))
    else:
        trace = read_trace(options.trace)
    if not trace.has_arrivals:
        raise LoadError(f"{options.trace} has no arrival_s column: use it with --lengths and --rate")
    trace = rescale(trace, rate_factor=options.rate_factor, length_factor=options.length_factor)
    if options.jitter_s:
        trace = jittered(trace, options.jitter_s, random.Random(options.seed))
    duration_s = options.duration_s or math.inf
    return cut(trace, duration_s=duration_s, max_total_tokens=options.max_total_tokens)


def read_prompts(path: Path) -> tuple[UserPrompt, ...]:
    """Read a JSONL file of prompts. Raises TraceError with line and column."""
    lines = read_file(path, "the prompts").splitlines()
    decoder = msgspec.json.Decoder(UserPrompt)
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            at = re.search(r"byte (\d+)", str(error))
            raise TraceError(str(path), number, 1 + int(at[1]) if at else 1, str(error)) from error
        if (prompt.prompt is None) == (not prompt.messages):
            raise TraceError(str(path), number, 1, "a line needs either prompt or messages")
        prompts.append(prompt)
    if not prompts:
        raise TraceError(str(path), 1, 1, "the file has no prompts")
    return tuple(prompts)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {error}") from error


def _number(text: str, low: float, high: float, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def positive(text: str) -> float:
    """Read an option that must be above 0."""
    return _number(text, 1e-9, 1e9, "a positive number")


def not_negative(text: str) -> float:
    """Read an option that must be at least 0."""
    return _number(text, 0.0, 1e9, "a number of at least 0")


def _fraction(text: str) -> float:
    return _number(text, 0.0, 1.0, "a fraction from 0 to 1")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def at_least_one(text: str) -> int:
    """Read an option that must be a whole number above 0."""
    if (number := _count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def at_most(most: int) -> Callable[[str], int]:
    """Return a reader of options that must be whole numbers from 1 to `most`."""

    def read(text: str) -> int:
        if (number := at_least_one(text)) > most:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {most}")
        return number

    return read
