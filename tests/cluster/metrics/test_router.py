from cluster.metrics import catalogue as c
from cluster.metrics.catalogue import Buckets, Metric
from cluster.metrics.router import measures_samples
from router.measures import RouterMeasures
from router.tenants import Tier


def values(measures: RouterMeasures) -> dict[tuple[Metric, tuple[str, ...]], float | Buckets]:
    return {(sample.metric, sample.labels): sample.value for sample in measures_samples(measures)}


def test_a_promise_that_breaks_shows_in_every_figure_of_it() -> None:
    now = [0.0]
    measures = RouterMeasures([Tier(name="gold", level=0, ttft_target_ms=100.0, itl_target_ms=20.0)])
    timing = measures.begin_answer(0, 0.0, lambda: now[0])
    for at in (0.2, 0.3):
        now[0] = at
        timing.wrote(0, round(at * 10) - 1, False)
    timing.end()
    seen = values(measures)
    gold = ("gold",)
    assert (seen[c.LATE_STARTS, gold], seen[c.LATE_GAPS, gold]) == (1, 1)
    assert (seen[c.ANSWERS, ("gold", "yes")], seen[c.ANSWERS, ("gold", "no")]) == (0, 1)
    assert (seen[c.TTFT_TARGET, gold], seen[c.ITL_TARGET, gold]) == (100.0, 20.0)


def test_a_tier_without_targets_has_no_series_of_them() -> None:
    seen = values(RouterMeasures([Tier(name="free", level=0)]))
    assert (c.TTFT_TARGET, ("free",)) not in seen
    assert (c.ITL_TARGET, ("free",)) not in seen


def test_moved_requests_are_counted() -> None:
    measures = RouterMeasures()
    measures.num_resumed, measures.num_withdrawn = 2, 3
    measures.note_choice(100, 0.5)
    seen = values(measures)
    assert (seen[c.RESUMED, ()], seen[c.WITHDRAWN, ()]) == (2, 3)
    assert (seen[c.ROUTED_TOKENS, ()], seen[c.MATCHED_TOKENS, ()]) == (100, 50)
