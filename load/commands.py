"""`headway load`: the commands. Each sets `load`, a function from the options to an exit code."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from load import options as opt
from load.compare import caveats, comparison_html, comparison_markdown, differences
from load.echo import Pace, run_echo
from load.errors import LoadError
from load.exit import EXIT_FAILED, EXIT_MISUSED
from load.experiments import commands as experiments
from load.experiments.outcome import outcomes_html, outcomes_json, outcomes_markdown
from load.live import LiveView
from load.page import to_html
from load.report import Report, build_report, read_report, to_json
from load.run import Job, run
from load.selftest import selftest, selftest_html, selftest_markdown
from load.sweep import Probe, Search, knee, sweep_html, sweep_markdown
from load.table import to_markdown

EXIT_INVALID: Final = 3
"""The run went through, but its figures cannot be trusted."""

Command = Callable[[argparse.Namespace], int]

if TYPE_CHECKING:
    # argparse has no public name for what add_subparsers returns.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the load commands to `parser`."""
    commands = parser.add_subparsers(title="load commands", required=True, metavar="LOAD")
    one = _add(commands, "run", "drive a load and measure it", _run)
    opt.add_server_options(one)
    opt.add_workload_options(one)
    opt.add_arrival_options(one)
    opt.add_run_options(one)
    _add_outputs(one)

    many = _add(commands, "sweep", "find the highest rate that keeps the promise", _sweep)
    opt.add_server_options(many)
    opt.add_workload_options(many)
    opt.add_run_options(many)
    opt.add_sweep_options(many)
    _add_outputs(many)

    _add_readers(commands)
    _add_local(commands)


def _add_readers(commands: "Commands") -> None:
    """Commands over reports."""
    side_by_side = _add(commands, "compare", "compare reports", _compare)
    side_by_side.add_argument(
        "reports", type=Path, nargs="+", metavar="REPORT.json", help="the first is the base"
    )
    _add_outputs(side_by_side)

    again = _add(commands, "report", "draw a report that was written with --out", _report)
    again.add_argument("report", type=Path, metavar="REPORT.json")
    _add_outputs(again)


def _add_local(commands: "Commands") -> None:
    """Commands that start what they measure."""
    proof = _add(commands, "selftest", "measure this tool against a server that only streams", _selftest)
    proof.add_argument("--streams", type=opt.at_least_one, default=1000, help="concurrent answers (1000)")
    proof.add_argument("--tokens-per-s", type=opt.positive, default=20_000.0, help="of all together (20000)")
    proof.add_argument("--duration-s", type=opt.positive, default=20.0, help="measured time (20)")
    _add_outputs(proof)

    claims = _add(commands, "experiments", "measure the classic claims on this machine", _experiments)
    experiments.add_arguments(claims)
    _add_outputs(claims)

    echo = _add(commands, "echo", "serve fixed tokens at a fixed pace, to try a load against", _echo)
    echo.add_argument("--port", type=opt.at_most(65535), default=8001, help="on 127.0.0.1 (8001)")
    echo.add_argument("--ttft-ms", type=opt.not_negative, default=20.0, help="to the first token (20)")
    echo.add_argument("--itl-ms", type=opt.not_negative, default=50.0, help="between tokens (50)")
    echo.add_argument("--jitter", type=opt.not_negative, default=0.0, help="lognormal sigma of gaps and TTFT")


def _add(commands: "Commands", name: str, summary: str, command: Command) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=command.__doc__)
    parser.set_defaults(load=_guarded(command))
    return parser


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    group.add_argument("--out", type=Path, metavar="FILE", help="write it as JSON")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write it as Markdown")
    group.add_argument("--html", type=Path, metavar="FILE", help="write it as one self-contained HTML page")


def _guarded(command: Command) -> Command:
    def guarded(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except LoadError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_MISUSED

    return guarded


def _run(options: argparse.Namespace) -> int:
    """Drive one load against an OpenAI-compatible server; print what it measured."""
    setting = opt.prepare(options)
    report = drive(opt.new_job(setting, options), options)
    return publish(report, options)


def drive(job: Job, options: argparse.Namespace, *, name: str | None = None) -> Report:
    """Run a job under the live view and measure it. Raises LoadError."""
    with LiveView(job, Console(stderr=True)) as view:
        outcome = run(job, view)
    last_due_s = max((record.due_s for record in outcome.records), default=0.0)
    return build_report(
        outcome,
        job.cast,
        opt.configuration(options) | {"model": job.dialect.model, "counting": job.calibration.counting},
        name=name or options.name or f"{job.dialect.model} at {options.url}",
        duration_s=min(job.duration_s, max(last_due_s, outcome.wall_s)),
        warmup_s=options.warmup_s,
        cooldown_s=options.cooldown_s,
        max_lateness_ms=options.max_lateness_ms,
    )


def _report(options: argparse.Namespace) -> int:
    """Draw a report again, in any form."""
    return publish(read_report(options.report), options)


def publish(report: Report, options: argparse.Namespace) -> int:
    """Write and print one run's report; returns the exit code."""
    _publish(to_json(report), to_markdown(report), lambda: to_html(report), options)
    for problem in report.invalid_because:
        print(f"invalid: {problem}", file=sys.stderr)
    if not report.is_valid:
        return EXIT_INVALID
    if report.total.failed == report.total.requests:
        print(f"not one of {report.total.requests} requests was answered", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _publish(data: object, markdown: str, html: Callable[[], str], options: argparse.Namespace) -> None:
    encoded = msgspec.json.encode(data)
    if options.out is not None:
        _write(options.out, msgspec.json.format(encoded, indent=1).decode() + "\n")
    if options.markdown is not None:
        _write(options.markdown, markdown)
    if options.html is not None:
        _write(options.html, html())
    print(encoded.decode() if options.json else markdown)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise LoadError(f"cannot write {path}: {error.strerror}") from error


def _compare(options: argparse.Namespace) -> int:
    """Compare the figures of two reports or more with the first, and say which differences are clear."""
    if len(options.reports) < 2:
        raise LoadError("a comparison needs two reports at least")
    reports = [read_report(path) for path in options.reports]
    data = {
        "kind": "headway-load-comparison",
        "first": reports[0].name,
        "others": {other.name: differences(reports[0], other) for other in reports[1:]},
        "caveats": caveats(reports),
    }
    _publish(data, comparison_markdown(reports), lambda: comparison_html(reports), options)
    return 0


def _sweep(options: argparse.Namespace) -> int:
    """Search the highest rate at which the promise (--slo) is kept, by doubling and bisection."""
    setting = opt.prepare(options)
    if not setting.cast.slos:
        raise LoadError("a sweep needs a promise to keep: give --slo, or tiers in the tenants file")
    search = Search(first_rate=options.first_rate, precision=options.precision, max_probes=options.max_probes)
    probes: list[Probe] = []
    while (rate := search.next_rate(probes)) is not None:
        scripts, duration_s = opt.open_plan(setting, options, f"{rate:g}")
        job = opt.job(setting, options, scripts, duration_s)
        report = drive(job, options, name=f"{rate:.3g} requests/s")
        if report.is_interrupted:
            break
        kept = report.is_valid and report.total.goodput_fraction >= options.attainment
        probes.append(Probe(rate=rate, is_kept=kept, report=report))
        print(f"{rate:.3g} requests/s: {report.total.goodput_fraction:.1%} kept", file=sys.stderr)
        for problem in report.invalid_because:
            print(f"  invalid: {problem}", file=sys.stderr)
    if not probes:
        raise LoadError("the sweep was interrupted before its first rate was done")
    data = {
        "kind": "headway-load-sweep",
        "knee_rps": knee(probes),
        "attainment": options.attainment,
        "probes": [{"rate": p.rate, "is_kept": p.is_kept, "report": to_json(p.report)} for p in probes],
    }
    markdown = sweep_markdown(probes, options.attainment)
    _publish(data, markdown, lambda: sweep_html(probes, options.attainment), options)
    return 0 if knee(probes) is not None else EXIT_FAILED


def _selftest(options: argparse.Namespace) -> int:
    """Hold many streams of a local server that only streams; print how dear and how late the driver is."""
    result = selftest(options.streams, options.tokens_per_s, options.duration_s, Console(stderr=True))
    _publish(result, selftest_markdown(result), lambda: selftest_html(result), options)
    return 0 if result.has_passed else EXIT_FAILED


def _experiments(options: argparse.Namespace) -> int:
    """Measure the classic claims about LLM serving on this machine: a table of claim and measurement each."""
    outcomes = experiments.run_experiments(options)
    markdown = outcomes_markdown(outcomes)
    _publish(outcomes_json(outcomes), markdown, lambda: outcomes_html(outcomes), options)
    return 0


def _echo(options: argparse.Namespace) -> int:
    """Serve fixed tokens at a fixed pace on 127.0.0.1 until Ctrl-C."""
    pace = Pace(ttft_ms=options.ttft_ms, itl_ms=options.itl_ms, jitter=options.jitter)
    with contextlib.suppress(KeyboardInterrupt):
        run_echo(pace, "127.0.0.1", options.port, lambda port: print(f"http://127.0.0.1:{port}", flush=True))
    return 0
