"""Threads that share the work of a kernel call and sleep in between.

numba's own pool spins between calls, as torch's does: on two cores they take each other's time and the
router's, and where another process runs, every call waits for a thread that is not. Here the caller works
too, alone if there is little to do, and whoever waits sleeps.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any


class Crew:
    """Runs kernels that release the GIL; `num_threads` includes the caller."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1, "attention") if num_threads > 1 else None

    def run(
        self,
        kernel: Callable[..., None],  # its last two arguments are the bounds of its share
        args: tuple[Any, ...],
        count: int,  # items of work
    ) -> None:
        """Call `kernel` once per thread, with shares of `count` that differ by one item at most."""
        if self._pool is None:
            kernel(*args, 0, count)
            return
        size, rest = divmod(count, self.num_threads)
        bounds = [i * size + min(i, rest) for i in range(self.num_threads + 1)]
        (first, last), *others = pairwise(bounds)
        futures = [self._pool.submit(kernel, *args, *share) for share in others]
        kernel(*args, first, last)
        for future in futures:
            future.result()
