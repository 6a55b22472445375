"""How slow work reports itself."""

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, float | None], None]
"""progress(what is being done, share done in [0, 1]; None = unknown)."""


def silent(what: str, share: float | None) -> None:
    """Report nothing."""
