"""`python -m load`: the load tool without the rest of Headway."""

import argparse
import sys

from load.commands import add_parsers
from load.exit import guarded


def main() -> int:
    """Run one load command; returns its exit code."""
    return guarded(_run, "error")


def _run() -> int:
    parser = argparse.ArgumentParser(prog="python -m load", description="Load generator for OpenAI servers.")
    add_parsers(parser)
    options = parser.parse_args()
    exit_code: int = options.load(options)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
