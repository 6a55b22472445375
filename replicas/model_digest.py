"""Identity of a model's files, cheap enough for every start."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEAD_BYTES = 1 << 20


def file_key(path: Path) -> str:
    """Short name for a file's content: equal for copies, whatever their folder and time."""
    digest = hashlib.sha256()
    _add_samples(digest, path)
    return digest.hexdigest()[:16]


def files_digest(folder: Path, weights: Sequence[Path]) -> bytes:
    """Hash config.json and, per weight file, its size, its head (names, shapes) and samples of its bytes.

    Two different sets of weights of equal layout differ in some sample unless nearly all bytes agree; the
    model's own output on a fixed prompt, hashed beside this one, covers that rest.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights:
        digest.update(path.name.encode())
        _add_samples(digest, path)
    return digest.digest()


def _add_samples(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f":{size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
