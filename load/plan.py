"""What a run will do, request by request: decided before the first byte is sent."""

from typing import Any

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of synthetic text: equal segments are equal text, so they share a prefix cache."""

    seed: int
    num_tokens: int


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One request of a script."""

    output_tokens: int
    segments: tuple[Segment, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    """Ready text instead of segments."""
    think_s: float = 0.0
    """Pause before it, counted from the end of the answer before."""
    stop_after: int = 0
    """Hang up after this many output events; 0 = never."""

    @property
    def input_tokens(self) -> int:
        """Tokens this turn adds; 0 when nobody counted them."""
        return sum(segment.num_tokens for segment in self.segments)


class Script(msgspec.Struct, frozen=True, array_like=True):
    """What one user does: a request, or a session whose turns each carry the whole conversation."""

    index: int
    tenant: int
    turns: tuple[Turn, ...]
    at_s: float = 0.0
    """When the first turn is due, in seconds from the start of the run."""
    system: tuple[Segment, ...] = ()
    """System message, the same for all scripts that have equal segments."""
    read_bytes_per_s: float = 0.0
    """How fast the answer is read; 0 = as fast as it comes."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One customer of the server under test."""

    name: str = "default"
    tier: str = "default"
    api_key: str | None = None
    weight: float = 1.0
    """Share this tenant is entitled to, for the fairness index."""
    body: dict[str, Any] = {}
    """Merged into the body of each of its requests."""
