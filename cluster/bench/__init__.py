"""`headway bench`: one command per claim. Each prints one JSON object with --json."""

import argparse
from collections.abc import Callable

Command = Callable[[argparse.Namespace], dict[str, object]]


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the bench commands; each sets `bench`, a function from arguments to a report."""
    # Here, not above: some import torch, which whoever takes a module of this package has no use for.
    from cluster.bench import (
        autoscaling,
        batching,
        engine,
        fairness,
        fidelity,
        floor,
        itl,
        kv,
        limits,
        metrics,
        overhead,
        overload,
        quality,
        router,
        routing,
        scheduler,
        speculation,
        steps,
        watch,
    )

    commands = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCH")
    for module in (
        scheduler,
        kv,
        engine,
        batching,
        itl,
        quality,
        overhead,
        limits,
        metrics,
        router,
        fairness,
        routing,
        overload,
        autoscaling,
        floor,
        speculation,
        steps,
        watch,
        fidelity,
    ):
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        module.add_arguments(command)
        command.set_defaults(bench=module.run)
