"""Policy: what a user may ask of the autoscaler. Nonsense is refused here, with the reason."""

from typing import Annotated, Final

import msgspec

from router.tenants import TenantError, Tier, check_tiers

Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
MAX_REPLICAS: Final = 10_000
COLD_STARTS_BEFORE_DOWN: Final = 5.0
"""A replica that goes and is wanted back costs a cold start: wait for several before it may go."""


class PolicyError(ValueError):
    """A policy that contradicts itself; one line."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas, and what is promised to whom. Raises PolicyError when it makes no sense."""

    min_replicas: Count = 1
    """Kept whatever the signals say or fail to say; 0 = none without work."""
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1
    tiers: tuple[Tier, ...] = ()
    """Whose `ttft_target_ms` and `itl_target_ms` are to hold."""
    utilisation: Share = 0.85
    """Share of a replica's time that the demand may take."""
    kv_utilisation: Share = 0.9
    """Share of the KV pool that running and waiting sequences may want."""
    demand_span_s: Seconds = 30.0
    """Demand is the highest rate of the last three spans of so long."""
    downscale_margin: Share = 0.8
    """A replica goes only when what is left would be needed to no more than this share."""
    downscale_delay_s: Seconds | None = None
    """How long that must have held; None = five cold starts."""
    to_zero_delay_s: Seconds | None = None
    """How long there must have been no work before the last replica goes; None = as the others."""
    cold_start_s: Seconds = 60.0
    """From the decision to a replica that serves, until one has been measured."""

    def __post_init__(self) -> None:
        if self.min_replicas > self.max_replicas:
            raise PolicyError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        try:
            if self.tiers:
                check_tiers(self.tiers)
        except TenantError as error:
            raise PolicyError(f"tiers: {error}") from None

    def down_delay_s(self, cold_start_s: float) -> float:
        """How long less must have been needed before a replica may go."""
        return self.downscale_delay_s or COLD_STARTS_BEFORE_DOWN * cold_start_s

    def zero_delay_s(self, cold_start_s: float) -> float:
        """The same for the last replica."""
        return self.to_zero_delay_s or self.down_delay_s(cold_start_s)
