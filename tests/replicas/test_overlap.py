"""Steps launched before the last one ended: the answers are the same, and nothing waits that need not."""

import random
from dataclasses import dataclass, field

import pytest

from replicas.api import FinishReason, GenerateRequest, SamplingParams
from replicas.engine import Engine
from replicas.overlap import Launched, Launcher
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence, Step, StepResult
from tests.replicas.fake_runner import (
    EOS,
    VOCAB_SIZE,
    Clock,
    Collected,
    FakeRunner,
    config,
    expected_output,
    request,
    run_until_idle,
)


class FakeLaunched(Launched):
    """Computed at launch; the engine gets to see it at `result`."""

    def __init__(self, step: Step, computed: StepResult) -> None:
        self.step, self.computed = step, computed
        self.is_read = False

    def result(self) -> StepResult:
        assert not self.is_read
        self.is_read = True
        return self.computed


@dataclass
class FakeLauncher(Launcher):
    """The fake runner as a device: a step sees the tokens of `previous` before the engine does."""

    runner: FakeRunner
    launched: list[FakeLaunched] = field(default_factory=list)
    num_ahead: int = 0
    eos_at: int | None = None
    """Number of tokens after which every sequence samples EOS."""

    def execute(self, step: Step) -> StepResult:
        return self.launch(step, None).result()

    def launch(self, step: Step, previous: Launched | None) -> FakeLaunched:
        computed = self.runner.execute(self._known(step, previous))
        if self.eos_at is not None:
            for i, entry in enumerate(step.sequences):
                if computed.token_ids[i] is not None and entry.start + entry.num_new_tokens >= self.eos_at:
                    computed.token_ids[i] = EOS
        launched = FakeLaunched(step, computed)
        self.launched.append(launched)
        return launched

    def _known(self, step: Step, previous: Launched | None) -> Step:
        """The step with copies of its sequences to which the tokens under way have been added."""
        if previous is None:
            return step
        assert isinstance(previous, FakeLaunched)
        assert not previous.is_read, "launched after the last step ended: nothing overlaps"
        self.num_ahead += 1
        before = {
            entry.sequence.seq_id: token
            for entry, token in zip(previous.step.sequences, previous.computed.token_ids, strict=True)
        }
        entries = []
        for entry in step.sequences:
            sequence = entry.sequence
            assert entry.start == sequence.num_tokens
            token = before[sequence.seq_id]
            assert token is not None
            entries.append(ScheduledSequence(_with_token(sequence, token), entry.start, 1, True))
        return Step(number=step.number, sequences=entries, num_tokens=len(entries), num_decodes=len(entries))


def _with_token(sequence: Sequence, token: int) -> Sequence:
    return Sequence(
        seq_id=sequence.seq_id,
        owner=sequence.owner,
        request=sequence.request,
        index=sequence.index,
        arrival_at=sequence.arrival_at,
        token_ids=[*sequence.token_ids, token],
        num_prompt_tokens=sequence.num_prompt_tokens,
        stop_ids=sequence.stop_ids,
        max_num_tokens=sequence.max_num_tokens,
        block_table=sequence.block_table,
    )


def engine(**changes: object) -> tuple[Engine, FakeLauncher]:
    resolved = config(**changes)
    launcher = FakeLauncher(FakeRunner(resolved))
    built = Engine(resolved, launcher, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}), clock=Clock())
    return built, launcher


def test_a_lone_answer_is_computed_ahead_from_its_second_token_on() -> None:
    built, launcher = engine()
    one = request(1, 5, max_tokens=8)
    built.add(one, "a")
    seen = run_until_idle(built)
    assert seen.tokens[1, 0] == expected_output(one.prompt_ids, 8)
    assert (len(launcher.launched), launcher.num_ahead) == (8, 7)


def test_no_step_is_launched_behind_the_last_token() -> None:
    """The greatest length is known beforehand: no row is wasted on it."""
    built, launcher = engine()
    for i in range(3):
        built.add(request(i, 5, max_tokens=3 + i), "a")
    run_until_idle(built)
    assert [len(launched.step.sequences) for launched in launcher.launched] == [3, 3, 3, 2, 1]


def test_an_end_token_wastes_one_row_and_nothing_else() -> None:
    built, launcher = engine()
    launcher.eos_at = 9
    one = request(1, 5, max_tokens=50)
    built.add(one, "a")
    seen = run_until_idle(built)
    assert seen.tokens[1, 0] == [*expected_output(one.prompt_ids, 4), EOS]
    assert seen.finished[1, 0] is FinishReason.STOP
    assert len(launcher.launched) == 6
    assert built.scheduler.cache.num_free_blocks == 128
    again = request(2, 9, max_tokens=3)
    launcher.eos_at = None
    built.add(again, "a")
    assert run_until_idle(built).tokens[2, 0] == expected_output(again.prompt_ids, 3)


def test_an_abort_while_a_step_is_under_way() -> None:
    built, _ = engine()
    kept = request(2, 6, max_tokens=9)
    built.add(request(1, 5, max_tokens=50), "a")
    built.add(kept, "a")
    seen = Collected()
    for _ in range(4):
        seen.add(built.step())
    built.abort("a", 1)
    run_until_idle(built, seen)
    assert seen.tokens[2, 0] == expected_output(kept.prompt_ids, 9)
    assert len(seen.tokens[1, 0]) == 4
    assert built.scheduler.cache.num_free_blocks == 128


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"grammar": "{}"},
        {"min_tokens": 8},
    ],
)
def test_choices_that_look_at_earlier_tokens_wait_for_them(sampling: dict[str, object]) -> None:
    built, launcher = engine()
    params = SamplingParams(max_tokens=8, **sampling)  # type: ignore[arg-type]
    built.add(GenerateRequest(request_id=1, prompt_ids=(5, 6, 7), sampling=params), "a")
    run_until_idle(built)
    assert (len(launcher.launched), launcher.num_ahead) == (8, 0)


def test_static_batches_are_not_computed_ahead() -> None:
    built, launcher = engine(batching="static")
    built.add(request(1, 5), "a")
    run_until_idle(built)
    assert launcher.num_ahead == 0


def test_a_full_house_goes_on_ahead_while_others_wait() -> None:
    built, launcher = engine(max_num_seqs=2)
    for i in range(3):
        built.add(request(i, 5, max_tokens=10), "a")
    seen = run_until_idle(built)
    assert launcher.num_ahead == 9 + 9
    assert len(seen.finished) == 3


def test_whoever_may_take_a_seat_is_not_kept_waiting() -> None:
    built, launcher = engine(max_num_seqs=1)
    built.add(request(1, 5, max_tokens=10, tier=2), "a")
    for _ in range(3):
        built.step()
    ahead = launcher.num_ahead
    built.add(request(2, 5, max_tokens=1, tier=0), "a")
    built.step()  # the step that was under way
    assert launcher.num_ahead == ahead
    seen = Collected()
    seen.add(built.step())
    assert (2, 0) in seen.finished


def test_a_step_that_fails_takes_the_one_behind_it_along() -> None:
    built, launcher = engine()
    good, bad = request(1, 5, max_tokens=12), request(2, 6, max_tokens=12)
    built.add(good, "a")
    built.add(bad, "a")
    seen = Collected()
    for _ in range(3):
        seen.add(built.step())
    launcher.runner.fail_on = {2}
    run_until_idle(built, seen)
    assert seen.tokens[1, 0] == expected_output(good.prompt_ids, 12)
    assert "cannot run request 2" in seen.errors[2, 0]


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_right_under_random_load(seed: int) -> None:
    """Few blocks, few seats, tiers, aborts, ends: the fake runner checks every slot it reads."""
    rng = random.Random(seed)
    built, launcher = engine(num_blocks=24, max_num_seqs=3, max_model_len=64)
    launcher.eos_at = 40
    requests = [
        request(i, rng.randrange(1, 30), max_tokens=rng.randrange(1, 30), tier=rng.randrange(3))
        for i in range(25)
    ]
    seen, aborted = Collected(), set()
    for one in requests:
        built.add(one, "a")
        for _ in range(rng.randrange(6)):
            seen.add(built.step())
            built.scheduler.check_integrity()
        if rng.random() < 0.2:
            aborted.add(one.request_id)
            built.abort("a", one.request_id)
    run_until_idle(built, seen)
    assert launcher.num_ahead > 20
    for one in requests:
        if one.request_id not in aborted:
            ends_after = max(1, min(one.sampling.max_tokens, 41 - len(one.prompt_ids)))
            tokens = seen.tokens[one.request_id, 0]
            expected = expected_output(one.prompt_ids, ends_after)
            if len(one.prompt_ids) + ends_after > 40:
                expected[-1] = EOS
            assert tokens == expected
