"""ITL targets: what tiers promise and what engines are set to, brought together in one place."""

from collections.abc import Iterable

import msgspec

from replicas.config import EngineConfig
from router.tenants import Tier


def promised(tiers: Iterable[Tier]) -> dict[int, float]:
    """What the tiers promise of the gap between two tokens, by level; ms."""
    return {tier.level: tier.itl_target_ms for tier in tiers if tier.itl_target_ms is not None}


def settled(tiers: Iterable[Tier], engine: EngineConfig) -> tuple[Tier, ...]:
    """Return the tiers with the targets that the engine keeps for them."""
    targets = engine.tier_itl_target_ms
    return tuple(
        msgspec.structs.replace(tier, itl_target_ms=targets.get(tier.level, engine.itl_target_ms))
        for tier in tiers
    )
