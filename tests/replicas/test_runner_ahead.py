"""Launched ahead and replayed from graphs: the tokens of a plain runner, under load."""

import random
from collections.abc import Iterator

import pytest
import torch

from replicas.api import GenerateRequest, SamplingParams
from replicas.attention import load_backend
from replicas.attention.base import KVPoolSpec
from replicas.config import ResolvedConfig
from replicas.cuda_graphs import graph_sizes
from replicas.engine import Engine
from replicas.model import LoadedModel, load_model
from replicas.model_rotary import tabulate_rotary
from replicas.model_source import ModelFiles
from replicas.progress import silent
from replicas.runner import TorchRunner
from replicas.runner_ahead import AheadRunner
from replicas.startup import record_or_warn
from tests.replicas import tape
from tests.replicas.attention import fake_kernels
from tests.replicas.fake_runner import Collected, run_until_idle
from tests.replicas.tiny_models import MODELS, VOCAB_SIZE, save

CPU = torch.device("cpu")
MAX_MODEL_LEN = 300
NAMES = ("flash", "torch_varlen", "aten_varlen")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    loaded = {}
    for name in ("llama", "mistral", "gemma3"):
        folder = save(MODELS[name](), tmp_path_factory.mktemp(name))
        for dtype in (torch.float32, torch.bfloat16):
            model = load_model(ModelFiles(name=name, folder=folder), CPU, dtype, silent)
            tabulate_rotary(model.module, MAX_MODEL_LEN)
            loaded[f"{name}-{dtype.itemsize}"] = model
    return loaded


def config(block_size: int, num_blocks: int) -> ResolvedConfig:
    return ResolvedConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=block_size,
        num_blocks=num_blocks,
    )


def engine(
    kind: type[TorchRunner], model: LoadedModel, attention: str, resolved: ResolvedConfig
) -> tuple[Engine, TorchRunner]:
    spec = KVPoolSpec(
        needs=model.needs,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        dtype=model.dtype,
        device=CPU,
        num_threads=1,
    )
    runner = kind(model, load_backend(attention)(spec), None, block_size=resolved.block_size, row_floor=1)
    return Engine(resolved, runner, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({2})), runner


def requests(count: int, longest: int) -> list[GenerateRequest]:
    rng = random.Random(4)
    made = []
    for i in range(count):
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 30),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            top_k=rng.choice([0, 20]),
            seed=i,
            logprobs=rng.choice([None, 2]),
            presence_penalty=0.5 if i % 7 == 6 else 0.0,
        )
        prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, longest)))
        made.append(GenerateRequest(request_id=i, prompt_ids=prompt, sampling=sampling))
    return made


def answers(built: Engine, asked: list[GenerateRequest]) -> Collected:
    """Requests arrive while others run."""
    seen = Collected()
    for one in asked:
        built.add(one, "a")
        for _ in range(5):
            seen.add(built.step())
    return run_until_idle(built, seen)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_launching_ahead_changes_no_answer(models: dict[str, LoadedModel], name: str) -> None:
    """The reference backend, bitwise the same for a row in any company; few blocks."""
    model = models[f"{name}-4"]
    asked = requests(12, longest=60)
    collected = [
        answers(engine(kind, model, "numba_cpu", config(16, 20))[0], asked)
        for kind in (TorchRunner, AheadRunner)
    ]
    assert collected[1].tokens == collected[0].tokens
    assert collected[1].finished == collected[0].finished


@pytest.mark.parametrize("attention", NAMES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_graphs_change_no_answer(
    models: dict[str, LoadedModel], name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_kernels.install(monkeypatch)
    model = models[f"{name}-2"]
    asked = requests(10, longest=270)
    eager, _ = engine(AheadRunner, model, attention, config(256, 12))
    graphed, runner = engine(AheadRunner, model, attention, config(256, 12))
    assert isinstance(runner, AheadRunner)
    runs = []

    def record(run: tape.Run) -> tape.Run:
        replay = tape.record(run)

        def counted() -> None:
            runs.append(1)
            replay()

        return counted

    runner.record_graphs(record, 6, MAX_MODEL_LEN)
    expected, found = answers(eager, asked), answers(graphed, asked)
    assert found.tokens == expected.tokens
    assert len(runs) > 20


def test_sizes_are_dense_where_padding_costs_most() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(33) == [1, 2, 4, 8, 16, 24, 32, 33]
    assert graph_sizes(300)[-4:] == [256, 272, 288, 300]
    for count in range(1, 513):
        assert min(size for size in graph_sizes(512) if size >= count) <= max(count + 15, 4)


def test_a_model_that_cannot_be_recorded_runs_without_graphs(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_kernels.install(monkeypatch)
    resolved = config(256, 12)
    built, runner = engine(AheadRunner, models["llama-2"], "aten_varlen", resolved)
    assert isinstance(runner, AheadRunner)

    def refuse(run: tape.Run) -> tape.Run:
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    assert not record_or_warn(runner, refuse, resolved)
    assert "no CUDA graphs for this model: operation not permitted when stream is capturing" in caplog.text
    asked = requests(3, longest=40)
    assert {key[0] for key in answers(built, asked).finished} == {0, 1, 2}
