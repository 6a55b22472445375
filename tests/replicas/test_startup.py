from pathlib import Path

import pytest
from transformers import AutoTokenizer

from replicas import model_adapt, startup
from replicas.api import GenerateRequest, SamplingParams
from replicas.attention.base import AttentionBackend
from replicas.config import EngineConfig
from replicas.engine import Engine
from replicas.errors import ConfigError
from replicas.startup import open_runner
from tests.replicas.fake_runner import run_until_idle
from tests.replicas.tiny_models import VOCAB_SIZE, llama, save

BYTES_PER_TOKEN = 2 * 3 * 2 * 16 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(llama(), tmp_path_factory.mktemp("tiny"))


def config(folder: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": str(folder),
        "num_threads": 1,
        "max_model_len": 128,
        "kv_cache_memory": 32 * 16 * BYTES_PER_TOKEN,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


def refusal(given: EngineConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        open_runner(given)
    return str(caught.value)


def test_the_card_says_what_was_opened(folder: Path) -> None:
    opened = open_runner(config(folder))
    assert (opened.attention, opened.numerics, opened.num_threads) == ("numba_cpu", "exact", 1)
    card = opened.card
    assert (card.name, card.vocab_size, card.eos_token_ids) == (folder.name, VOCAB_SIZE, (2,))
    assert (card.num_blocks, card.block_size, card.max_model_len) == (32, 16, 128)
    assert card.max_num_seqs == opened.resolved.max_num_seqs
    assert opened.files.folder == folder


def test_every_start_has_its_own_epoch_and_the_same_fingerprint(folder: Path) -> None:
    first, second = (open_runner(config(folder)).card for _ in range(2))
    assert first.replica_epoch != second.replica_epoch
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_tells_weights_and_numerics_apart(folder: Path, tmp_path: Path) -> None:
    changed = llama()
    changed.rms_norm_eps = 0.01
    prints = {
        open_runner(config(folder)).card.fingerprint,
        open_runner(config(folder, numerics="fast")).card.fingerprint,
        open_runner(config(save(changed, tmp_path))).card.fingerprint,
    }
    assert len(prints) == 3


def test_small_pools_are_refused_with_the_numbers(folder: Path) -> None:
    assert "holds 16 tokens, fewer than one sequence of max_model_len 128" in refusal(
        config(folder, kv_cache_memory=16 * BYTES_PER_TOKEN)
    )


def test_more_memory_than_there_is_is_refused(folder: Path) -> None:
    assert "kv_cache_memory 1152921504606846976 (1099511627776 MiB) is more than the " in refusal(
        config(folder, kv_cache_memory=1 << 60)
    )


def test_weights_larger_than_memory_are_refused_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "available_memory_bytes", lambda: 1000)
    assert "for its weights, but only 0 MiB are available" in refusal(config(folder))


def test_the_default_pool_is_a_share_of_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "available_memory_bytes", lambda: 8 << 20)
    opened = open_runner(config(folder, kv_cache_memory=None))
    assert opened.resolved.num_blocks == (2 << 20) // (16 * BYTES_PER_TOKEN)


def test_an_engine_that_promises_gaps_takes_its_memory_before_it_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[AttentionBackend] = []
    monkeypatch.setattr(startup, "take_memory", taken.append)
    open_runner(config(folder))
    assert taken == []
    open_runner(config(folder, itl_target_ms=50.0))
    open_runner(config(folder, tier_itl_target_ms={0: 50.0}))
    assert len(taken) == 2


def test_block_sizes_a_backend_cannot_do_are_refused(folder: Path) -> None:
    assert refusal(config(folder, block_size=12)) == (
        "block_size 12: attention backend numba_cpu needs a multiple of 16"
    )


def test_exact_numerics_that_do_not_hold_are_refused_if_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding this model's rows depend on their number."""
    monkeypatch.setattr(model_adapt, "open_team", lambda _: None)
    monkeypatch.setattr(model_adapt, "make_exact", lambda _: 1)
    assert "numerics exact: this model's logits depend on the batch" in refusal(
        config(folder, numerics="exact")
    )
    assert open_runner(config(folder)).numerics == "fast"


def test_fast_numerics_pad_nothing_and_answer_too(folder: Path) -> None:
    opened = open_runner(config(folder, numerics="fast"))
    assert opened.numerics == "fast"
    answers = []
    for numerics in ("fast", "exact"):
        opened = open_runner(config(folder, numerics=numerics))
        engine = Engine(opened.resolved, opened.runner, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
        sampling = SamplingParams(max_tokens=9, temperature=0.0)
        engine.add(GenerateRequest(request_id=0, prompt_ids=(5, 6, 7), sampling=sampling), "a")
        answers.append(run_until_idle(engine).tokens[0, 0])
    assert answers[0] == answers[1]


def test_the_demo_model_knows_the_capital_of_france() -> None:
    opened = open_runner(
        EngineConfig(max_model_len=256, kv_cache_memory=32 << 20, max_num_batched_tokens=32, num_threads=1)
    )
    tokenizer = AutoTokenizer.from_pretrained(opened.files.folder)
    message = {"role": "user", "content": "What is the capital of France?"}
    encoded = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
    engine = Engine(
        opened.resolved,
        opened.runner,
        vocab_size=opened.card.vocab_size,
        eos_token_ids=frozenset(opened.card.eos_token_ids),
    )
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    engine.add(GenerateRequest(request_id=0, prompt_ids=tuple(encoded["input_ids"]), sampling=sampling), "a")
    answer = run_until_idle(engine).tokens[0, 0]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
