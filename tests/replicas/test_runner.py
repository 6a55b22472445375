import pytest
import torch

from replicas.api import GenerateRequest, SamplingParams
from replicas.attention.base import KVPoolSpec
from replicas.attention.numba_cpu import NumbaAttention
from replicas.constraints import Constraints
from replicas.model import load_model
from replicas.model_source import ModelFiles
from replicas.progress import silent
from replicas.runner import TorchRunner
from replicas.sequence import Sequence
from replicas.step import ScheduledSequence, Step
from tests.replicas.tiny_models import VOCAB_SIZE, llama, save

NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = save(llama(), tmp_path_factory.mktemp("llama"))
    model = load_model(ModelFiles(name="tiny", folder=folder), torch.device("cpu"), torch.float32, silent)
    spec = KVPoolSpec(
        needs=model.needs,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_threads=1,
    )
    return TorchRunner(
        model,
        NumbaAttention(spec),
        Constraints.from_folder(folder, VOCAB_SIZE, (2,)),
        block_size=16,
        row_floor=16,
    )


def sequence(tokens: list[int], blocks: list[int], **sampling: object) -> Sequence:
    params = SamplingParams(**({"max_tokens": 9, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return Sequence(
        seq_id=blocks[0],
        owner="",
        request=GenerateRequest(request_id=blocks[0], prompt_ids=tuple(tokens), sampling=params),
        index=0,
        arrival_at=0.0,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        stop_ids=frozenset(),
        max_num_tokens=100,
        block_table=blocks,
    )


def step(*entries: ScheduledSequence) -> Step:
    return Step(
        number=1,
        sequences=list(entries),
        num_tokens=sum(entry.num_new_tokens for entry in entries),
        num_decodes=0,
    )


def whole(one: Sequence) -> ScheduledSequence:
    return ScheduledSequence(one, 0, one.num_tokens, True)


def test_results_are_parallel_to_the_step(runner: TorchRunner) -> None:
    a, b, c = (sequence(list(range(3 + i, 20 + i)), [2 * i, 2 * i + 1]) for i in range(3))
    alone = [runner.execute(step(whole(one))).token_ids[0] for one in (a, c)]
    result = runner.execute(step(whole(a), ScheduledSequence(b, 0, 9, False), whole(c)))
    assert result.token_ids == [alone[0], None, alone[1]]
    assert result.logprobs is None
    assert result.errors == {}


def test_logprobs_stand_beside_the_sequences_that_asked(runner: TorchRunner) -> None:
    a = sequence([5, 6, 7], [0])
    b = sequence([8, 9], [1], logprobs=2)
    result = runner.execute(step(ScheduledSequence(a, 0, 2, False), whole(b)))
    assert result.logprobs is not None
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    assert result.logprobs[1].top[0].token_id == result.token_ids[1]


def test_a_step_in_which_nobody_samples(runner: TorchRunner) -> None:
    result = runner.execute(step(ScheduledSequence(sequence([5, 6, 7], [0]), 0, 2, False)))
    assert result.token_ids == [None]


def test_a_step_may_be_executed_twice(runner: TorchRunner) -> None:
    one = sequence(list(range(3, 40)), [4, 7, 2], temperature=1.0, seed=3)
    first = runner.execute(step(whole(one)))
    assert runner.execute(step(whole(one))) == first


@pytest.mark.parametrize("foreign", [-1, VOCAB_SIZE, 10**9])
def test_a_token_outside_the_vocabulary_fails_alone(runner: TorchRunner, foreign: int) -> None:
    good = sequence(list(range(3, 20)), [0, 1])
    bad = sequence([5, foreign, 7], [2])
    expected = runner.execute(step(whole(good))).token_ids[0]
    result = runner.execute(step(whole(bad), whole(good)))
    assert result.token_ids == [None, expected]
    assert result.errors == {0: f"token id {foreign} is not in the vocabulary of {VOCAB_SIZE}"}


def test_not_a_number_in_one_sequences_cache_fails_that_one_alone(runner: TorchRunner) -> None:
    good, bad = sequence(list(range(3, 20)), [0, 1]), sequence(list(range(9, 29)), [2, 3])
    expected = runner.execute(step(whole(good), whole(bad))).token_ids
    for pool in runner.backend.pools:
        pool[2] = float("nan")
    last = [ScheduledSequence(one, one.num_tokens - 1, 1, True) for one in (good, bad)]
    result = runner.execute(step(*last))
    for pool in runner.backend.pools:
        pool[2] = 0.0
    assert result.token_ids == [expected[0], None]
    assert result.errors == {1: "the model's output is not a number"}


def test_padding_rows_leave_the_pool_alone(runner: TorchRunner) -> None:
    for pool in runner.backend.pools:
        pool.zero_()
    runner.execute(step(whole(sequence([5, 6, 7], [3]))))
    written = {block for pool in runner.backend.pools for block in range(NUM_BLOCKS) if pool[block].any()}
    assert written == {3}
