"""A model's whole pass as one compiled call, where all of it is known: Llama layers over a team's products.

In a small step the calls between Python, torch and numba cost more than what they compute. ModelPass takes
none but the embedding's. It is used where it computes what the module does, which is tried, not assumed: with
the same attention and the same products on the same tokens both give the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from replicas import model_layer_kernels as cells
from replicas.attention.base import AttentionBackend
from replicas.attention.numba_cpu import QUERY_ROWS, NumbaAttention, padded_width
from replicas.attention.numba_kernels import state_size
from replicas.model import LoadedModel
from replicas.model_fp32 import PackedLinear
from replicas.model_int8 import Int8Head, Int8Linear
from replicas.model_layer import FusedLayer, RowNorm
from replicas.model_pass_kernels import NUM_LAYER_CELLS, run_pass
from replicas.model_products import NUM_INPUTS, NUM_OUTPUTS, NUM_PRODUCT_CELLS, WEIGHT
from replicas.model_team import Team
from replicas.packing import AttentionBatch, LongArray, PackedStep

_TRIAL_ROWS: Final = 8
_TOLERANCE: Final = 1e-4
_SCRATCH: Final = slice(cells.NORMED, cells.BYTES + 1)

_Linear = Int8Linear | PackedLinear


class ModelPass:
    """Computes what `model` does with `backend`. Raises AttributeError or TypeError where it is of another
    kind."""

    def __init__(self, model: LoadedModel, backend: NumbaAttention) -> None:
        module: Any = model.module
        layers = [_expect(FusedLayer, layer) for layer in module.model.layers]
        head = _expect(_Linear, module.get_output_embeddings())
        self._embedding = _expect(nn.Embedding, module.model.embed_tokens)
        self._rotary = module.model.rotary_emb
        self._backend = backend
        self._module = module  # the addresses below are its weights'
        self._team: Team = _expect(Team, head.team)
        self._vocab_size = head.weight.bias.shape[0]
        self._numbers = np.zeros((len(layers) + 1, 5), dtype=np.float32)
        self._records = np.zeros((len(layers) + 1, NUM_LAYER_CELLS), dtype=np.int64)
        for i, layer in enumerate(layers):
            self._describe(i, layer, model.needs.windows[i])
        norm = module.model.norm
        self._records[-1, cells.NORM_INPUT] = norm.weight.data_ptr()
        self._numbers[-1, 0] = norm.variance_epsilon
        self._set_products(-1, [head])
        self._records[:, cells.NUMBERS] = [numbers.ctypes.data for numbers in self._numbers]
        self._frame = self._new_frame(model, layers[0], head)
        # The widths of what stands in _SCRATCH, float32, the bytes in as many cells.
        frame = self._frame
        hidden, mlp = int(frame[cells.HIDDEN]), int(frame[cells.MLP_WIDTH])
        heads = int(frame[cells.HEADS] * frame[cells.HEAD_DIM])
        qkv = heads + int(2 * frame[cells.KV_HEADS] * frame[cells.HEAD_DIM])
        widths = [hidden, qkv, heads, hidden, 2 * mlp, mlp, 1, 1, max(hidden, heads, mlp)]
        self._starts = np.array([0, *accumulate(widths)])
        self._scratch = np.empty(0, dtype=np.float32)

    def logits(
        self,
        packed: PackedStep,  # with which the backend's step has begun
        keep: LongArray,  # [n]; rows whose logits are wanted
    ) -> Tensor:  # [n, vocab_size] float32
        """Compute the step, its padding left out."""
        frame, batch, rows = self._frame, packed.batch, packed.batch.num_rows
        x = self._embedding(torch.from_numpy(packed.token_ids[:rows]))
        cos, sin = self._rotary(x, torch.from_numpy(packed.positions[None, :rows]))
        logits = torch.empty(len(keep), self._vocab_size)
        work, order = self._backend.work, self._backend.order
        frame[cells.ROWS], frame[cells.KEPT] = rows, len(keep)
        frame[cells.MAX_BLOCKS], frame[cells.ITEMS] = batch.block_tables.shape[1], len(work)
        frame[cells.SEQUENCES] = len(batch.block_tables)
        tensors = (x, cos, sin)
        frame[cells.X : cells.SIN + 1] = [tensor.data_ptr() for tensor in tensors]
        arrays = (keep, batch.slot_mapping, batch.block_tables, work, order)
        frame[cells.KEEP : cells.ORDER + 1] = [array.ctypes.data for array in arrays]
        frame[cells.LOGITS] = logits.data_ptr()
        pieces = self._backend.pieces
        frame[cells.PIECES] = len(pieces.pairs_and_parts)
        partial = np.empty(frame[cells.PIECES] * frame[cells.PARTIAL_SIZE], dtype=np.float32)
        cut = (pieces.pairs_and_parts, pieces.starts, partial)
        frame[cells.PAIRS_AND_PARTS : cells.PARTIAL + 1] = [array.ctypes.data for array in cut]
        most = max(rows, len(keep))
        size = most * int(self._starts[-1])
        if size > len(self._scratch):
            self._scratch = np.empty(size, dtype=np.float32)
        frame[_SCRATCH] = self._scratch.ctypes.data + 4 * most * self._starts[:-1]
        self._team.wake()
        run_pass(self._team.state, frame)
        return logits

    def _new_frame(self, model: LoadedModel, layer: FusedLayer, head: _Linear) -> LongArray:
        frame = np.zeros(cells.NUM_FRAME_CELLS, dtype=np.int64)
        frame[cells.HIDDEN] = head.in_features
        frame[cells.HEADS] = model.needs.num_heads
        frame[cells.KV_HEADS] = model.needs.num_kv_heads
        frame[cells.HEAD_DIM] = model.needs.head_dim
        frame[cells.MLP_WIDTH] = layer.down.in_features
        frame[cells.VOCAB_SIZE] = self._vocab_size
        frame[cells.NUM_LAYERS] = len(self._records) - 1
        frame[cells.BLOCK_SIZE] = self._backend.block_size
        lanes = QUERY_ROWS * model.needs.num_heads // model.needs.num_kv_heads
        frame[cells.PARTIAL_SIZE] = state_size(lanes, padded_width(model.needs.head_dim))
        frame[cells.LAYERS] = self._records.ctypes.data
        if isinstance(head, Int8Head):
            frame[cells.QUANTISED] = 1
            frame[cells.FULL_HEAD] = head.full_weight.data_ptr()
        return frame

    def _describe(self, index: int, layer: FusedLayer, window: int | None) -> None:
        record = self._records[index]
        record[cells.FIRST] = index == 0
        norms = [*layer.norms, *layer.head_norms]
        for place, norm in enumerate(norms):
            record[cells.NORM_INPUT + place] = norm.weight.data_ptr()
            self._numbers[index, place] = norm.variance_epsilon
        self._numbers[index, 4] = layer.scaling
        keys, values = self._backend.pools_of(index)
        record[cells.KEYS], record[cells.VALUES] = keys.ctypes.data, values.ctypes.data
        record[cells.POOL_SIZE] = keys.size
        record[cells.WINDOW] = window or 0
        self._set_products(index, [layer.qkv, layer.output, layer.gate_up, layer.down])

    def _set_products(self, index: int, linears: list[nn.Module]) -> None:
        products = self._records[index, cells.PRODUCTS :].reshape(-1, NUM_PRODUCT_CELLS)
        for product, linear in zip(products, linears, strict=False):
            weight = _expect(_Linear, linear).weight
            product[WEIGHT : WEIGHT + 4] = weight.cells
            product[NUM_INPUTS], product[NUM_OUTPUTS] = weight.num_inputs, len(weight.bias)


def _expect(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} is not what a pass is made of")
    return value


def open_pass(model: LoadedModel, backend: AttentionBackend) -> ModelPass | None:
    """Return a pass over `model` if one can be had and gives the module's results. Writes to the pool's first
    block."""
    if not isinstance(backend, NumbaAttention):
        return None
    try:
        made = ModelPass(model, backend)
    except (AttributeError, TypeError):  # of foreign modules: not what was expected
        return None

    def attention(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,  # noqa: ARG001 - as in the runner
        softcap: float | None,
    ) -> Tensor:
        backend.store(layer, key, value)
        return backend.attend(layer, query, scaling, model.needs.windows[layer], softcap)

    rows = min(_TRIAL_ROWS, backend.block_size)
    batch = AttentionBatch(
        query_start_loc=np.array([0, rows], dtype=np.int32),
        seq_lens=np.array([rows], dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        slot_mapping=np.arange(rows, dtype=np.int32),
    )
    positions = np.arange(rows)
    token_ids = positions * 7919 % model.vocab_size
    packed = PackedStep(token_ids=token_ids, positions=positions, sample_rows=positions, batch=batch)
    places = torch.from_numpy(positions)
    with torch.inference_mode(), _row_norm(model.module) as is_the_norm:
        backend.begin_step(batch)
        theirs = model.logits(torch.from_numpy(token_ids), places, places, attention)
        ours = made.logits(packed, positions)
    return made if is_the_norm and torch.equal(theirs, ours) else None


@contextmanager
def _row_norm(module: Any) -> Iterator[bool]:
    """Let the last norm add in the same order as a pass, so that bits can be compared; say if it is that
    norm."""
    inner = module.model.norm
    ours = RowNorm(inner)
    x = torch.randn(1, _TRIAL_ROWS, len(inner.weight), generator=torch.Generator().manual_seed(1))
    module.model.norm = ours
    try:
        expected = inner(x)
        yield bool((ours(x) - expected).abs().max() <= _TOLERANCE * expected.abs().max())
    finally:
        module.model.norm = inner
