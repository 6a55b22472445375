"""A pass in one call gives the bits of the module it stands for, and stands for no other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from replicas.attention.base import KVPoolSpec
from replicas.attention.numba_cpu import NumbaAttention
from replicas.attention.numba_kernels import PART
from replicas.attention.sdpa import SdpaAttention
from replicas.config import Quantization
from replicas.model import LoadedModel, load_model
from replicas.model_adapt import adapt
from replicas.model_blocks import available
from replicas.model_layer import RowNorm
from replicas.model_pass import ModelPass, open_pass
from replicas.model_source import ModelFiles
from replicas.packing import AttentionBatch, PackedStep
from replicas.progress import silent
from tests.replicas.tiny_models import COMMON, MODELS, save

CPU = torch.device("cpu")
needs_team = pytest.mark.skipif(not available(), reason="needs AVX-512 with VNNI")


def adapted(config: PreTrainedConfig, folder: Path, quantization: Quantization) -> LoadedModel:
    model = load_model(ModelFiles(name="tiny", folder=save(config, folder)), CPU, torch.float32, silent)
    adapt(model, quantization, "exact", Path(), 512, silent)
    return model


def spec(model: LoadedModel) -> KVPoolSpec:
    return KVPoolSpec(
        needs=model.needs, num_blocks=8, block_size=32, dtype=torch.float32, device=CPU, num_threads=1
    )


def step(lengths: list[int]) -> PackedStep:
    """Whole prompts, each in blocks of its own, and the last row of each to keep."""
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(n) for n in lengths])
    tables = np.arange(2 * len(lengths)).reshape(-1, 2)
    slots = [tables[i, p // 32] * 32 + p % 32 for i, n in enumerate(lengths) for p in range(n)]
    return PackedStep(
        token_ids=(np.arange(len(positions)) * 37) % COMMON["vocab_size"],
        positions=positions,
        sample_rows=starts[1:] - 1,
        batch=AttentionBatch(
            query_start_loc=starts.astype(np.int32),
            seq_lens=np.array(lengths, dtype=np.int32),
            block_tables=tables.astype(np.int32),
            slot_mapping=np.array(slots, dtype=np.int32),
        ),
    )


@needs_team
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_pass_gives_the_bits_of_the_module(name: str, quantization: Quantization, tmp_path: Path) -> None:
    model = adapted(MODELS[name](), tmp_path, quantization)
    backend = NumbaAttention(spec(model))
    whole_pass = open_pass(model, backend)
    assert isinstance(whole_pass, ModelPass)

    def attention(
        layer: int, query: Any, key: Any, value: Any, scaling: float, _window: Any, softcap: Any
    ) -> Any:
        backend.store(layer, key, value)
        return backend.attend(layer, query, scaling, model.needs.windows[layer], softcap)

    packed = step([40, 1, 17])
    ids, positions, rows = map(torch.from_numpy, (packed.token_ids, packed.positions, packed.sample_rows))
    with torch.inference_mode():
        backend.begin_step(packed.batch)
        model.module.model.norm = RowNorm(model.module.model.norm)  # type: ignore[union-attr, arg-type]
        expected = model.logits(ids, positions, rows, attention)  # type: ignore[arg-type]
        assert torch.equal(whole_pass.logits(packed, packed.sample_rows), expected)
        nothing = np.zeros(0, dtype=np.int64)
        assert whole_pass.logits(packed, nothing).shape == (0, COMMON["vocab_size"])


@needs_team
@pytest.mark.parametrize("length", [2 * PART + 3, PART, PART + 1])
def test_threads_share_a_long_sequence_without_changing_a_bit(length: int, tmp_path: Path) -> None:
    """A decode that is cut into parts, and the same with one thread, which cuts nothing."""
    model = adapted(MODELS["llama"](), tmp_path, "none")
    blocks = -(-length // 32)
    packed = PackedStep(
        token_ids=np.array([5]),
        positions=np.array([7]),
        sample_rows=np.array([0]),
        batch=AttentionBatch(
            query_start_loc=np.array([0, 1], dtype=np.int32),
            seq_lens=np.array([length], dtype=np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None, ::-1].copy(),
            slot_mapping=np.array([(length - 1) % 32], dtype=np.int32),
        ),
    )
    bits = []
    for num_threads in (1, 2):
        backend = NumbaAttention(replace(spec(model), num_blocks=blocks, num_threads=num_threads))
        whole_pass = open_pass(model, backend)
        assert whole_pass is not None
        for pool in backend.pools:
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(4)))
        with torch.inference_mode():
            backend.begin_step(packed.batch)
            assert bool(len(backend.pieces.starts) > 1) == (num_threads == 2 and length > PART)
            bits.append(whole_pass.logits(packed, packed.sample_rows))
    assert torch.equal(*bits)


@needs_team
def test_biases_of_all_projections_take_part(tmp_path: Path) -> None:
    config = LlamaConfig(**COMMON, num_hidden_layers=1, attention_bias=True, mlp_bias=True)
    model = adapted(config, tmp_path, "none")
    assert open_pass(model, NumbaAttention(spec(model))) is not None


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_other_models_have_none(name: str, tmp_path: Path) -> None:
    model = adapted(MODELS[name](), tmp_path, "none")
    assert open_pass(model, NumbaAttention(spec(model))) is None


def test_other_attention_has_none(tmp_path: Path) -> None:
    model = adapted(MODELS["llama"](), tmp_path, "none")
    assert open_pass(model, SdpaAttention(spec(model))) is None


@needs_team
def test_a_model_that_does_more_than_its_layers_has_none(tmp_path: Path) -> None:
    """As Granite scales its logits, and Gemma its embeddings."""
    model = adapted(MODELS["llama"](), tmp_path, "none")
    inner = model.module.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits *= 1.01
        return output

    model.module.forward = scaled  # type: ignore[method-assign]
    assert open_pass(model, NumbaAttention(spec(model))) is None
