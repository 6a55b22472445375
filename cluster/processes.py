"""Ending every process that this one started, and no other. Linux only."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

PR_SET_CHILD_SUBREAPER: Final = 36


def adopt_orphans() -> None:
    """Make descendants whose parent dies children of this process instead of init's.

    Without it a process that outlives its parent (HAProxy, Ray's workers) could no longer be told from
    those of others.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the reaper of child processes")


def descendants() -> list[int]:
    """Process ids of all living descendants of this process, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # pid (command) state parent ...; the command may hold blanks and parentheses.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # it has just ended
            if state not in ("Z", "X"):
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        inner = children.get(queue.pop(), [])
        found += inner
        queue += inner
    return found


def end_descendants(
    grace_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Ask all descendants to end, kill those left after `grace_s` seconds; return when all are gone."""
    deadline = clock() + grace_s
    _signal_all(signal.SIGTERM)
    while descendants():
        _reap()
        if clock() > deadline:
            _signal_all(signal.SIGKILL)
        sleep(0.02)
    _reap()


def _signal_all(number: signal.Signals) -> None:
    for process in descendants():
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _reap() -> None:
    """Collect the children that have ended. Whoever waits for one of them finds it gone."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
