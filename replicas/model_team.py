"""Threads that help with the tiles of int8 products (model_int8_kernels.py).

Products follow each other within microseconds, so a helper looks for the next one for a while before it goes
to sleep. Nothing waits for it to wake: what it does not take in time, the caller does.
"""

import threading
from typing import Final

import numpy as np

from replicas import model_int8_kernels as kernels

_PATIENCE: Final = 20_000
"""Looks before a helper sleeps, less than a millisecond: it bridges what lies between two steps."""


class Team:
    """`num_threads` includes the caller, of which there is one at a time."""

    def __init__(self, num_threads: int) -> None:
        self.state = np.zeros(kernels.NUM_CELLS, dtype=np.int64)
        self._bell = threading.Condition()
        self._num_asleep = 0
        for i in range(num_threads - 1):
            threading.Thread(target=self._help, name=f"product-{i}", daemon=True).start()

    def wake(self) -> None:
        """Call before a product: helpers that sleep may then still be in time for it."""
        if self._num_asleep:
            with self._bell:
                self._bell.notify_all()

    def _help(self) -> None:
        while True:
            kernels.follow(self.state, _PATIENCE)
            with self._bell:
                self._num_asleep += 1
                self._bell.wait()
                self._num_asleep -= 1


def open_team(num_threads: int) -> Team | None:
    """Return a team; None where the CPU lacks what its kernels need."""
    return Team(num_threads) if kernels.available() else None
