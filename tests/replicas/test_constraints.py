"""Grammars: what they allow, that nothing about them is lost, and that none can cost without bound."""

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from replicas.api import FinishReason, GenerateRequest, SamplingParams
from replicas.constraints import MAX_CACHED_GRAMMARS, Constraints
from replicas.errors import ConstraintError
from replicas.runner import TorchRunner
from replicas.sequence import Sequence
from replicas.startup import OpenedRunner
from tests.replicas.fake_runner import Collected, run_until_idle
from tests.replicas.test_model_engine import engine, open_tiny
from tests.replicas.tiny_models import llama, save
from tests.router.tiny_tokenizers import byte_level_folder

EOS = 2
VOCAB_SIZE = 300
"""Room for the tokenizer's 291 tokens and some that spell nothing."""
DATE = LLMatcher.grammar_from_regex(r"20[0-9]{2}-(0[1-9]|1[0-2])")
OBJECT = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    overrides={"whitespace_pattern": "[ ]{0,2}"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def constraints(folder: Path) -> Constraints:
    return Constraints.from_folder(folder, VOCAB_SIZE, (EOS,))


def sequence(grammar: str, output: list[int]) -> Sequence:
    sampling = SamplingParams(max_tokens=100, grammar=grammar)
    return Sequence(
        seq_id=1,
        owner="",
        request=GenerateRequest(request_id=1, prompt_ids=(5,), sampling=sampling),
        index=0,
        arrival_at=0.0,
        token_ids=[5, *output],
        num_prompt_tokens=1,
        stop_ids=frozenset({EOS}),
        max_num_tokens=100,
    )


def allowed(constraints: Constraints, of: Sequence) -> list[int]:
    found: list[int] = np.flatnonzero(constraints.allowed(of)).tolist()
    return found


def test_only_what_the_grammar_says_comes_next(constraints: Constraints, tokenizer: Tokenizer) -> None:
    two, zero = (tokenizer.token_to_id(char) for char in "20")
    one = sequence(DATE, [])
    assert allowed(constraints, one) == [two]
    one.token_ids.append(two)
    assert allowed(constraints, one) == [zero]


def test_a_complete_output_ends(constraints: Constraints, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("2024-07", add_special_tokens=False).ids
    assert allowed(constraints, sequence(DATE, ids)) == [EOS]


def test_a_mask_may_be_asked_for_twice(constraints: Constraints, tokenizer: Tokenizer) -> None:
    one = sequence(DATE, tokenizer.encode("202", add_special_tokens=False).ids)
    assert allowed(constraints, one) == allowed(constraints, one)


def test_state_comes_from_the_output_alone(
    folder: Path, constraints: Constraints, tokenizer: Tokenizer
) -> None:
    """As after a resume: other constraints, and all of the output at once."""
    ids = tokenizer.encode('{"a": 12, "b', add_special_tokens=False).ids
    here = sequence(OBJECT, [])
    for token in ids:
        constraints.allowed(here)
        here.token_ids.append(token)
    elsewhere = Constraints.from_folder(folder, VOCAB_SIZE, (EOS,))
    assert allowed(constraints, here) == allowed(elsewhere, sequence(OBJECT, ids))


def test_an_output_that_left_its_grammar_is_an_error(constraints: Constraints) -> None:
    with pytest.raises(ConstraintError):
        constraints.allowed(sequence(DATE, [5, 6, 7]))


@pytest.mark.parametrize("grammar", ["(", '{"grammars": 5}', LLMatcher.grammar_from_regex("[")])
def test_a_bad_grammar_is_an_error(constraints: Constraints, grammar: str) -> None:
    with pytest.raises(ConstraintError):
        constraints.allowed(sequence(grammar, []))


def test_a_grammar_that_explodes_is_an_error(constraints: Constraints, tokenizer: Tokenizer) -> None:
    letters = [tokenizer.token_to_id(char) for char in "abcd"]
    draw = random.Random(1)
    one = sequence(LLMatcher.grammar_from_regex(r".*a.{200}b.*c.{300}"), [])

    def follow() -> None:
        for _ in range(2000):
            constraints.allowed(one)
            one.token_ids += draw.choices(letters, k=5)

    with pytest.raises(ConstraintError, match="states"):
        follow()


def test_a_tokenizer_that_cannot_be_read_fails_the_request_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConstraintError, match="this model cannot follow a grammar"):
        Constraints.from_folder(tmp_path, VOCAB_SIZE, (EOS,)).allowed(sequence(DATE, []))


def counted(folder: Path) -> tuple[Constraints, Callable[[], int]]:
    """Constraints whose number of compilations can be read."""
    made = Constraints.from_folder(folder, VOCAB_SIZE, (EOS,))
    compiled = 0
    inner = made._compile

    def count(grammar: str) -> LLMatcher:
        nonlocal compiled
        compiled += 1
        return inner(grammar)

    made._compile = count  # type: ignore[method-assign]
    return made, lambda: compiled


def test_a_grammar_is_compiled_once(folder: Path) -> None:
    made, num_compiled = counted(folder)
    made.prepare(DATE)
    for _ in range(3):
        made.allowed(sequence(DATE, []))
    assert num_compiled() == 1


def test_the_cache_forgets_what_was_used_least_recently(folder: Path) -> None:
    made, num_compiled = counted(folder)
    made.prepare(DATE)
    for i in range(MAX_CACHED_GRAMMARS):
        made.prepare(LLMatcher.grammar_from_regex(f"a{{{i + 1}}}"))
    made.allowed(sequence(DATE, []))
    assert num_compiled() == MAX_CACHED_GRAMMARS + 2


def test_preparing_does_not_wait(folder: Path) -> None:
    released = threading.Event()

    def slow() -> LLTokenizer:
        assert released.wait(10)
        document = (folder / "tokenizer.json").read_text()
        return LLTokenizer(document, n_vocab=VOCAB_SIZE, eos_token=[EOS])

    made = Constraints(slow, VOCAB_SIZE)
    made.prepare(DATE)
    released.set()
    assert made.allowed(sequence(DATE, [])).any()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedRunner:
    config = llama()
    config.vocab_size = VOCAB_SIZE
    path = save(config, tmp_path_factory.mktemp("llama"))
    byte_level_folder(path)
    return open_tiny(path, 10)


def asked(request_id: int, grammar: str, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=40, grammar=grammar, **sampling)  # type: ignore[arg-type]
    prompt = tuple(range(3 + 20 * request_id, 48 + 20 * request_id))
    return GenerateRequest(request_id=request_id, prompt_ids=prompt, sampling=params)


def test_random_models_speak_the_grammar_whatever_happens_to_them(
    opened: OpenedRunner, tokenizer: Tokenizer
) -> None:
    built, watched = engine(opened)
    grammars = {0: DATE, 1: OBJECT, 2: OBJECT, 3: ""}
    for i, grammar in grammars.items():
        built.add(asked(i, grammar, temperature=0.0 if i == 1 else 1.5, seed=i), "")
    collected = run_until_idle(built, Collected())
    assert watched.preempted
    texts = {i: tokenizer.decode(collected.tokens[i, 0][:-1]) for i in (0, 1, 2)}
    assert [collected.finished[i, 0] for i in (0, 1, 2)] == [FinishReason.STOP] * 3
    assert texts[0].startswith("20")
    assert len(texts[0]) == 7
    for i in (1, 2):
        value = json.loads(texts[i])
        assert value["a"] <= 999
        assert value["b"] in ("x", "y")


def test_a_budget_that_ends_within_the_form_ends_with_length(
    opened: OpenedRunner, tokenizer: Tokenizer
) -> None:
    built, _ = engine(opened)
    sampling = SamplingParams(max_tokens=3, grammar=OBJECT, temperature=1.5)
    built.add(GenerateRequest(request_id=0, prompt_ids=(5, 6, 7), sampling=sampling), "")
    collected = run_until_idle(built, Collected())
    assert collected.finished[0, 0] is FinishReason.LENGTH
    assert not collected.errors
    text = tokenizer.decode(collected.tokens[0, 0])
    assert text.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_a_grammar_that_fails_fails_alone(opened: OpenedRunner) -> None:
    built, _ = engine(opened)
    built.add(asked(0, "("), "")
    built.add(asked(1, DATE), "")
    collected = run_until_idle(built, Collected())
    assert "the grammar cannot be followed" in collected.errors[0, 0]
    assert collected.finished[1, 0] is FinishReason.STOP


def test_the_runner_prepares_grammars(opened: OpenedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(Constraints, "prepare", lambda _, grammar: heard.append(grammar))
    assert isinstance(opened.runner, TorchRunner)
    opened.runner.prepare(SamplingParams(max_tokens=1, grammar=DATE))
    opened.runner.prepare(SamplingParams(max_tokens=1))
    assert heard == [DATE]
