"""Zeroed memory in pages of 2 MiB where the kernel has them: reading it misses fewer translations."""

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def large_zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array that takes memory only where it is written to, in pieces of a page."""
    count = math.prod(shape)
    num_bytes = count * np.dtype(dtype).itemsize
    if num_bytes == 0:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
