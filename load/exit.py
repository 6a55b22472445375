"""How a command ends that the operating system fails: one line on stderr, and a stdout that is written."""

import os
import sys
from collections.abc import Callable
from typing import Final

EXIT_FAILED: Final = 1
EXIT_MISUSED: Final = 2


def guarded(run: Callable[[], int], name: str) -> int:
    """Return what `run` returns, or tell an OSError after `name` and return 2 if it is about a file, else 1.

    stdout is flushed here, where a full disk can still be told. A reader who has left is told nothing, nor
    is who pressed Ctrl-C. An error without a number does not come from the system, and is raised.
    """
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except OSError as error:
        _give_stdout_up()
        if error.errno is None:
            raise
        if not isinstance(error, BrokenPipeError):
            print(f"{name}: {reason(error)}", file=sys.stderr)
        return EXIT_FAILED if error.filename is None else EXIT_MISUSED
    except KeyboardInterrupt:
        return EXIT_FAILED


def reason(error: OSError) -> str:
    """Return what is wrong, after the name of the file if there is one."""
    words = error.strerror or str(error)
    return words if error.filename is None else f"{error.filename}: {words}"


def _give_stdout_up() -> None:
    """Keep the interpreter from trying again, when it ends, to write what cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
