"""Giving memory back to the system after loading: what is freed is not always returned by itself."""

import ctypes
import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_MADV_PAGEOUT: Final = 21
_MAPS: Final = Path("/proc/self/maps")


def return_memory(files: Iterable[Path]) -> None:
    """Return freed heap, and the pages of mapped `files` that nobody needs just now.

    Fused and quantised layers leave hundreds of MB behind: in the allocator, and as resident pages of the
    weight files they were made from, which stay mapped while any of their tensors is in use. Pages that
    are needed come back from the page cache. MADV_PAGEOUT, unlike MADV_DONTNEED, keeps pages that were
    written to. Does nothing where the system offers none of it.
    """
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in _mappings(files):
        libc.madvise(start, end - start, _MADV_PAGEOUT)


def _mappings(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Address ranges at which this process has mapped one of the files."""
    names = {str(file.resolve()) for file in files}
    ranges = []
    for line in _MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in names:
            start, _, end = fields[0].partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges
