from cluster import itl_targets
from replicas.config import EngineConfig
from router.tenants import Tier

TIERS = (Tier(name="fast", level=0, itl_target_ms=40.0), Tier(name="slow", level=1))


def test_only_tiers_that_promise_something_are_listed() -> None:
    assert itl_targets.promised(TIERS) == {0: 40.0}


def test_a_tier_has_the_target_that_the_engine_keeps_for_it() -> None:
    engine = EngineConfig(itl_target_ms=150.0, tier_itl_target_ms={0: 60.0})
    assert [tier.itl_target_ms for tier in itl_targets.settled(TIERS, engine)] == [60.0, 150.0]
