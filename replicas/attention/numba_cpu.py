"""Paged attention on CPU in fp32; the kernels are in numba_kernels.py."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.attention import numba_kernels as kernels
from replicas.attention.base import AttentionBackend, AttentionNeeds, KVPoolSpec
from replicas.attention.crew import Crew
from replicas.large_memory import large_zeros
from replicas.packing import AttentionBatch, IntArray, LongArray

QUERY_ROWS = 8
"""Rows of one sequence that share a read of K and V; their accumulators must stay in L1."""
FloatArray = NDArray[np.float32]
SHARED_FROM = 30_000
"""Query-key products of a layer from which several threads share them: some 100 us of work."""


FEW_TASKS = 4
"""Tasks per thread below which long sequences are cut into parts, for threads to share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Tasks that are merged afterwards."""

    pairs_and_parts: IntArray  # [pieces, 2]: place in `order`, part of its positions
    starts: IntArray  # [pairs + 1]: first piece of each


NO_PIECES = Pieces(pairs_and_parts=np.zeros((0, 2), dtype=np.int32), starts=np.zeros(1, dtype=np.int32))


class NumbaAttention(AttentionBackend):
    """Batch-invariant paged attention for CPUs; K and V of a block are read once per group of heads."""

    name: ClassVar = "numba_cpu"
    preferred_block_size: ClassVar = kernels.TILE
    block_size_multiple: ClassVar = kernels.TILE
    supports_softcap: ClassVar = True
    batch_invariant: ClassVar = True

    @classmethod
    def unavailable(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"it computes on the CPU, not on {device.type}"
        if dtype != torch.float32:
            return f"it computes in float32, not in {dtype}"
        return None

    @classmethod
    def kv_bytes_per_token(cls, needs: AttentionNeeds, dtype: torch.dtype) -> int:
        return 2 * needs.num_layers * needs.num_kv_heads * padded_width(needs.head_dim) * dtype.itemsize

    def __init__(self, spec: KVPoolSpec) -> None:
        needs = spec.needs
        self._alone, self._all = Crew(1), Crew(spec.num_threads)
        self.block_size = spec.block_size
        self._num_heads = needs.num_heads
        self._num_kv_heads = needs.num_kv_heads
        width = padded_width(needs.head_dim)
        tiles = spec.block_size // kernels.TILE
        keys = (needs.num_layers, spec.num_blocks, needs.num_kv_heads, tiles, width, kernels.TILE)
        values = (needs.num_layers, spec.num_blocks, needs.num_kv_heads, spec.block_size, width)
        self._pools = [
            torch.from_numpy(pool) for shape in (keys, values) for pool in large_zeros(shape, np.float32)
        ]
        flat = [pool.view(-1).numpy() for pool in self._pools]
        self._keys, self._values = flat[: needs.num_layers], flat[needs.num_layers :]

    @property
    def pools(self) -> list[Tensor]:
        return self._pools

    def pools_of(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """K and V of a layer, flat, as numba_kernels.py describes them."""
        return self._keys[layer], self._values[layer]

    def begin_step(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self.work = _split_rows(batch)
        # Products of a query with a key, per layer: below some number waking a thread costs more.
        cost = self.work[:, 2] * (self.work[:, 3] + self.work[:, 2])
        self._crew = self._all if cost.sum() * self._num_heads > SHARED_FROM else self._alone
        self.order = _balance(cost, self._num_kv_heads, self._crew.num_threads)
        self.pieces = NO_PIECES
        if len(self.order) < FEW_TASKS * self._all.num_threads and self._all.num_threads > 1:
            self.pieces = _cut(self.work, self.order, self._num_kv_heads)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        kernels.store(
            self._keys[layer],
            self._values[layer],
            key.contiguous().numpy(),
            0,
            value.contiguous().numpy(),
            0,
            self._num_kv_heads,
            self._batch.slot_mapping,
            self.block_size,
            0,
            self._batch.num_rows,
        )

    def attend(
        self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        out = torch.empty(query.shape)
        out[self._batch.num_rows :] = 0.0
        args = (
            out.numpy(),
            query.contiguous().numpy(),
            self._keys[layer],
            self._values[layer],
            self._batch.block_tables,
            self.block_size,
            self._num_kv_heads,
            self.work,
            self.order,
            np.float32(scaling),
            window or 0,
            np.float32(softcap or 0.0),
        )
        self._crew.run(kernels.attend, args, len(self.order))
        return out


def _cut(work: IntArray, order: IntArray, num_kv_heads: int) -> Pieces:
    """Cut the (item, head) pairs into their parts; NO_PIECES where all have but one."""
    items = work[order // num_kv_heads]
    counts = -(-(items[:, 2] + items[:, 3]) // kernels.PART)
    if counts.max(initial=1) == 1:
        return NO_PIECES
    starts = np.concatenate([[0], np.cumsum(counts)])
    pairs = np.repeat(np.arange(len(order)), counts)
    parts = np.arange(starts[-1]) - starts[pairs]
    return Pieces(
        pairs_and_parts=np.stack([pairs, parts], axis=1).astype(np.int32), starts=starts.astype(np.int32)
    )


def padded_width(head_dim: int) -> int:
    """head_dim rounded up to whole lanes."""
    return -(-head_dim // kernels.TILE) * kernels.TILE


def _split_rows(batch: AttentionBatch) -> IntArray:
    """Cut each sequence's rows into items of at most QUERY_ROWS.

    Returns [items, 4]: sequence, first row, number of rows, position of the first row.
    """
    starts = batch.query_start_loc[:-1]
    lengths = np.diff(batch.query_start_loc)
    counts = -(-lengths // QUERY_ROWS)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * QUERY_ROWS
    rows = np.minimum(QUERY_ROWS, lengths[sequence] - offset)
    position = (batch.seq_lens - lengths)[sequence] + offset
    return np.stack([sequence, starts[sequence] + offset, rows, position], axis=1).astype(np.int32)


def _balance(
    cost: LongArray,  # [items]
    num_kv_heads: int,
    num_threads: int,
) -> IntArray:
    """Order (item, head) pairs so that equal contiguous shares, one per thread, cost about the same."""
    pairs = np.arange(len(cost) * num_kv_heads, dtype=np.int32)
    if num_threads == 1:
        return pairs
    dearest_first = pairs[np.argsort(-np.repeat(cost, num_kv_heads), kind="stable")]
    return np.concatenate([dearest_first[thread::num_threads] for thread in range(num_threads)])
