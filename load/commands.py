"""`headway load`: the commands. Each sets `load`, a function from the options to an exit code."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from load import options as opt
from load.errors import LoadError
from load.live import LiveView
from load.report import Report, build_report, to_json, write_report
from load.run import Job, run
from load.table import to_markdown

EXIT_FAILED: Final = 1
EXIT_MISUSED: Final = 2
EXIT_INVALID: Final = 3
"""The run went through, but its figures cannot be trusted."""

Command = Callable[[argparse.Namespace], int]


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the load commands to `parser`."""
    commands = parser.add_subparsers(title="load commands", required=True, metavar="LOAD")
    one = commands.add_parser("run", help="drive a load and measure it", description=_run.__doc__)
    opt.add_server_options(one)
    opt.add_workload_options(one)
    opt.add_arrival_options(one)
    opt.add_run_options(one)
    _add_outputs(one)
    one.set_defaults(load=_guarded(_run))


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print the report as one JSON object on stdout")
    group.add_argument("--out", type=Path, metavar="FILE", help="write the JSON report")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write a Markdown report")
    group.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page")


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


def publish(report: Report, options: argparse.Namespace) -> int:
    """Write and print the report; returns the exit code."""
    if options.out is not None:
        write_report(report, options.out)
    markdown = to_markdown(report)
    if options.markdown is not None:
        options.markdown.write_text(markdown, "utf-8")
    if options.json:
        sys.stdout.write(msgspec.json.encode(to_json(report)).decode() + "\n")
    else:
        print(markdown)
    for problem in report.invalid_because:
        print(f"invalid: {problem}", file=sys.stderr)
    return 0 if report.is_valid else EXIT_INVALID
