"""Service that travels from one router's counters to another's."""

from router.service_tally import ServiceTally


def test_what_one_router_serves_is_counted_by_another_per_tier_and_tenant() -> None:
    counted: list[tuple[int, str, float]] = []
    here = ServiceTally(lambda *_: None)
    there = ServiceTally(lambda tier, tenant, service: counted.append((tier, tenant, service)))
    here.add(0, "acme", 3.0)
    here.add(0, "acme", -1.0)
    here.add(2, "acme", 5.0)
    there.add_charges(here.take_charges())
    assert counted == [(0, "acme", 2.0), (2, "acme", 5.0)]
    assert here.take_charges() == {}
    assert there.take_charges() == {}  # told once, not passed on
