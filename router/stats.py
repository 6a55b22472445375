"""Stats: what a router knows of its replicas, for GET /stats."""

from collections.abc import Mapping
from typing import Any

import msgspec

from replicas.api import ReplicaLoad
from router.transport_times import TransportSummary


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /stats."""

    replicas: dict[str, dict[str, Any]] = {}
    """Name -> last report. On the wire a ReplicaLoad is positional; here people read it by name."""
    transport_ms: TransportSummary = TransportSummary()

    @classmethod
    def of(cls, loads: Mapping[str, ReplicaLoad], transport_ms: TransportSummary) -> "Stats":
        replicas = {name: _named(load) for name, load in loads.items()}
        return cls(replicas=replicas, transport_ms=transport_ms)


def _named(load: ReplicaLoad) -> dict[str, Any]:
    return msgspec.structs.asdict(load) | {"tiers": [msgspec.structs.asdict(tier) for tier in load.tiers]}
