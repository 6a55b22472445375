from replicas.api import FinishReason
from replicas.engine import Engine
from replicas.prefill_budget import FLOOR_TOKENS
from replicas.sequence import SequenceStatus
from replicas.step import Step
from replicas.step_time import CHUNK_MULTIPLE
from tests.replicas.fake_runner import (
    Clock,
    Collected,
    FakeRunner,
    engine,
    expected_output,
    request,
    run_until_idle,
)


def slices(step: Step) -> list[tuple[int, int, int]]:
    """(request id, start, new tokens) of each entry."""
    return [(e.sequence.request.request_id, e.start, e.num_new_tokens) for e in step.sequences]


def step_slices(built: Engine, runner: FakeRunner) -> list[tuple[int, int, int]]:
    built.step()
    built.scheduler.check_integrity()
    return slices(runner.steps[-1])


def test_prompts_are_chunked_by_the_token_budget_and_decodes_come_first() -> None:
    built, runner = engine(max_num_batched_tokens=10)
    built.add(request(1, 4), "a")
    assert step_slices(built, runner) == [(1, 0, 4)]
    built.add(request(2, 15), "a")
    assert step_slices(built, runner) == [(1, 4, 1), (2, 0, 9)]
    assert step_slices(built, runner) == [(1, 5, 1), (2, 9, 6)]
    assert step_slices(built, runner) == [(1, 6, 1), (2, 15, 1)]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    built, runner = engine(max_num_batched_tokens=10, max_model_len=10, chunked_prefill=False)
    built.add(request(1, 4), "a")
    built.add(request(2, 7, max_tokens=2), "a")
    assert step_slices(built, runner) == [(1, 0, 4)]
    assert step_slices(built, runner) == [(1, 4, 1), (2, 0, 7)]


def test_outputs_are_what_the_model_says_in_any_mix() -> None:
    built, _ = engine(max_num_batched_tokens=16, num_blocks=64)
    lengths = [3, 30, 17, 1, 50, 8, 22]
    for i, length in enumerate(lengths):
        built.add(request(i, length, max_tokens=5 + i), "a")
    seen = run_until_idle(built)
    for i, length in enumerate(lengths):
        prompt = request(i, length).prompt_ids
        assert seen.tokens[i, 0] == expected_output(prompt, 5 + i)
        assert seen.finished[i, 0] is FinishReason.LENGTH


def test_seats_are_limited_and_given_in_order_of_dispatch() -> None:
    built, runner = engine(max_num_seqs=2)
    for i in range(4):
        built.add(request(i, 3, max_tokens=2), "a")
    assert step_slices(built, runner) == [(0, 0, 3), (1, 0, 3)]
    assert step_slices(built, runner) == [(0, 3, 1), (1, 3, 1)]
    assert step_slices(built, runner) == [(2, 0, 3), (3, 0, 3)]


def test_when_blocks_run_out_the_latest_of_the_worst_tier_is_preempted() -> None:
    built, runner = engine(num_blocks=8, block_size=4, max_model_len=32, enable_prefix_caching=False)
    for request_id, tier in ((1, 1), (2, 0), (3, 1)):
        built.add(request(request_id, 3, max_tokens=20, tier=tier), "a")
    seen = Collected()
    while built.scheduler.num_preemptions == 0:
        seen.add(built.step())
    assert {entry[0] for entry in slices(runner.steps[-2])} == {1, 2, 3}
    assert {entry[0] for entry in slices(runner.steps[-1])} == {1, 2}
    run_until_idle(built, seen)
    for request_id in (1, 2, 3):
        assert seen.tokens[request_id, 0] == expected_output(request(request_id, 3).prompt_ids, 20)


def test_preemption_does_not_stop_the_others_of_the_step() -> None:
    built, runner = engine(num_blocks=6, block_size=4, max_model_len=24, enable_prefix_caching=False)
    built.add(request(1, 7, max_tokens=12), "a")
    built.add(request(2, 7, max_tokens=12), "a")
    while built.scheduler.num_preemptions == 0:
        built.step()
    assert [entry[0] for entry in slices(runner.steps[-1])] == [1]


def test_a_preempted_sequence_resumes_before_fresh_ones_of_its_tier() -> None:
    built, runner = engine(num_blocks=6, block_size=4, max_model_len=24, max_num_seqs=3)
    built.add(request(1, 7, max_tokens=12), "a")
    built.add(request(2, 7, max_tokens=12), "a")
    while built.scheduler.num_preemptions == 0:
        built.step()
    built.add(request(3, 2, max_tokens=2), "a")
    order: list[int] = []
    while built.has_work:
        built.step()
        order += [r for r, start, n in slices(runner.steps[-1]) if n > 1 and r not in order]
    assert order == [2, 3]


def test_a_better_tier_takes_the_seat_of_the_worst_running_one() -> None:
    built, runner = engine(max_num_seqs=2)
    built.add(request(1, 4, max_tokens=50, tier=1), "a")
    built.add(request(2, 4, max_tokens=50, tier=2), "a")
    built.step()
    built.add(request(3, 4, max_tokens=3, tier=0), "a")
    assert step_slices(built, runner) == [(1, 4, 1), (3, 0, 4)]
    seen = run_until_idle(built)
    assert seen.finished[2, 0] is FinishReason.LENGTH


def test_a_better_tier_computes_its_prompt_before_a_long_one_that_runs() -> None:
    built, runner = engine(max_num_batched_tokens=8)
    built.add(request(1, 30, tier=1), "a")
    assert step_slices(built, runner) == [(1, 0, 8)]
    built.add(request(2, 4, tier=1), "a")
    built.add(request(3, 5, tier=0), "a")
    assert step_slices(built, runner) == [(3, 0, 5), (1, 8, 3)]


def test_a_long_prompt_that_runs_is_not_kept_from_its_end_by_a_better_tier() -> None:
    clock = Clock()
    built, runner = engine(clock, max_num_batched_tokens=8, aging_s=10.0)
    built.add(request(1, 12, tier=1), "a")
    built.step()
    built.add(request(2, 8, max_tokens=1, tier=0), "a")
    assert step_slices(built, runner) == [(2, 0, 8)]
    clock.now = 10.0
    built.add(request(3, 8, max_tokens=1, tier=0), "a")
    assert step_slices(built, runner) == [(1, 8, 4), (3, 0, 4)]


def test_a_running_prompt_whose_seat_a_better_tier_takes_is_not_computed() -> None:
    built, runner = engine(max_num_seqs=1, max_num_batched_tokens=8)
    built.add(request(1, 12, tier=1), "a")
    built.step()
    built.add(request(2, 4, tier=0), "a")
    assert step_slices(built, runner) == [(2, 0, 4)]


def test_an_equal_tier_never_takes_a_seat() -> None:
    built, runner = engine(max_num_seqs=1)
    built.add(request(1, 4, max_tokens=50, tier=1), "a")
    built.step()
    built.add(request(2, 4, tier=1), "a")
    assert step_slices(built, runner) == [(1, 4, 1)]


def test_preemption_off_reserves_the_longest_output_and_never_preempts() -> None:
    built, runner = engine(num_blocks=8, block_size=4, max_model_len=32, preemption=False)
    built.add(request(1, 4, max_tokens=16), "a")
    built.add(request(2, 4, max_tokens=16), "a")
    assert step_slices(built, runner) == [(1, 0, 4)]
    run_until_idle(built)
    assert built.scheduler.num_preemptions == 0


def test_age_lifts_a_waiting_tier_but_does_not_let_it_take_a_seat() -> None:
    clock = Clock()
    built, runner = engine(clock, max_num_seqs=1, aging_s=10.0)
    built.add(request(1, 4, max_tokens=3, tier=0), "a")
    built.step()
    built.add(request(2, 4, max_tokens=3, tier=2), "a")
    clock.now = 31.0
    built.add(request(3, 4, max_tokens=3, tier=0), "a")
    assert step_slices(built, runner) == [(1, 4, 1)]
    built.step()
    assert step_slices(built, runner) == [(2, 0, 4)]
    # What has waited that long is also shielded from the tier it has caught up with.
    assert step_slices(built, runner) == [(2, 4, 1)]


def test_low_tier_gets_its_first_token_within_its_aging_bound_under_endless_load() -> None:
    clock = Clock()
    built, _ = engine(clock, max_num_seqs=2, aging_s=10.0)
    built.add(request(0, 4, max_tokens=4, tier=2), "a")
    next_id = 1
    while True:
        while built.scheduler.num_waiting < 5:
            built.add(request(next_id, 4, max_tokens=4, tier=0), "a")
            next_id += 1
        outputs = built.step()
        if any(delta.request_id == 0 for deltas in outputs.values() for delta in deltas):
            break
        clock.now += 0.5
    assert clock.now <= 2 * 10.0 + 4 * 0.5 + 0.5


def test_abort_frees_blocks_in_every_state() -> None:
    built, _ = engine(max_num_seqs=2, max_num_batched_tokens=8)
    built.add(request(1, 4, max_tokens=50), "a")
    built.add(request(2, 30, max_tokens=50), "a")
    built.add(request(3, 30, max_tokens=50), "a")
    built.step()  # 1 decodes, 2 is inside its prompt, 3 waits
    for request_id in (3, 2, 1):
        built.abort("a", request_id)
        built.scheduler.check_integrity()
    assert not built.has_work
    assert built.load().free_blocks == 128
    built.abort("a", 1)


def test_abort_hits_one_owner_only() -> None:
    built, _ = engine()
    built.add(request(1, 4), "a")
    built.add(request(1, 4), "b")
    built.abort("a", 1)
    seen = run_until_idle(built)
    assert len(seen.tokens[1, 0]) == 8


def test_outputs_of_one_request_share_their_prompt() -> None:
    built, runner = engine(max_num_seqs=8)
    built.add(request(1, 16, max_tokens=4, indexes=(0, 1, 2)), "a")
    assert step_slices(built, runner) == [(1, 0, 16)]
    assert step_slices(built, runner) == [(1, 16, 1), (1, 12, 4), (1, 12, 4)]
    seen = run_until_idle(built)
    prompt = request(1, 16).prompt_ids
    # The first two deltas were taken by step_slices.
    assert seen.tokens[1, 0][-1] == expected_output(prompt, 4, 0)[-1]
    assert seen.tokens[1, 2] == expected_output(prompt, 4, 2)[1:]
    assert set(seen.finished) == {(1, 0), (1, 1), (1, 2)}


def test_abort_ends_outputs_that_wait_for_their_sibling() -> None:
    built, _ = engine(max_num_batched_tokens=8)
    built.add(request(1, 30, indexes=(0, 1, 2)), "a")
    built.step()
    assert built.scheduler.num_waiting == 2
    built.abort("a", 1)
    assert not built.has_work
    assert built.scheduler.num_waiting == 0
    built.scheduler.check_integrity()


def test_one_output_is_aborted_and_the_others_go_on() -> None:
    built, _ = engine(max_num_seqs=8)
    built.add(request(1, 16, max_tokens=4, indexes=(0, 1, 2)), "a")
    built.step()  # its first output, which computes the prompt, begins
    built.abort("a", 1, 0)
    built.abort("a", 1, 0)
    built.scheduler.check_integrity()
    assert built.counters.aborted == 1
    seen = run_until_idle(built)
    prompt = request(1, 16).prompt_ids
    assert seen.tokens == {(1, index): expected_output(prompt, 4, index) for index in (1, 2)}
    assert built.load().free_blocks == 128


def test_aborting_every_output_ends_the_request_in_every_state() -> None:
    built, _ = engine(max_num_batched_tokens=8)
    built.add(request(1, 30, indexes=(0, 1, 2)), "a")
    built.step()  # 0 is inside its prompt, 1 and 2 wait for it
    for index, num_waiting in ((1, 1), (0, 1), (2, 0)):
        built.abort("a", 1, index)
        built.scheduler.check_integrity()
        assert built.scheduler.num_waiting == num_waiting
    assert not built.has_work
    assert ("a", 1) not in built.scheduler


def test_stop_tokens_end_a_sequence_and_are_reported() -> None:
    built, _ = engine()
    prompt = request(1, 5).prompt_ids
    third = expected_output(prompt, 3)[2]
    wanted = request(1, prompt, max_tokens=10)
    sampling = type(wanted.sampling)(max_tokens=10, stop_token_ids=(third,))
    built.add(type(wanted)(request_id=1, prompt_ids=prompt, sampling=sampling), "a")
    seen = run_until_idle(built)
    assert seen.tokens[1, 0] == expected_output(prompt, 3)
    assert seen.finished[1, 0] is FinishReason.STOP


def test_a_resumed_request_goes_on_where_it_was() -> None:
    built, _ = engine()
    prompt = request(1, 5).prompt_ids
    whole = expected_output(prompt, 9)
    built.add(request(1, prompt, max_tokens=9, resumed_output_ids=(tuple(whole[:4]),)), "a")
    seen = run_until_idle(built)
    assert seen.tokens[1, 0] == whole[4:]


def test_static_batches_are_bound_until_their_longest_member_ends() -> None:
    for batching, rows in (("static", [2, 2, 2]), ("static_live_rows", [2, 1, 1])):
        built, runner = engine(batching=batching, max_num_seqs=2)
        for i, max_tokens in enumerate((1, 3, 2)):
            built.add(request(i, 4, max_tokens=max_tokens), "a")
        seen = run_until_idle(built)
        assert [len(step.sequences) for step in runner.steps[:3]] == rows
        assert slices(runner.steps[3]) == [(2, 0, 4)]
        assert [len(seen.tokens[i, 0]) for i in range(3)] == [1, 3, 2]


def test_itl_budget_bounds_the_chunk_beside_decodes_and_not_without() -> None:
    clock = Clock()
    built, runner = engine(
        clock, itl_target_ms=20.0, max_num_batched_tokens=512, num_blocks=1024, max_model_len=4096
    )
    execute = runner.execute

    def timed(step: Step) -> object:
        result = execute(step)
        clock.now += 0.005 + 1e-4 * step.num_tokens
        return result

    runner.execute = timed  # type: ignore[method-assign, assignment]
    for i in range(3):  # teaches the model every region
        built.add(request(100 + i, 700, max_tokens=30), "a")
    run_until_idle(built)
    built.add(request(1, 4, max_tokens=1000), "a")
    for _ in range(20):
        built.step()
    built.add(request(2, 3000), "a")
    before = len(runner.steps)
    built.step()
    (_, _, one), (_, _, chunk) = slices(runner.steps[before])
    assert one == 1
    assert 64 <= chunk <= 150
    assert chunk % CHUNK_MULTIPLE == 0
    built.abort("a", 1)
    built.step()
    assert slices(runner.steps[-1])[0][2] == 512


def test_a_target_below_the_plain_decode_step_keeps_prefill_moving_and_reports_overload() -> None:
    clock = Clock()
    built, runner = engine(clock, itl_target_ms=1.0, num_blocks=1024, max_model_len=4096)
    execute = runner.execute

    def timed(step: Step) -> object:
        clock.now += 0.005
        return execute(step)

    runner.execute = timed  # type: ignore[method-assign, assignment]
    built.add(request(1, 4, max_tokens=500), "a")
    for _ in range(30):
        built.step()
    built.add(request(2, 300), "a")
    built.step()
    assert slices(runner.steps[-1])[1] == (2, 0, FLOOR_TOKENS)
    assert built.load().overloaded
    run_until_idle(built)


def test_nobody_passes_a_request_that_waits_for_blocks_not_even_of_another_tier() -> None:
    built, runner = engine(num_blocks=16, block_size=4, max_model_len=64)
    built.add(request(1, 20, max_tokens=20), "a")
    built.step()
    built.add(request(2, 60, max_tokens=2, tier=0), "a")
    built.add(request(3, 2, max_tokens=2, tier=1), "a")
    order: list[int] = []
    while built.has_work:
        built.step()
        order += [r for r, start, n in slices(runner.steps[-1]) if start == 0 and r not in order]
    assert order == [2, 3]


def test_a_better_tier_may_still_take_a_seat_behind_an_aged_one_that_may_not() -> None:
    clock = Clock()
    built, runner = engine(clock, max_num_seqs=1)
    built.add(request(1, 4, max_tokens=50, tier=2), "a")
    built.step()
    built.add(request(2, 4, tier=2, waited_s=25.0), "a")
    built.add(request(3, 4, tier=1), "a")
    assert step_slices(built, runner) == [(3, 0, 4)]


def test_what_a_victim_had_been_given_goes_back_into_the_budget() -> None:
    built, runner = engine(max_num_seqs=1, max_num_batched_tokens=4)
    built.add(request(1, 4, max_tokens=50, tier=1), "a")
    built.step()
    built.add(request(2, 4, tier=0), "a")
    assert step_slices(built, runner) == [(2, 0, 4)]


def test_a_sequence_starts_only_if_the_running_ones_can_still_grow() -> None:
    built, _ = engine(num_blocks=6, block_size=4, max_model_len=24)
    built.add(request(1, 7, max_tokens=17), "a")
    built.step()
    built.add(request(2, 12, max_tokens=2), "a")
    built.step()
    assert built.load().num_running == 1  # 4 blocks are free, 3 wanted, 2 kept for the other's growth
    built.abort("a", 2)
    built.add(request(3, 3, max_tokens=2), "a")
    built.step()
    assert built.load().num_running == 2


def test_shared_prefix_blocks_of_a_victim_do_not_count_as_gained() -> None:
    built, runner = engine(num_blocks=8, block_size=4, max_model_len=32)
    shared = request(1, 8).prompt_ids
    built.add(request(9, 7, max_tokens=9, tier=0), "a")
    built.add(request(1, (*shared, *range(500, 506)), max_tokens=2, tier=1), "a")
    built.step()
    assert built.load().free_blocks == 2
    built.add(request(2, (*shared, *range(600, 616)), max_tokens=2, tier=0), "a")
    assert [entry[0] for entry in step_slices(built, runner)] == [9, 1]
    run_until_idle(built)


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    built, runner = engine(max_num_seqs=1, max_num_batched_tokens=8)
    built.add(request(1, 30, max_tokens=2, tier=1), "a")
    built.step()
    built.add(request(2, 4, max_tokens=1, tier=0), "a")
    seen = run_until_idle(built)
    assert seen.cached == {(1, 0): 0, (2, 0): 0}
    resumed = [entry for step in runner.steps for entry in slices(step) if entry[0] == 1][1]
    assert resumed == (1, 8, 8)


def test_load_counts_by_tier() -> None:
    built, _ = engine(max_num_seqs=1)
    built.add(request(1, 4, max_tokens=9, tier=0), "a")
    built.add(request(2, 6, tier=1), "a")
    built.step()
    load = built.load()
    assert (load.num_running, load.num_waiting, load.queued_tokens) == (1, 1, 6)
    assert [(t.tier, t.num_running, t.num_waiting, t.queued_tokens) for t in load.tiers] == [
        (0, 1, 0, 0),
        (1, 0, 1, 6),
    ]


def test_statuses_follow_a_sequence_through_its_life() -> None:
    built, runner = engine()
    built.add(request(1, 4, max_tokens=1), "a")
    built.step()
    sequence = runner.steps[0].sequences[0].sequence
    assert sequence.status is SequenceStatus.FINISHED
    assert sequence.block_table == []
