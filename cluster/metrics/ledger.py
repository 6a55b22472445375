"""The ledger's figures as samples."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from cluster.metrics import catalogue as c
from cluster.metrics.catalogue import Sample
from router.ledger import Ledger
from router.tenants import Tenant

MAX_TENANTS: Final = 50


def ledger_samples(ledger: Ledger, now: float) -> Iterator[Sample]:
    """Read them all; `now` is on the ledger's clock."""
    yield Sample(c.LEDGER_ROUTERS, (), ledger.num_routers)
    for tenant in islice(ledger.active_tenants(), MAX_TENANTS):
        yield from _left(tenant, ledger, now)


def _left(tenant: Tenant, ledger: Ledger, now: float) -> Iterator[Sample]:
    left = ledger.left(tenant.name, now)
    if left is None:
        return
    for limit, is_set, value in (
        ("requests", tenant.rpm, left.requests),
        ("tokens", tenant.tpm, left.tokens),
        ("slots", tenant.max_concurrent, left.slots),
    ):
        if is_set is not None:
            yield Sample(c.QUOTA_LEFT, (tenant.name, limit), value)
