"""Files that a user names, read in whole."""

from pathlib import Path
from typing import Final

from load.errors import LoadError

MAX_BYTES: Final = 1 << 28
"""Of one file: some devices never end."""


def read_file(path: Path, what: str) -> bytes:
    """Read `what`. Raises LoadError that says which file and why."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise LoadError(f"cannot read {what} {path}: {problem}") from error
    if len(data) > MAX_BYTES:
        raise LoadError(f"cannot read {what} {path}: more than {MAX_BYTES >> 20} MiB")
    return data
