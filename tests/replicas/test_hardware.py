from pathlib import Path

from replicas.hardware import available_cpus, available_memory_bytes


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def meminfo(folder: Path, available_kb: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kb} kB\n")
    return path


def test_a_cpu_quota_counts_as_so_many_cores(tmp_path: Path) -> None:
    free = available_cpus(cgroup(tmp_path, cpu_max="max 100000"))
    assert free >= 1
    assert available_cpus(cgroup(tmp_path, cpu_max="100000 100000")) == 1
    assert available_cpus(cgroup(tmp_path, cpu_max="20000 100000")) == 1
    assert available_cpus(tmp_path / "none") == free


def test_memory_is_what_the_kernel_says_is_available(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path, meminfo(tmp_path, 1000)) == 1_024_000


def test_a_memory_limit_counts_and_clean_page_cache_is_free(tmp_path: Path) -> None:
    folder = cgroup(
        tmp_path, memory_max="900000", memory_current="700000", memory_stat="anon 5\ninactive_file 300000\n"
    )
    assert available_memory_bytes(folder, meminfo(tmp_path, 1000)) == 500_000
    cgroup(tmp_path, memory_max="max")
    assert available_memory_bytes(folder, meminfo(tmp_path, 1000)) == 1_024_000
