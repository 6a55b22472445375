"""Guessed tokens over a real (tiny, random) model: answers, logprobs and ends are those without guesses."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from replicas.api import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs
from replicas.config import EngineConfig
from replicas.drafts import Drafter
from replicas.engine import Engine
from replicas.errors import ConfigError
from replicas.sequence import Sequence
from replicas.startup import OpenedRunner, open_runner
from tests.replicas.test_constraints import DATE, OBJECT
from tests.replicas.test_model_engine import open_tiny
from tests.replicas.tiny_models import llama, save
from tests.router.tiny_tokenizers import byte_level_folder

EOS = 2
VOCAB_SIZE = 300


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None


Answers = dict[int, Answer]


@pytest.fixture(scope="module", params=["none", "int8"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenedRunner:
    config = llama()
    config.vocab_size = VOCAB_SIZE
    path = save(config, tmp_path_factory.mktemp("llama"))
    byte_level_folder(path)
    return open_tiny(path, 12, quantization=request.param)


def engine(opened: OpenedRunner, num_drafts: int) -> Engine:
    config = msgspec.structs.replace(opened.resolved, num_speculative_tokens=num_drafts)
    return Engine(config, opened.runner, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))


def answers(built: Engine, requests: list[GenerateRequest]) -> Answers:
    for one in requests:
        built.add(one, "a")
    found = {one.request_id: Answer() for one in requests}
    for _ in range(3000):
        if not built.has_work:
            built.scheduler.check_integrity()
            return found
        for delta in built.step().get("a", ()):
            answer = found[delta.request_id]
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs or []
            answer.finish, answer.error = delta.finish_reason, delta.error
        built.scheduler.check_integrity()
    raise AssertionError("still busy")


KINDS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"temperature": 1.2, "logprobs": 0},
    "truncated": {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "ignore_eos": True,
    },
    "min_tokens": {"temperature": 0.0, "logit_bias": {EOS: 100.0}, "min_tokens": 9},
    "stop": {"temperature": 1.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 20))},
    "date": {"temperature": 1.5, "grammar": DATE},
    "object": {"temperature": 1.5, "grammar": OBJECT},
}


def requests(kind: str) -> list[GenerateRequest]:
    rng = random.Random(3)
    return [
        GenerateRequest(
            request_id=i,
            prompt_ids=tuple(rng.randrange(3, 250) for _ in range(rng.randrange(2, 60))),
            sampling=SamplingParams(**({"max_tokens": 40, "seed": i} | KINDS[kind])),  # type: ignore[arg-type]
        )
        for i in range(5)
    ]


def guess_from(known: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess what a sequence will say, each token wrong once in four times."""
    rng = random.Random(1)

    def draft(_: Drafter, sequence: Sequence, limit: int) -> tuple[int, ...]:
        coming = known[sequence.request.request_id].token_ids[sequence.num_output_tokens :]
        guessed = [token if rng.random() < 0.75 else rng.randrange(VOCAB_SIZE) for token in coming]
        return tuple([*guessed, 5, 6, 7][: min(limit, 6)])

    monkeypatch.setattr(Drafter, "draft", draft)
    monkeypatch.setattr(Drafter, "learn", lambda *_: None)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_right_and_wrong_change_nothing(
    kind: str, opened: OpenedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool too small for all: preempted and resumed too."""
    asked = requests(kind)
    plain = answers(engine(opened, 0), asked)
    assert all(answer.error is None for answer in plain.values())
    guess_from(plain, monkeypatch)
    built = engine(opened, 6)
    assert answers(built, asked) == plain
    assert 0 < built.counters.accepted_tokens < built.counters.draft_tokens


def test_prompt_lookup_finds_what_a_model_repeats(opened: OpenedRunner) -> None:
    """A model of three words soon says three of them again, in every order."""
    bias = {"max_tokens": 60, "temperature": 1.0, "logit_bias": {10: 100.0, 11: 100.0, 12: 98.0}}
    asked = [
        msgspec.structs.replace(one, sampling=SamplingParams(seed=one.request_id, **bias))  # type: ignore[arg-type]
        for one in requests("greedy")
    ]
    without, built = engine(opened, 0), engine(opened, 6)
    assert answers(built, asked) == answers(without, asked)
    assert built.counters.accepted_tokens > 10
    assert built.counters.steps < without.counters.steps


def test_a_negative_number_of_guesses_is_refused(opened: OpenedRunner) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        open_runner(EngineConfig(model=str(opened.files.folder), num_speculative_tokens=-1))


def test_guesses_in_static_batches_are_refused(opened: OpenedRunner) -> None:
    with pytest.raises(ConfigError, match="static"):
        open_runner(EngineConfig(model=str(opened.files.folder), num_speculative_tokens=2, batching="static"))


def test_a_wrong_logprob_count_would_show(opened: OpenedRunner) -> None:
    """What the comparison above relies on: one entry per token."""
    plain = answers(engine(opened, 0), requests("logprobs"))
    assert all(len(answer.logprobs) == len(answer.token_ids) > 0 for answer in plain.values())
