"""ServiceTally: service on its way between the fairness counters of all routers, through the ledger."""

from collections.abc import Callable, Mapping

ChargeTenant = Callable[[int, str, float], None]
"""Tier level, tenant, weighted service -> counted in this router's queues."""


class ServiceTally:
    """The ServiceCounters (router.quota_client) of a router. Counters are kept per tier and tenant."""

    def __init__(self, charge: ChargeTenant) -> None:
        """`charge` counts what other routers served."""
        self._charge = charge
        self._charges: dict[str, float] = {}

    def add(self, tier: int, tenant: str, service: float) -> None:
        """Note service of this router, already divided by the tenant's weight; negative = a refund."""
        key = f"{tier} {tenant}"
        self._charges[key] = self._charges.get(key, 0.0) + service

    def take_charges(self) -> Mapping[str, float]:
        taken, self._charges = self._charges, {}
        return taken

    def add_charges(self, charges: Mapping[str, float]) -> None:
        for key, service in charges.items():
            tier, _, tenant = key.partition(" ")
            self._charge(int(tier), tenant, service)
