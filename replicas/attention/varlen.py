"""What the GPU backends share: the pool, the plan of a step on the device, and which GPUs will do.

The pool of a layer is [num_blocks + 1, block_size, num_kv_heads, head_dim], K and V apart: what the kernels
of flash-attention page. The block behind the last one takes what padding rows write.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.attention.base import AttentionNeeds, GraphableAttention, KVPoolSpec
from replicas.attention.staging import Staging, num_bytes
from replicas.packing import AttentionBatch, IntArray, LongArray

FLASH_DTYPES: Final = (torch.bfloat16, torch.float16)
FLASH_PAGE: Final = 256
"""flash-attention 2 pages KV in multiples of this many tokens (flash_api.cpp)."""
_MIN_CAPABILITY: Final = (8, 0)
_MAX_HEAD_DIM: Final = 256
_HEAD_DIM_MULTIPLE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """A step as the kernels want it, on the host."""

    query_start_loc: IntArray  # [num_seqs + 1]
    key_start_loc: IntArray  # [num_seqs + 1]; sums of seq_lens
    seq_lens: IntArray  # [num_seqs]; 0 = padding, which attends to nothing and gives zeros
    block_tables: IntArray  # [num_seqs, max_blocks]
    slots: LongArray  # [rows]
    max_query_len: int
    max_seq_len: int
    """An upper bound: kernels cut off what lies behind it."""

    def on_device(self, staging: Staging, into: Tensor | None) -> "StepTensors":
        return StepTensors(*staging.upload(self._arrays, into))

    @property
    def num_bytes(self) -> int:
        return num_bytes(self._arrays)

    @property
    def _arrays(self) -> list[IntArray | LongArray]:
        return [self.query_start_loc, self.key_start_loc, self.seq_lens, self.block_tables, self.slots]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """StepArrays on the device, in this order."""

    query_start_loc: Tensor
    key_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slots: Tensor


class VarlenAttention(GraphableAttention):
    """Paged attention by a kernel for sequences of varying lengths. Not batch-invariant.

    Kernels align the causal mask at the last query and the last key: exactly a chunk behind its prefix.
    """

    def __init__(self, spec: KVPoolSpec) -> None:
        needs = spec.needs
        shape = (needs.num_layers, spec.num_blocks + 1, spec.block_size, needs.num_kv_heads, needs.head_dim)
        self._keys = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self._values = torch.zeros_like(self._keys)
        self._block_size = spec.block_size
        self._trash_slot = spec.num_blocks * spec.block_size
        self._staging = Staging(spec.device)
        self._fixed = torch.empty(0, dtype=torch.uint8, device=spec.device)

    @classmethod
    def unavailable(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"it computes on CUDA GPUs, not on {device.type}"
        if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
            return "it needs a GPU of compute capability 8.0 (Ampere) or newer"
        if dtype not in FLASH_DTYPES:
            return f"it computes in bfloat16 or float16, not in {dtype}"
        return cls.missing()

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Return which software it lacks, or None."""

    @classmethod
    def unsupported(cls, needs: AttentionNeeds) -> str | None:
        if needs.head_dim % _HEAD_DIM_MULTIPLE or needs.head_dim > _MAX_HEAD_DIM:
            return f"it needs a head size that is a multiple of 8 up to 256, not {needs.head_dim}"
        return super().unsupported(needs)

    @property
    def pools(self) -> list[Tensor]:
        return [layer[:-1] for pool in (self._keys, self._values) for layer in pool]

    def begin_step(self, batch: AttentionBatch) -> None:
        self._num_rows = batch.num_rows
        key_start_loc = np.concatenate([[0], np.cumsum(batch.seq_lens)])
        self._plan(
            StepArrays(
                query_start_loc=batch.query_start_loc,
                key_start_loc=key_start_loc.astype(np.int32),
                seq_lens=batch.seq_lens,
                block_tables=batch.block_tables,
                slots=batch.slot_mapping.astype(np.int64),
                max_query_len=int(np.diff(batch.query_start_loc).max()),
                max_seq_len=int(batch.seq_lens.max()),
            ),
            None,
        )

    def reserve_fixed(self, max_rows: int, max_blocks: int) -> None:
        empty = np.zeros(0, dtype=np.int32)
        batch = AttentionBatch(
            query_start_loc=np.zeros(1, dtype=np.int32),
            seq_lens=empty,
            block_tables=np.zeros((0, 1), dtype=np.int32),
            slot_mapping=empty,
        )
        size = self._fixed_bytes(self._padded(batch, max_rows, max_blocks))
        self._fixed = torch.zeros(size, dtype=torch.uint8, device=self._keys.device)

    def begin_fixed(self, batch: AttentionBatch, rows: int, max_blocks: int) -> None:
        self._num_rows = rows
        self._plan(self._padded(batch, rows, max_blocks), self._fixed)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        slots = self._tensors.slots
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, key[: self._num_rows])
        self._values[layer].flatten(0, 1).index_copy_(0, slots, value[: self._num_rows])

    def attend(
        self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        # Kernels demand as many query rows as the sequences have.
        out = self._attend(layer, query[: self._num_rows].contiguous(), scaling, window, softcap)
        padding = len(query) - self._num_rows
        return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

    @abstractmethod
    def _attend(
        self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """As `attend`, without padding rows."""

    def _plan(self, arrays: StepArrays, into: Tensor | None) -> None:
        """Bring the step to the device; `into` is where, when addresses must not change."""
        self._arrays = arrays
        self._tensors = arrays.on_device(self._staging, into)

    def _fixed_bytes(self, arrays: StepArrays) -> int:
        """Return the bytes that `_plan` takes of its `into`."""
        return arrays.num_bytes

    def _padded(self, batch: AttentionBatch, rows: int, max_blocks: int) -> StepArrays:
        count = len(batch.seq_lens)
        assert batch.num_rows == count <= rows, f"{batch.num_rows} rows of {count} decodes, padded to {rows}"
        seq_lens = np.zeros(rows, dtype=np.int32)
        seq_lens[:count] = batch.seq_lens
        tables = np.zeros((rows, max_blocks), dtype=np.int32)
        tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
        slots = np.full(rows, self._trash_slot, dtype=np.int64)
        slots[:count] = batch.slot_mapping
        return StepArrays(
            query_start_loc=np.arange(rows + 1, dtype=np.int32),
            key_start_loc=np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32),
            seq_lens=seq_lens,
            block_tables=tables,
            slots=slots,
            max_query_len=1,
            max_seq_len=max_blocks * self._block_size,
        )


def flash_window(window: int | None, *, causal: bool) -> tuple[int, int]:
    """Return (left, right) as the kernels count them: keys beside a row, itself not included; -1 = all."""
    if window is not None:
        return (window - 1, 0)
    return (-1, 0) if causal else (-1, -1)
