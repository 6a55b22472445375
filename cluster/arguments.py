"""Types of command-line arguments: what is wrong with a value is said before anything starts."""

import argparse


def at_least_one(text: str) -> int:
    """A whole number, 1 or more."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def port(text: str) -> int:
    """A TCP port."""
    number = at_least_one(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port (1 to 65535)")
    return number
