"""What this process may use of the machine: CPU cores and memory, containers' limits included."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Count the cores this process may run on; a CPU quota below that counts as so many cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Return the bytes that can be allocated without swapping or breaking the cgroup's limit."""
    available = _stat(meminfo, "MemAvailable:") * 1024
    if not available:  # not Linux
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        # The kernel gives clean page cache back before it enforces the limit.
        cached = _stat(cgroup / "memory.stat", "inactive_file")
        available = min(available, int(limit) - int(used) + cached)
    return max(0, available)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _stat(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return 0
