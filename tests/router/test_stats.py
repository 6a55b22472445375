from typing import Any

import msgspec

from replicas.api import ReplicaLoad, TierLoad
from router.dispatch import QueueState
from router.histogram import WAIT_EDGES_MS
from router.measures import RouterMeasures
from router.stats import Stats
from router.tenants import Tier
from router.transport_times import TransportSummary


def shown() -> Any:
    measures = RouterMeasures([Tier(name="gold", level=0, itl_target_ms=50.0), Tier(name="free", level=3)])
    measures.tier(0).itl_ms.observe(12.0, 99)
    measures.tier(3).queue_wait_ms.observe(400.0)
    load = ReplicaLoad(num_running=3, tiers=(TierLoad(0, 3, 1, 20),))
    queues = {3: QueueState(2, 1.25)}
    stats = Stats.of("r1", {"a": load}, TransportSummary(), measures, queues, {"c", "b"})
    return msgspec.json.decode(msgspec.json.encode(stats))


def test_loads_are_shown_by_field_name() -> None:
    assert shown()["replicas"]["a"]["num_running"] == 3
    [tier] = shown()["replicas"]["a"]["tiers"]
    assert (tier["tier"], tier["num_running"], tier["num_waiting"], tier["queued_tokens"]) == (0, 3, 1, 20)
    assert tier["name"] == "gold"
    assert shown()["next_to_go"] == ["b", "c"]
    assert shown()["transport_ms"]["frame_to_router"]["p99"] == 0.0


def test_tiers_are_shown_by_name_with_their_queues() -> None:
    stats = shown()
    assert stats["router"] == "r1"
    assert list(stats["tiers"]) == ["gold", "free"]
    assert sum(stats["tiers"]["gold"]["itl_counts"]) == 99
    assert stats["tiers"]["gold"]["itl_target_ms"] == 50.0
    assert (stats["tiers"]["free"]["num_queued"], stats["tiers"]["free"]["oldest_s"]) == (2, 1.25)


def test_waits_in_the_queue_are_counted_by_tier() -> None:
    tiers = shown()["tiers"]
    assert sum(tiers["gold"]["queue_wait_counts"]) == 0
    assert tiers["free"]["queue_wait_counts"][WAIT_EDGES_MS.index(500.0)] == 1
