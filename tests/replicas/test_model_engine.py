"""The engine over real (tiny, random) models: the answers are transformers' own, and bits never change."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from replicas.api import GenerateRequest, SamplingParams
from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.runner import TorchRunner
from replicas.sequence import Sequence, SequenceStatus
from replicas.startup import OpenedRunner, open_runner
from replicas.step import Step, StepResult
from tests.replicas.fake_runner import Collected, run_until_idle
from tests.replicas.tiny_models import MODELS, VOCAB_SIZE, reference_tokens, save

MAX_MODEL_LEN = 128
ROOMY = 64
TIGHT = 10
"""KV blocks: too few for the sequences of these tests to run side by side."""

LogitBits = dict[tuple[int, int, int], bytes]
"""By request id, output index and number of tokens before."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(make(), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> OpenedRunner:
    return open_tiny(folders["llama"], TIGHT)


def open_tiny(folder: Path, num_blocks: int, **changes: object) -> OpenedRunner:
    shape = json.loads((folder / "config.json").read_text())
    bytes_per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * 16 * 4
    values: dict[str, object] = {
        "model": str(folder),
        "num_threads": 1,  # with more, a busy machine makes every barrier wait for a time slice
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "kv_cache_memory": num_blocks * 16 * bytes_per_token,
    }
    return open_runner(EngineConfig(**(values | changes)))  # type: ignore[arg-type]


class WatchedRunner:
    """Notes the bits of every sampled row's logits, and how often sequences were preempted.

    With `poison`, every block that no running sequence holds is overwritten before each step.
    """

    def __init__(self, inner: TorchRunner, poison: float | None = None) -> None:
        self.logits: LogitBits = {}
        self.preempted: set[int] = set()
        self.chunks = 0
        self._inner = inner
        self._poison = poison
        self._seen: dict[int, Sequence] = {}

    def execute(self, step: Step) -> StepResult:
        self._seen |= {entry.sequence.seq_id: entry.sequence for entry in step.sequences}
        self._overwrite_free_blocks()
        sampling = [entry.sequence for entry in step.sequences if entry.samples]
        for sequence, row in zip(sampling, self._inner.logits(step.sequences), strict=True):
            key = (sequence.request.request_id, sequence.index, sequence.num_tokens)
            bits = row.numpy().tobytes()
            assert self.logits.setdefault(key, bits) == bits, f"{key} has other bits the second time"
        self.chunks += sum(not entry.samples for entry in step.sequences)
        self.preempted |= {e.sequence.seq_id for e in step.sequences if e.sequence.num_preemptions}
        return self._inner.execute(step)

    def _overwrite_free_blocks(self) -> None:
        if self._poison is None:
            return
        running = [s for s in self._seen.values() if s.status is SequenceStatus.RUNNING]
        held = {block for sequence in running for block in sequence.block_table}
        for pool in self._inner.backend.pools:
            free = [block for block in range(len(pool)) if block not in held]
            pool[free] = self._poison


def engine(
    opened: OpenedRunner, poison: float | None = None, prefix_caching: bool = True
) -> tuple[Engine, WatchedRunner]:
    watched = WatchedRunner(opened.runner, poison)
    config = msgspec.structs.replace(opened.resolved, enable_prefix_caching=prefix_caching)
    built = Engine(config, watched, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(opened.card.eos_token_ids))
    return built, watched


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    """Random prompts; the longer ones share a prefix of 34 tokens, two full blocks and a bit."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(34)]
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths]
    return [tuple(ids if len(ids) <= 40 else shared + ids[34:]) for ids in own]


def request(request_id: int, prompt: tuple[int, ...], **sampling: object) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 24, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return GenerateRequest(request_id=request_id, prompt_ids=prompt, sampling=params)


def run_alone(opened: OpenedRunner, requests: list[GenerateRequest]) -> tuple[Collected, LogitBits]:
    """Each request on an empty engine, without prefix cache."""
    collected = Collected()
    logits: LogitBits = {}
    for one in requests:
        built, watched = engine(opened, prefix_caching=False)
        built.add(one, "a")
        run_until_idle(built, collected)
        logits |= watched.logits
    return collected, logits


def run_together(built: Engine, requests: list[GenerateRequest]) -> Collected:
    for one in requests:
        built.add(one, "a")
    return run_until_idle(built)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_those_of_transformers_under_stress(name: str, folders: dict[str, Path]) -> None:
    opened = open_tiny(folders[name], TIGHT)
    assert opened.numerics == "exact"
    asked = [request(i, prompt) for i, prompt in enumerate(prompts(3, 70, 17, 55, 64, 90))]
    expected = {(r.request_id, 0): reference_tokens(folders[name], list(r.prompt_ids), 24) for r in asked}

    built, watched = engine(opened)
    together = run_together(built, asked)

    assert together.tokens == expected
    assert watched.chunks > 0
    assert watched.preempted
    assert sum(together.cached.values()) > 0


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("attention", ["numba_cpu", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_same_bits_alone_and_under_stress(
    name: str, attention: str, quantization: str, folders: dict[str, Path]
) -> None:
    kind: dict[str, object] = {"quantization": quantization, "attention": attention}
    opened = open_tiny(folders[name], TIGHT, **kind)
    assert opened.numerics == "exact"
    asked = [request(i, prompt) for i, prompt in enumerate(prompts(3, 70, 17, 55, 64, 90))]
    _, alone = run_alone(open_tiny(folders[name], ROOMY, max_num_batched_tokens=512, **kind), asked)
    built, watched = engine(opened)
    run_together(built, asked)
    assert watched.preempted
    assert watched.logits.keys() == alone.keys()
    assert watched.logits == alone


def test_logits_have_the_same_bits_with_more_threads(folders: dict[str, Path]) -> None:
    asked = [request(i, prompt, max_tokens=4) for i, prompt in enumerate(prompts(70, 17))]
    by_threads = []
    for num_threads in (1, 2):
        built, watched = engine(open_tiny(folders["llama"], ROOMY, num_threads=num_threads))
        run_together(built, asked)
        by_threads.append(watched.logits)
    assert by_threads[0] == by_threads[1]


@pytest.mark.parametrize("name", MODELS)
def test_reference_backend_gives_the_same_answers(name: str, folders: dict[str, Path]) -> None:
    opened = open_tiny(folders[name], ROOMY, attention="sdpa", block_size=4)
    prompt = prompts(55)[0]
    built, _ = engine(opened)
    answered = run_together(built, [request(0, prompt)])
    assert answered.tokens[0, 0] == reference_tokens(folders[name], list(prompt), 24)


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_poisoned_free_blocks_change_nothing(name: str, poison: float, folders: dict[str, Path]) -> None:
    opened = open_tiny(folders[name], TIGHT)
    rng = random.Random(11)
    asked = [request(i, p) for i, p in enumerate(prompts(*(rng.randrange(2, 90) for _ in range(12))))]
    alone, _ = run_alone(opened, asked)
    built, watched = engine(opened, poison, prefix_caching=False)
    seen, aborted = Collected(), set()
    for one in asked:
        built.add(one, "a")
        for _ in range(rng.randrange(12)):
            seen.add(built.step())
        if rng.random() < 0.3:
            victim = rng.randrange(one.request_id + 1)
            aborted.add(victim)
            built.abort("a", victim)
    run_until_idle(built, seen)
    assert watched.preempted
    survivors = [one.request_id for one in asked if one.request_id not in aborted]
    assert 4 <= len(survivors) < len(asked)
    for i in survivors:
        assert seen.tokens[i, 0] == alone.tokens[i, 0]


def test_a_prefix_hit_changes_no_answer(llama: OpenedRunner) -> None:
    """The same prompt three times, then with other chunk boundaries."""
    prompt = prompts(90)[0]
    built, _ = engine(llama)
    answers = [run_together(built, [request(i, prompt)]) for i in range(3)]
    assert [seen.cached[i, 0] for i, seen in enumerate(answers)] == [0, 80, 80]
    first = answers[0].tokens[0, 0]
    assert all(seen.tokens[i, 0] == first for i, seen in enumerate(answers))
    for budget in (4, 37):
        config = msgspec.structs.replace(llama.resolved, max_num_batched_tokens=budget)
        fresh = Engine(config, llama.runner, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({2}))
        assert run_together(fresh, [request(9, prompt)]).tokens[9, 0] == first


def test_a_seed_gives_the_same_answer_alone_and_among_others(llama: OpenedRunner) -> None:
    """Preempted, chunked, beside rows with other parameters, and twice at once."""
    rng = random.Random(5)
    asked = [
        request(
            i,
            prompt,
            temperature=rng.choice([0.7, 1.0, 1.5]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            seed=i % 6,
        )
        for i, prompt in enumerate(prompts(30, 61, 17, 80, 50, 8, 30))
    ]
    twin = GenerateRequest(request_id=100, prompt_ids=asked[1].prompt_ids, sampling=asked[1].sampling)
    asked.append(twin)
    alone, _ = run_alone(llama, asked)
    built, watched = engine(llama)
    together = run_together(built, asked)
    assert watched.preempted
    assert together.tokens == alone.tokens
    assert together.tokens[100, 0] == together.tokens[1, 0]


def test_other_seeds_and_other_indexes_give_other_answers(llama: OpenedRunner) -> None:
    prompt = prompts(20)[0]
    built, _ = engine(llama)
    sampling = SamplingParams(max_tokens=24, temperature=1.5, seed=1)
    built.add(GenerateRequest(request_id=0, prompt_ids=prompt, sampling=sampling, indexes=(0, 1)), "a")
    built.add(request(1, prompt, temperature=1.5, seed=2), "a")
    seen = run_until_idle(built)
    answers = {tuple(tokens) for tokens in seen.tokens.values()}
    assert len(answers) == 3


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-30, 0.0])
def test_a_tiny_temperature_is_greedy(temperature: float, llama: OpenedRunner) -> None:
    prompt = prompts(20)[0]
    built, _ = engine(llama)
    greedy = run_together(built, [request(0, prompt)]).tokens[0, 0]
    tiny = [
        request(1, prompt, temperature=temperature, top_p=0.1, seed=4),
        request(2, prompt, temperature=temperature, top_k=5, seed=5),
    ]
    seen = run_together(built, tiny)
    assert seen.tokens == {(1, 0): greedy, (2, 0): greedy}
    assert not seen.errors


def test_penalties_survive_preemption_and_resume(llama: OpenedRunner) -> None:
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    asked = [request(i, prompt, **penalties) for i, prompt in enumerate(prompts(70, 55, 64, 90))]
    alone, _ = run_alone(llama, asked)
    built, watched = engine(llama)
    together = run_together(built, asked)
    assert watched.preempted
    assert together.tokens == alone.tokens

    whole = alone.tokens[0, 0]
    plain, _ = run_alone(llama, [request(0, asked[0].prompt_ids)])
    assert plain.tokens[0, 0] != whole, "the penalties must matter for this test to mean anything"
    resumed = GenerateRequest(
        request_id=50,
        prompt_ids=asked[0].prompt_ids,
        sampling=asked[0].sampling,
        resumed_output_ids=(tuple(whole[:9]),),
    )
    assert run_together(built, [resumed]).tokens[50, 0] == whole[9:]


def test_min_tokens_masks_every_stop_token_until_then(llama: OpenedRunner) -> None:
    """The stop tokens are forced by a bias; exactly min_tokens others come first."""
    built, _ = engine(llama)
    forced = {"logit_bias": {2: 100.0, 77: 90.0}, "stop_token_ids": (77,), "min_tokens": 5}
    seen = run_together(built, [request(0, prompts(20)[0], **forced)])
    tokens = seen.tokens[0, 0]
    assert len(tokens) == 6
    assert tokens[-1] == 2
    assert not {2, 77} & set(tokens[:-1])
