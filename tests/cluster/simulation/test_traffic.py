import statistics
from itertools import pairwise

import pytest

from cluster.simulation.traffic import Mix, drawn, prompt, replay
from load.trace import Trace, TraceRow
from tests.cluster.simulation.small_world import TRACE

MIX = Mix(shares={0: 0.5, 2: 0.5}, max_tokens=200, seed=1)


def test_a_replay_begins_at_zero_and_keeps_the_gaps() -> None:
    trace = Trace(name="t", rows=(TraceRow(5.0, 10, 3), TraceRow(7.5, 20, 4)), has_arrivals=True)
    arrivals = list(replay(trace, MIX))
    assert [(a.at_s, len(a.prompt_ids), a.output_tokens) for a in arrivals] == [(0.0, 10, 3), (2.5, 20, 4)]


def test_what_is_too_long_is_cut() -> None:
    trace = Trace(name="t", rows=(TraceRow(0.0, 500, 3), TraceRow(0.0, 150, 90)), has_arrivals=True)
    assert all(len(a.prompt_ids) + a.output_tokens < 200 for a in replay(trace, MIX))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_drawn_arrivals_have_the_rate_and_the_spread_asked_for(cv: float) -> None:
    times = [a.at_s for a in drawn(TRACE, MIX, lambda _: 10.0, 1000.0, cv)]
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) == pytest.approx(10_000, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_nothing_comes_at_a_rate_of_zero() -> None:
    times = [a.at_s for a in drawn(TRACE, MIX, lambda now: 5.0 if now > 50 else 0.0, 100.0, 1.0)]
    assert min(times) > 50


def test_a_client_keeps_its_tier() -> None:
    tiers: dict[str, set[int]] = {}
    for arrival in drawn(TRACE, MIX, lambda _: 10.0, 30.0, 1.0):
        tiers.setdefault(arrival.client, set()).add(arrival.tier)
    assert all(len(found) == 1 for found in tiers.values())


def test_prompts_share_what_their_blocks_share() -> None:
    first, second = prompt((1, 2, 3), 16, 40), prompt((1, 2, 9), 16, 48)
    assert first[:32] == second[:32]
    assert first[32:40] != second[32:40]
    assert (len(first), len(second)) == (40, 48)


def test_drawn_prompts_share_nothing() -> None:
    arrivals = list(drawn(TRACE, MIX, lambda _: 10.0, 100.0, 1.0))
    assert len({a.prompt_ids[:2] for a in arrivals}) == len(arrivals)
