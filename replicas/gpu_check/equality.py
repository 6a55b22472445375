"""The engine's answers from CUDA graphs against those of the same launches made one by one."""

import random
from typing import Final

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from replicas.api import GenerateRequest, SamplingParams
from replicas.attention import choose_backend
from replicas.attention.base import GraphableAttention, KVPoolSpec
from replicas.config import ResolvedConfig
from replicas.cuda_graphs import CudaRecorder, Recorder, Replay
from replicas.engine import Engine
from replicas.model import LoadedModel, build_random_model
from replicas.model_exact import make_exact
from replicas.model_rotary import tabulate_rotary
from replicas.runner import TorchRunner
from replicas.runner_ahead import AheadRunner

Answers = dict[int, list[int]]

MAX_MODEL_LEN: Final = 600
_MAX_NUM_SEQS: Final = 12
_NUM_REQUESTS: Final = 30
_VOCAB_SIZE: Final = 2000
_SIZES: Final = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}


def check_equality(device: torch.device) -> bool:
    """Print one line per model; return whether all answers are equal.

    On CPU, without graphs: steps launched ahead against steps one by one.
    """
    passed = True
    models: dict[str, PreTrainedConfig] = {
        "llama": LlamaConfig(**_SIZES),
        "mistral, window 100": MistralConfig(**_SIZES, sliding_window=100),
    }
    for name, config in models.items():
        torch.manual_seed(1)
        model = build_random_model(config, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        tabulate_rotary(model.module, MAX_MODEL_LEN)
        if device.type == "cuda":
            what = "graphs against single launches"
            recorders: tuple[Recorder, Recorder] = (_one_by_one, CudaRecorder())
            expected, found = (answer(model, AheadRunner, recorder) for recorder in recorders)
        else:
            what = "ahead against one by one"
            row_floor = make_exact(model.module)  # or answers would depend on who shares a step
            kinds = (TorchRunner, AheadRunner)
            expected, found = (answer(model, kind, None, row_floor) for kind in kinds)
        wrong = [request_id for request_id in expected if expected[request_id] != found[request_id]]
        print(f"equality {name}, {what}: {f'FAILED for {wrong}' if wrong else 'ok'}")
        passed &= not wrong
    return passed


def answer(
    model: LoadedModel, kind: type[TorchRunner], recorder: Recorder | None, row_floor: int = 1
) -> Answers:
    """Generate for requests that come while others run, with more of them than fit at a time."""
    backend_class = choose_backend("auto", model.device, model.dtype, model.needs)
    block_size = backend_class.preferred_block_size
    num_blocks = 4096 // block_size
    spec = KVPoolSpec(
        needs=model.needs,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=model.dtype,
        device=model.device,
        num_threads=1,
    )
    backend = backend_class(spec)
    runner = kind(model, backend, None, block_size=block_size, row_floor=row_floor)
    if recorder is not None and isinstance(runner, AheadRunner) and isinstance(backend, GraphableAttention):
        runner.record_graphs(recorder, _MAX_NUM_SEQS, MAX_MODEL_LEN)
    config = ResolvedConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=512,
        block_size=block_size,
        num_blocks=num_blocks,
    )
    engine = Engine(config, runner, vocab_size=_VOCAB_SIZE, eos_token_ids=frozenset())
    return _generate(engine)


def _generate(engine: Engine) -> Answers:
    answers: Answers = {}
    waiting = _requests()
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(), "check")
        for deltas in engine.step().values():
            for delta in deltas:
                answers.setdefault(delta.request_id, []).extend(delta.token_ids)
    return answers


def _requests() -> list[GenerateRequest]:
    rng = random.Random(3)
    return [
        GenerateRequest(
            request_id=i,
            prompt_ids=tuple(rng.randrange(_VOCAB_SIZE) for _ in range(rng.randrange(1, 300))),
            sampling=SamplingParams(
                max_tokens=rng.randrange(1, 60),
                temperature=rng.choice([0.0, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                seed=i,
            ),
        )
        for i in range(_NUM_REQUESTS)
    ]


def _one_by_one(run: Replay) -> Replay:
    """A Recorder that records nothing."""
    return run
