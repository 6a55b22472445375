"""Tracing as the router sees it: a span per completion, its parts, and the context that travels on."""

from collections.abc import Mapping
from typing import Protocol


class Span(Protocol):
    """One request under observation."""

    @property
    def traceparent(self) -> str:
        """W3C trace context for whoever works on it further; empty when nobody is to record anything."""
        ...

    def part(self, name: str, began_at: float, ended_at: float) -> None:
        """Record a part of it; times of a monotonic clock, in seconds."""
        ...

    def end(self, attributes: Mapping[str, str | int]) -> None:
        """It is over, now."""
        ...


class Tracing(Protocol):
    """Begins spans."""

    def begin(self, traceparent: bytes, began_at: float) -> Span:
        """Return the span of a request; `traceparent` is the client's header, anything at all or empty."""
        ...


class Untraced:
    """Tracing that is off, and its span."""

    traceparent = ""

    def begin(self, traceparent: bytes, began_at: float) -> "Untraced":  # noqa: ARG002 - a Tracing
        return self

    def part(self, name: str, began_at: float, ended_at: float) -> None:
        """Record nothing."""

    def end(self, attributes: Mapping[str, str | int]) -> None:
        """Record nothing."""
