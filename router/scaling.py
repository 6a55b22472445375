"""Scaling: what a router is told of the number of replicas, and why it is what it is."""

from collections.abc import Callable

import msgspec


class ScalingNote(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of the autoscaling policy."""

    at: float
    """Seconds since 1970."""
    target: int
    running: int
    reasons: list[str]


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster says of its replicas."""

    states: dict[str, int] = {}
    """Replicas by Serve's state, those that no router can see yet or any more included."""
    notes: list[ScalingNote] = []
    """The last decisions, the newest first; empty without autoscaling."""


ScalingSource = Callable[[], Scaling]
"""Returns what was last heard, at once."""
