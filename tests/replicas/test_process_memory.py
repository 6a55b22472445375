import mmap
import re
from pathlib import Path

from replicas.process_memory import return_memory

SIZE = 64 << 20


def resident_file_mb() -> float:
    found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def test_pages_of_mapped_files_are_given_back_and_keep_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * SIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=3) as mapped:
        mapped[5] = ord("b")
        assert mapped.rfind(b"b") == 5  # touches every page
        before = resident_file_mb()
        return_memory([path])
        assert before - resident_file_mb() > 32
        assert mapped[:8] == b"aaaaabaa"


def test_other_files_stay_resident(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"a" * SIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapped:
        assert mapped.find(b"b") == -1
        before = resident_file_mb()
        return_memory([tmp_path / "weights"])
        assert before - resident_file_mb() < 32
