from collections import Counter

import pytest

from load.arrivals import parse_rate
from load.lengths import parse_lengths
from load.plan import Tenant
from load.tenants import Cast, Source
from load.trace import parse_trace
from load.workload import OpenLoop, UserPrompt, Workload, open_schedule, trace_schedule

WORKLOAD = Workload(
    seed=3, input_tokens=parse_lengths("uniform:10:99"), output_tokens=parse_lengths("uniform:5:50")
)
ALONE = Cast().sources


def source(name: str, share: float = 1.0, rate: float | None = None) -> Source:
    return Source(tenant=Tenant(name=name), share=share, rate=rate)


def changed(**fields: object) -> Workload:
    return Workload(**{name: getattr(WORKLOAD, name) for name in Workload.__struct_fields__} | fields)  # type: ignore[arg-type]


def test_a_script_depends_on_seed_and_index_alone() -> None:
    assert WORKLOAD.script(7, 0, 1.0) == WORKLOAD.script(7, 0, 1.0)
    assert WORKLOAD.script(7, 0, 1.0) != WORKLOAD.script(8, 0, 1.0)
    assert changed(seed=4).script(7, 0, 1.0) != WORKLOAD.script(7, 0, 1.0)


def test_no_two_prompts_are_alike() -> None:
    seeds = [WORKLOAD.script(i, 0, 0.0).turns[0].segments[0].seed for i in range(1000)]
    assert len(set(seeds)) == 1000


def test_shares_divide_the_arrivals() -> None:
    scripts = open_schedule(
        OpenLoop(profile=parse_rate("100", 100.0)), WORKLOAD, [source("a", 3.0), source("b", 1.0)]
    )
    counts = Counter(script.tenant for script in scripts)
    assert counts[0] / len(scripts) == pytest.approx(0.75, abs=0.02)


def test_a_tenant_with_a_rate_is_on_its_own() -> None:
    sources = [source("a"), source("b", 0.0, rate=5.0)]
    scripts = open_schedule(OpenLoop(profile=parse_rate("20", 200.0)), WORKLOAD, sources)
    counts = Counter(script.tenant for script in scripts)
    assert counts[0] / 200 == pytest.approx(20, rel=0.1)
    assert counts[1] / 200 == pytest.approx(5, rel=0.15)
    assert [script.at_s for script in scripts] == sorted(script.at_s for script in scripts)
    assert [script.index for script in scripts] == list(range(len(scripts)))


def test_one_tenants_arrivals_do_not_depend_on_the_others() -> None:
    def times_of_b(*others: Source) -> list[float]:
        sources = [*others, source("b", 0.0, rate=5.0)]
        scripts = open_schedule(OpenLoop(profile=parse_rate("20", 50.0)), WORKLOAD, sources)
        return [script.at_s for script in scripts if script.tenant == len(others)]

    assert times_of_b(source("a")) == times_of_b(source("a"), source("c"))


def test_groups_share_their_prefix() -> None:
    workload = changed(prefix_tokens=64, prefix_groups=3)
    systems = {workload.script(i, 0, 0.0).system for i in range(100)}
    assert len(systems) == 3
    assert {segment.num_tokens for (segment,) in systems} == {64}


def test_cancelled_turns_stop_within_their_answer() -> None:
    workload = changed(cancel_fraction=0.5)
    turns = [workload.script(i, 0, 0.0).turns[0] for i in range(1000)]
    stopped = [turn for turn in turns if turn.stop_after]
    assert len(stopped) == pytest.approx(500, abs=60)
    assert all(1 <= turn.stop_after <= turn.output_tokens for turn in stopped)


def test_slow_scripts_have_a_speed() -> None:
    workload = changed(slow_fraction=0.5, slow_bytes_per_s=77.0)
    speeds = Counter(workload.script(i, 0, 0.0).read_bytes_per_s for i in range(1000))
    assert set(speeds) == {0.0, 77.0}
    assert speeds[77.0] == pytest.approx(500, abs=60)


def test_sessions_think_between_their_turns() -> None:
    workload = changed(turns=parse_lengths("3"), think_s=2.0)
    scripts = [workload.script(i, 0, 0.0) for i in range(500)]
    assert all(script.turns[0].think_s == 0.0 for script in scripts)
    pauses = [turn.think_s for script in scripts for turn in script.turns[1:]]
    assert len(pauses) == 1000
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.15)


def test_user_prompts_are_taken_in_turn() -> None:
    workload = changed(prompts=(UserPrompt(prompt="a"), UserPrompt(prompt="b", output_tokens=9)))
    turns = [workload.script(i, 0, 0.0).turns[0] for i in range(3)]
    assert [turn.messages[0]["content"] for turn in turns] == ["a", "b", "a"]
    assert turns[1].output_tokens == 9


def test_lengths_of_a_trace_are_drawn_together() -> None:
    rows = parse_trace("input_tokens,output_tokens\n10,100\n20,200\n", "t").rows
    workload = changed(length_pairs=rows)
    pairs = {
        (turn.input_tokens, turn.output_tokens)
        for i in range(50)
        for turn in workload.script(i, 0, 0.0).turns
    }
    assert pairs == {(10, 100), (20, 200)}


def test_replayed_blocks_are_the_same_text_in_every_row() -> None:
    text = "arrival_s,input_tokens,output_tokens,hash_ids\n0,1200,5,0 1 2\n1,1100,6,0 1 9\n"
    first, second = trace_schedule(parse_trace(text, "t"), WORKLOAD, ALONE)
    assert first.turns[0].segments[:2] == second.turns[0].segments[:2]
    assert first.turns[0].segments[2] != second.turns[0].segments[2]
    assert [segment.num_tokens for segment in first.turns[0].segments] == [512, 512, 176]
    assert (first.at_s, second.at_s) == (0.0, 1.0)
    assert (first.turns[0].output_tokens, second.turns[0].output_tokens) == (5, 6)


def test_tokens_beyond_the_blocks_are_text_of_their_own() -> None:
    text = "arrival_s,input_tokens,output_tokens,hash_ids\n0,700,5,0\n"
    (script,) = trace_schedule(parse_trace(text, "t"), WORKLOAD, ALONE)
    assert [segment.num_tokens for segment in script.turns[0].segments] == [512, 188]


def test_a_client_of_a_trace_is_always_the_same_tenant() -> None:
    rows = "".join(f"{i},5,5,{i % 20}\n" for i in range(200))
    trace = parse_trace("arrival_s,input_tokens,output_tokens,client_id\n" + rows, "t")
    scripts = trace_schedule(trace, WORKLOAD, [source("a"), source("b")])
    tenants = {(row.client, script.tenant) for row, script in zip(trace.rows, scripts, strict=True)}
    assert len(tenants) == 20
    assert {tenant for _, tenant in tenants} == {0, 1}
