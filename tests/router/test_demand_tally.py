from replicas.api import FinishReason, TokenDelta
from router.counters import ITL_EDGES_MS, TTFT_EDGES_MS
from router.demand_tally import FIRST_GUESS_TOKENS, DemandTally
from router.dispatch import Waiting
from router.measures import RouterMeasures
from router.tenants import Tier


def bucket(edges: tuple[float, ...], value: float) -> int:
    return edges.index(value)


def ended(num_tokens: int) -> TokenDelta:
    return TokenDelta(1, 0, 0, [5] * num_tokens, FinishReason.LENGTH)


def waiting(key: int, tier: int, num_tokens: int, max_tokens: int) -> Waiting:
    return Waiting(
        key=key,
        tenant="t",
        tier=tier,
        num_outputs=1,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        queued_at=0.0,
    )


def test_reports_are_numbered_and_cumulative() -> None:
    tally = DemandTally("router", 7)
    tally.note_request(1, 100, 2, 50)
    first = tally.report((), RouterMeasures())
    tally.note_request(1, 30, 1, 10)
    tally.note_refusal(1)
    second = tally.report((), RouterMeasures())
    assert (first.router, first.epoch, first.number, second.number) == ("router", 7, 1, 2)
    (before,), (after,) = first.tiers, second.tiers
    assert (before.tier, before.num_requests, before.num_rejected) == (1, 1, 0)
    assert (before.input_tokens, before.output_tokens) == (100, 100)
    assert (after.num_requests, after.num_rejected) == (2, 1)
    assert (after.input_tokens, after.output_tokens) == (130, 110)


def test_latencies_are_those_that_the_router_measured() -> None:
    now = [100.0]
    tier = Tier(name="only", level=0, itl_target_ms=50.0)
    measures = RouterMeasures((tier,))
    answers = [measures.begin_answer(0, 99.0, lambda: now[0]) for _ in range(2)]
    for answer in answers:
        answer.wrote(0, 1, False)
    now[0] += 0.02
    answers[0].wrote(0, 2, False)
    now[0] += 0.04
    tally = DemandTally("router", 1)
    tally.note_request(0, 1, 1, 1)
    (counted,) = tally.report((), measures).tiers
    assert counted.ttft[bucket(TTFT_EDGES_MS, 1000.0)] == 2
    assert counted.itl[bucket(ITL_EDGES_MS, 20.0)] == 1
    assert (sum(counted.ttft), sum(counted.itl), counted.num_stalled) == (2, 1, 1)


def test_output_is_expected_as_long_as_it_has_been_lately() -> None:
    tally = DemandTally("router", 1)
    tally.note_request(0, 1, 1, 8000)
    for _ in range(300):
        tally.note_delta(0, ended(40), True)
    for _ in range(1000):
        tally.note_delta(0, ended(20), True)
    tally.note_request(0, 1, 1, 8000)
    tally.note_request(0, 1, 2, 5)  # on average others bring more
    assert tally.report((), RouterMeasures()).tiers[0].output_tokens == FIRST_GUESS_TOKENS + 20 + 40


def test_what_waits_is_told_by_tier() -> None:
    tally = DemandTally("router", 1)
    entries = [waiting(1, 0, 10, 4), waiting(2, 2, 300, 8000), waiting(3, 2, 200, 6)]
    first, second = tally.report(entries, RouterMeasures()).tiers
    assert (first.tier, first.queued_input_tokens, first.queued_output_tokens) == (0, 10, 4)
    assert (second.queued_input_tokens, second.queued_output_tokens) == (500, FIRST_GUESS_TOKENS + 6)


def test_cached_tokens_are_counted_when_they_are_known() -> None:
    tally = DemandTally("router", 1)
    tally.note_delta(0, TokenDelta(1, 0, 0, [5], num_cached_tokens=64), True)
    tally.note_delta(0, TokenDelta(1, 0, 1, [5], num_cached_tokens=80), False)  # its other output
    tally.note_delta(0, TokenDelta(1, 0, 0, [5]), False)
    assert tally.report((), RouterMeasures()).tiers[0].cached_tokens == 64
