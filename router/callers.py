"""Who asks. The first form knows one caller: everybody, at the soonest tier."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a request may do, derived from its headers alone."""

    tier: int = 0
    """Priority tier; smaller = sooner. A request's own `priority` can only add to it."""
    cache_salt: str = ""
    """Prefix blocks are shared only between callers of equal salt."""


Identify = Callable[[Mapping[bytes, bytes]], Caller]
"""Request headers (lower-case names) -> caller. Raises ApiError 401 or 403."""


def anybody(headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG001 - an Identify
    """Accept every request."""
    return Caller()
