"""What memory allows: how long it takes to read a model's weights once, beside what its products take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig

from replicas.attention.base import KVPoolSpec
from replicas.attention.numba_cpu import NumbaAttention
from replicas.config import Quantization, ResolvedConfig
from replicas.model import build_random_model
from replicas.model_adapt import adapt
from replicas.model_fp32 import PackedLinear
from replicas.model_int8 import Int8Linear
from replicas.model_pass import open_pass
from replicas.model_products import CHUNKS, NUM_PRODUCT_CELLS, NUM_ROWS, WEIGHT
from replicas.model_team_kernels import run_products
from replicas.progress import Progress
from replicas.runner import TorchRunner

_READ_BYTES: Final = 512 << 20
"""Far more than caches hold."""
_REPEATS: Final = 7
_MAX_MODEL_LEN: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Best of several times, for one row of one step: what disturbs a run only ever makes it longer."""

    weight_bytes: int
    """Of all linear layers, as the products read them."""
    read_bytes_per_s: float
    products_s: float
    """All linear layers, one after the other, nothing between them; those of a team in one compiled call."""

    @property
    def seconds(self) -> float:
        return self.weight_bytes / self.read_bytes_per_s


def measure_floor(module: nn.Module) -> Floor:
    """Measure on this thread's number of torch threads; a second for a large model."""
    kinds = Int8Linear | PackedLinear | nn.Linear
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    cells = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    with torch.inference_mode():
        return Floor(
            weight_bytes=sum(layer.weight.nbytes for layer in layers),
            read_bytes_per_s=_READ_BYTES / _best_s(cells.sum),
            products_s=_best_s(_products_of(layers)),
        )


def _products_of(layers: Sequence[Int8Linear | PackedLinear | nn.Linear]) -> Callable[[], None]:
    """Return a call that multiplies one row by every layer's weight."""
    packed = [layer for layer in layers if not isinstance(layer, nn.Linear)]
    teams = {id(layer.team): layer.team for layer in packed}
    team = next(iter(teams.values()), None)
    if team is None or len(packed) < len(layers) or len(teams) > 1:
        inputs = [torch.randn(1, layer.in_features) for layer in layers]

        def multiply() -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        return multiply
    widest = max(max(layer.in_features, len(layer.weight.bias)) for layer in packed)
    row = np.zeros((4, widest), dtype=np.float32)  # outputs, inputs, scales, zeros
    products = np.zeros((len(packed), NUM_PRODUCT_CELLS), dtype=np.int64)
    for product, layer in zip(products, packed, strict=True):
        product[:WEIGHT] = [part.ctypes.data for part in row]
        product[WEIGHT:NUM_ROWS] = layer.weight.cells
        product[NUM_ROWS:CHUNKS] = 1, layer.in_features, len(layer.weight.bias)

    memory = (row, products)  # the call must keep what the addresses point to

    def run() -> None:
        team.wake()
        run_products(team.state, memory[1])

    return run


def _best_s(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(_REPEATS):
        started_at = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_at)
    return min(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRunner:
    """A runner over random weights, and the sizes it runs with."""

    runner: TorchRunner
    resolved: ResolvedConfig
    vocab_size: int


def llama_1b() -> LlamaConfig:
    """The shape of Llama 3.2 1B: 1.24e9 parameters."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=_MAX_MODEL_LEN,
        tie_word_embeddings=True,
    )


def random_runner(config: LlamaConfig, quantization: Quantization, progress: Progress) -> RandomRunner:
    """Build a model on CPU, as the engine would load it; some 10 GB at the peak for llama_1b."""
    progress("drawing random weights", None)
    num_threads = torch.get_num_threads()
    model = build_random_model(config, torch.device("cpu"), torch.float32)
    adapted = adapt(model, quantization, "exact", Path(), _MAX_MODEL_LEN, progress)
    resolved = ResolvedConfig(
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=1,
        max_num_batched_tokens=_MAX_MODEL_LEN,
        block_size=NumbaAttention.preferred_block_size,
        num_blocks=_MAX_MODEL_LEN // NumbaAttention.preferred_block_size,
    )
    spec = KVPoolSpec(
        needs=model.needs,
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        dtype=model.dtype,
        device=model.device,
        num_threads=num_threads,
    )
    backend = NumbaAttention(spec)
    runner = TorchRunner(
        model,
        backend,
        None,
        block_size=resolved.block_size,
        row_floor=adapted.row_floor,
        whole_pass=open_pass(model, backend),
    )
    return RandomRunner(runner=runner, resolved=resolved, vocab_size=model.vocab_size)
