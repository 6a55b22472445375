"""`headway load experiments`: runs them and puts claim beside measurement."""

import argparse
import shlex
import sys
from types import MappingProxyType
from typing import Final

from load.errors import LoadError
from load.experiments import batching, chunked_prefill, kv, max_num_seqs, overload, tiers
from load.experiments.headway import Lab, find_headway
from load.experiments.outcome import Outcome

EXPERIMENTS: Final = MappingProxyType(
    {module.NAME: module for module in (batching, max_num_seqs, chunked_prefill, tiers, overload, kv)}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `experiments`."""
    names = "; ".join(f"{name}: {module.HELP}" for name, module in EXPERIMENTS.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all. {names}")
    parser.add_argument("--quick", action="store_true", help="shorter runs, same proportions")
    parser.add_argument("--model", help="default: the one Headway takes by itself")
    parser.add_argument("--profile", default="h200-8b", help="of the GPU that is simulated (h200-8b)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--headway",
        type=shlex.split,
        metavar="COMMAND",
        help="how to call it (default: found beside this Python)",
    )


def run_experiments(options: argparse.Namespace) -> list[Outcome]:
    """Run the experiments asked for, one after the other. Raises LoadError."""
    unknown = set(options.names) - set(EXPERIMENTS)
    if unknown:
        raise LoadError(f"there is no experiment {sorted(unknown)[0]!r}; there are {', '.join(EXPERIMENTS)}")
    lab = Lab(
        command=tuple(options.headway or find_headway()),
        model=options.model,
        is_quick=options.quick,
        seed=options.seed,
        profile=options.profile,
    )
    outcomes = []
    for name in options.names or EXPERIMENTS:
        print(f"experiment {name}", file=sys.stderr)
        outcomes.append(EXPERIMENTS[name].run(lab))
    return outcomes
