"""What a router counts: the promise, the gaps, the tenants."""

from typing import Any

import pytest

from router.access_log import AccessLine
from router.app import build_app
from router.measures import NO_TIER, OTHER_TENANTS, AnswerTiming, RouterMeasures
from router.tenants import Tier
from router.text import TextCodec
from tests.router.asgi_client import CHAT, HI, begin
from tests.router.fake_backend import FakeBackend

TIERS = (
    Tier(name="gold", level=0, ttft_target_ms=100.0, itl_target_ms=20.0),
    Tier(name="free", level=1),
)


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def began(level: int = 0) -> tuple[RouterMeasures, AnswerTiming, Clock]:
    measures, clock = RouterMeasures(TIERS), Clock()
    return measures, measures.begin_answer(level, clock.now, clock), clock


def wrote(timing: AnswerTiming, clock: Clock, after_s: float, num_tokens: int, last: bool = False) -> None:
    clock.now += after_s
    timing.wrote(0, num_tokens, last)


def line(**changes: Any) -> AccessLine:
    given: dict[str, Any] = {
        "at": 0.0,
        "request_id": "r",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "code": None,
        "tenant": "acme",
        "key_id": "",
        "tier": "gold",
        "level": 0,
        "model": "m",
        "stream": True,
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "completion_tokens": 3,
        "queue_wait_ms": 2.0,
        "first_byte_ms": 1.0,
        "duration_ms": 40.0,
    }
    return AccessLine(**given | changes)


def test_the_first_token_counts_once_and_gaps_after_it() -> None:
    measures, timing, clock = began()
    wrote(timing, clock, 0.050, 1)
    wrote(timing, clock, 0.010, 2)
    wrote(timing, clock, 0.010, 3, last=True)
    timing.end()
    gold = measures.tiers["gold"]
    assert gold.ttft_ms.num_observed == 1
    assert gold.ttft_ms.sum == pytest.approx(50.0)
    assert gold.itl_ms.num_observed == 2
    assert gold.itl_ms.sum == pytest.approx(20.0)
    assert (gold.num_kept, gold.num_broken, gold.num_late_starts, gold.num_late_gaps) == (1, 0, 0, 0)


def test_several_tokens_in_one_event_are_one_gap_and_zeros() -> None:
    measures, timing, clock = began()
    wrote(timing, clock, 0.0, 1)
    wrote(timing, clock, 0.018, 4)
    gold = measures.tiers["gold"]
    assert gold.itl_ms.num_observed == 3
    assert gold.itl_ms.counts[0] == 2
    assert gold.itl_ms.sum == pytest.approx(18.0)


def test_a_late_first_token_breaks_the_promise() -> None:
    measures, timing, clock = began()
    wrote(timing, clock, 0.101, 1, last=True)
    timing.end()
    gold = measures.tiers["gold"]
    assert (gold.num_late_starts, gold.num_kept, gold.num_broken) == (1, 0, 1)


@pytest.mark.parametrize(("num_late", "kept"), [(1, 1), (2, 0)])
def test_one_late_gap_in_a_hundred_keeps_the_promise(num_late: int, kept: int) -> None:
    measures, timing, clock = began()
    for token in range(101):
        wrote(timing, clock, 0.021 if 0 < token <= num_late else 0.010, token + 1)
    timing.end()
    gold = measures.tiers["gold"]
    assert (gold.num_late_gaps, gold.num_kept) == (num_late, kept)


def test_a_tier_without_targets_keeps_every_promise() -> None:
    measures, timing, clock = began(level=1)
    wrote(timing, clock, 9.0, 1)
    wrote(timing, clock, 9.0, 2)
    timing.end()
    assert (measures.tiers["free"].num_kept, measures.tiers["free"].num_broken) == (1, 0)


def test_a_stream_that_stalls_shows_before_its_gap_ends() -> None:
    measures, timing, clock = began()
    assert measures.open_gap_ms("gold") == 0.0
    wrote(timing, clock, 0.010, 1)
    clock.now += 3.0
    assert measures.open_gap_ms("gold") == pytest.approx(3000.0)
    assert measures.open_gap_ms("free") == 0.0
    timing.wrote(0, 2, True)
    clock.now += 3.0
    assert measures.open_gap_ms("gold") == 0.0
    timing.end()
    assert measures.open_answers == set()


def test_an_answer_without_a_token_is_neither_kept_nor_broken() -> None:
    measures, timing, _ = began()
    timing.end()
    timing.end()
    assert (measures.tiers["gold"].num_kept, measures.tiers["gold"].num_broken) == (0, 0)


def test_requests_count_by_tier_outcome_and_code() -> None:
    measures = RouterMeasures(TIERS)
    measures.note_request(line())
    measures.note_request(line(outcome="refused", code="predicted_wait", level=1, completion_tokens=0))
    measures.note_request(line(route="/v1/models"))
    assert measures.tiers["gold"].requests == {("ok", ""): 1}
    assert measures.tiers["free"].requests == {("refused", "predicted_wait"): 1}
    gold = measures.tiers["gold"]
    assert (gold.prompt_tokens, gold.cached_tokens, gold.output_tokens) == (7, 2, 3)
    assert gold.duration_ms.num_observed == 1


def test_a_request_of_nobody_has_no_tier_and_no_tenant() -> None:
    measures = RouterMeasures(TIERS)
    refused: dict[str, Any] = {"outcome": "refused", "code": "invalid_api_key"}
    measures.note_request(line(tenant="", tier="", level=None, **refused))
    assert measures.tiers[NO_TIER].requests == {("refused", "invalid_api_key"): 1}
    assert measures.tenants == {}


def test_tenants_beyond_the_cap_share_one_label() -> None:
    measures = RouterMeasures(TIERS, max_tenants=2)
    for name in ("a", "b", "c", "d", "a"):
        measures.note_request(line(tenant=name))
    assert {name: sum(one.requests.values()) for name, one in measures.tenants.items()} == {
        "a": 2,
        "b": 1,
        OTHER_TENANTS: 2,
    }


def test_matched_tokens_are_part_of_the_routed_ones() -> None:
    measures = RouterMeasures(TIERS)
    measures.note_choice(100, 0.75)
    measures.note_choice(50, 0.0)
    assert (measures.routed_tokens, measures.matched_tokens) == (150, 75)


async def test_a_stream_is_timed_where_its_events_are_written(
    backend: FakeBackend, byte_level: TextCodec
) -> None:
    measures = RouterMeasures()
    call = begin(build_app(backend, byte_level, measures=measures), CHAT, HI | {"stream": True})
    generation = await backend.started()
    for token in (65, 66, 67):
        generation.push([token + 3])
        assert await call.next_chunk()
    assert len(measures.open_answers) == 1
    generation.stop()
    await call.finish()
    interactive = measures.tiers["interactive"]
    assert interactive.ttft_ms.num_observed == 1
    assert interactive.itl_ms.num_observed == 3
    assert interactive.requests == {("ok", ""): 1}
    assert interactive.output_tokens == 4
    assert measures.prepare_ms.num_observed == 1
    assert measures.open_answers == set()
