import msgspec

from replicas.api import ReplicaLoad, TierLoad
from router.stats import Stats
from router.transport_times import TransportSummary


def test_loads_are_shown_by_field_name() -> None:
    load = ReplicaLoad(num_running=3, tiers=(TierLoad(0, 3, 1, 20),))
    shown = msgspec.json.decode(msgspec.json.encode(Stats.of({"a": load}, TransportSummary())))
    assert shown["replicas"]["a"]["num_running"] == 3
    [tier] = shown["replicas"]["a"]["tiers"]
    assert (tier["tier"], tier["num_running"], tier["num_waiting"], tier["queued_tokens"]) == (0, 3, 1, 20)
    assert shown["transport_ms"]["frame_to_router"]["p99"] == 0.0
