import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replicas.api import FinishReason
from replicas.engine import StepReport
from replicas.errors import PromptTooLongError, RequestError
from replicas.step import Step, StepResult
from tests.replicas.fake_runner import (
    VOCAB_SIZE,
    Clock,
    Collected,
    engine,
    expected_output,
    request,
    run_until_idle,
)


def test_one_bad_sequence_fails_alone() -> None:
    built, runner = engine()
    runner.fail_on = {2}
    for i in range(4):
        built.add(request(i, 6, max_tokens=4), "a")
    seen = run_until_idle(built)
    assert seen.finished[2, 0] is FinishReason.ERROR
    assert seen.errors[2, 0] == "RuntimeError: cannot run request 2"
    for i in (0, 1, 3):
        assert seen.tokens[i, 0] == expected_output(request(i, 6).prompt_ids, 4)
    assert built.counters.failed == 1
    assert built.stall_reason(0.0) is None


def test_an_error_that_the_runner_reports_ends_that_sequence_only() -> None:
    built, runner = engine()
    execute = runner.execute

    def poisoned(step: Step) -> StepResult:
        result = execute(step)
        for position, entry in enumerate(step.sequences):
            if entry.sequence.request.request_id == 1:
                result.errors[position] = "logits are not finite"
        return result

    runner.execute = poisoned  # type: ignore[method-assign]
    built.add(request(1, 6), "a")
    built.add(request(2, 6), "a")
    seen = run_until_idle(built)
    assert seen.errors == {(1, 0): "logits are not finite"}
    assert len(seen.tokens[2, 0]) == 8


def test_a_runner_that_fails_every_step_is_reported() -> None:
    built, runner = engine()
    runner.fail_on = {1, 2, 3}
    for i in (1, 2, 3):
        assert built.stall_reason(0.0) is None
        built.add(request(i, 6), "a")
        run_until_idle(built)
    assert built.stall_reason(0.0) == "3 steps in a row failed for every sequence"


def test_a_step_that_hangs_is_reported_after_the_limit() -> None:
    clock = Clock()
    built, runner = engine(clock)
    execute = runner.execute
    reasons = []

    def slow(step: Step) -> StepResult:
        reasons.extend([built.stall_reason(clock.now + 9.0), built.stall_reason(clock.now + 11.0)])
        return execute(step)

    runner.execute = slow  # type: ignore[method-assign]
    built.add(request(1, 4, max_tokens=1), "a")
    built.step()
    assert reasons == [None, "a step has been running for 11.0 s (limit 10.0 s)"]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request(1, 256), PromptTooLongError),
        (request(1, ()), RequestError),
        (request(1, (3, -1)), RequestError),
        (request(1, (VOCAB_SIZE,)), RequestError),
        (request(1, (1,), max_tokens=0), RequestError),
        (request(1, (1,), resumed_output_ids=((1,), (2,))), RequestError),
    ],
)
def test_requests_that_can_never_run_are_refused(bad: object, error: type[RequestError]) -> None:
    built, _ = engine()
    with pytest.raises(error):
        built.add(bad, "a")  # type: ignore[arg-type]
    assert not built.has_work


def test_prefix_hits_are_reported_once_and_leave_a_token_to_compute() -> None:
    built, _ = engine()
    prompt = request(1, 16).prompt_ids
    built.add(request(1, prompt, max_tokens=2), "a")
    run_until_idle(built)
    built.add(request(2, prompt, max_tokens=2), "a")
    seen = run_until_idle(built)
    assert seen.cached == {(2, 0): 12}
    assert seen.tokens[2, 0] == expected_output(prompt, 2)
    assert built.counters.cached_tokens == 12
    assert built.counters.output_tokens == 4


def test_salts_keep_tenants_apart() -> None:
    built, _ = engine()
    prompt = request(1, 16).prompt_ids
    built.add(request(1, prompt, max_tokens=2, cache_salt="red"), "a")
    run_until_idle(built)
    built.add(request(2, prompt, max_tokens=2, cache_salt="blue"), "a")
    assert run_until_idle(built).cached == {(2, 0): 0}


class EngineMachine(RuleBasedStateMachine):
    """Random adds, aborts and steps on a pool that is far too small, checked after every one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.engine, self.runner = engine(
            self.clock, num_blocks=20, max_model_len=80, max_num_seqs=5, max_num_batched_tokens=24
        )
        self.seen = Collected()
        self.asked: dict[int, tuple[int, int, int]] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.aborted: set[int] = set()

    @rule(
        length=st.integers(1, 60),
        shared=st.booleans(),
        max_tokens=st.integers(1, 19),
        tier=st.integers(0, 2),
        n=st.integers(1, 3),
    )
    def add(self, length: int, shared: bool, max_tokens: int, tier: int, n: int) -> None:
        request_id = len(self.asked)
        prompt = request(0 if shared else request_id, length).prompt_ids
        self.asked[request_id] = (length, max_tokens, n)
        wanted = request(request_id, prompt, max_tokens, tier=tier, indexes=tuple(range(n)))
        self.prompts[request_id] = prompt
        self.engine.add(wanted, "a")

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.asked:
            request_id = data.draw(st.sampled_from(sorted(self.asked)))
            self.engine.abort("a", request_id)
            self.aborted.add(request_id)

    @rule(count=st.integers(1, 12), seconds=st.sampled_from([0.0, 0.1, 7.0]))
    def run_steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.clock.now += seconds
            self.seen.add(self.engine.step())
            self.engine.scheduler.check_integrity()

    @invariant()
    def books_balance(self) -> None:
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        run_until_idle(self.engine, self.seen)
        load = self.engine.load()
        assert (load.free_blocks, load.num_running, load.num_waiting) == (20, 0, 0)
        for request_id, (length, max_tokens, n) in self.asked.items():
            for index in range(n):
                expected = expected_output(self.prompts[request_id], min(max_tokens, 80 - length), index)
                tokens = self.seen.tokens.get((request_id, index), [])
                if request_id in self.aborted:
                    assert tokens == expected[: len(tokens)]
                else:
                    assert tokens == expected
                    assert self.seen.finished[request_id, index] is FinishReason.LENGTH


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_every_step_is_reported_with_the_gap_that_its_decodes_saw() -> None:
    clock = Clock()
    built, runner = engine(clock)
    reports: list[StepReport] = []
    built.watch(reports.append)
    execute = runner.execute

    def timed(step: Step) -> StepResult:
        clock.now += 0.02
        return execute(step)

    runner.execute = timed  # type: ignore[method-assign]
    built.add(request(1, 6, max_tokens=3), "a")
    built.step()
    clock.now += 0.01  # others use the thread
    built.step()
    built.step()
    built.add(request(2, 5, max_tokens=1), "a")
    built.step()
    seen = [(r.num_sequences, r.num_decodes, r.num_prompt_tokens) for r in reports]
    assert seen == [(1, 0, 6), (1, 1, 0), (1, 1, 0), (1, 0, 5)]
    assert [r.step_s for r in reports] == [pytest.approx(0.02)] * 4
    assert reports[0].gap_s is None
    assert [r.gap_s for r in reports[1:3]] == [pytest.approx(0.03), pytest.approx(0.02)]
    assert reports[3].gap_s is None  # nothing ran before it


def test_one_step_that_was_held_up_is_not_reported_as_what_steps_take() -> None:
    clock = Clock()
    built, runner = engine(clock)
    execute = runner.execute
    durations = iter([0.02, 0.03, 11.0, 0.02])

    def timed(step: Step) -> StepResult:
        clock.now += next(durations)
        return execute(step)

    runner.execute = timed  # type: ignore[method-assign]
    assert built.load().step_ms == 0.0
    built.add(request(1, 6, max_tokens=4), "a")
    for _ in range(3):
        built.step()
    assert built.load().step_ms == pytest.approx(30.0)
    built.step()
    assert built.load().step_ms == pytest.approx(30.0)


def test_what_learning_from_a_step_takes_counts_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the gap that the next step's decodes see."""
    clock = Clock()
    built, runner = engine(clock)
    execute = runner.execute
    seen: list[float] = []

    def timed(step: Step) -> StepResult:
        clock.now += 0.02
        return execute(step)

    def observe(_: object, seconds: float) -> None:
        clock.now += 0.003
        seen.append(seconds)

    runner.execute = timed  # type: ignore[method-assign]
    monkeypatch.setattr(built.step_time, "observe", observe)
    built.add(request(1, 6, max_tokens=3), "a")
    for _ in range(3):
        built.step()
    assert seen == [pytest.approx(0.02), pytest.approx(0.023), pytest.approx(0.023)]
