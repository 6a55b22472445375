from cluster.metrics import catalogue as c
from cluster.metrics.ledger import ledger_samples
from router.ledger import Ledger
from router.quota_messages import Amounts, Ask, Exchange, Hello
from router.tenants import Catalogue, Tenant


def test_what_is_left_shows_for_tenants_that_used_something_and_only_for_limits_they_have() -> None:
    ledger = Ledger(epoch=1, draw_session=lambda: 7)
    tenants = (Tenant(name="acme", tier="t", tpm=1000), Tenant(name="idle", tier="t", rpm=5))
    ledger.replace_catalogue(Catalogue(version="1", tenants=tenants), 0.0)
    ledger.hello(Hello(router="a", number=1), 0.0)
    ledger.exchange(Exchange(session=7, number=1, asks=(Ask("acme", Amounts(), (400,)),)), 2.0)
    seen = {(sample.metric, sample.labels): sample.value for sample in ledger_samples(ledger, 2.0)}
    assert seen == {(c.LEDGER_ROUTERS, ()): 1, (c.QUOTA_LEFT, ("acme", "tokens")): 600.0}
