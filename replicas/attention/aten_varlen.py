"""Attention by torch's own flash-attention kernel where it cannot page: torch 2.10, 2.11, and any block size.

A sequence's keys start wherever `cum_seq_k` says and end where `seqused_k` says, and the kernel wants neither
to be in order. So for decodes every block of a sequence is a sequence of its own, read in place, and the
partial results are merged by their log-sum-exp (Dao et al., "Flash-Decoding", 2023). Steps with prompts
gather the K and V of their sequences first: dearer, but once per prompt chunk and not per token.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import AttentionNeeds, KVPoolSpec
from replicas.attention.staging import num_bytes
from replicas.attention.varlen import StepArrays, VarlenAttention, flash_window
from replicas.packing import IntArray, LongArray


@dataclass(frozen=True, slots=True)
class Pieces:
    """For decodes: per sequence and block which part of the pool it reads, on the device."""

    start_loc: Tensor  # [num_seqs * max_blocks + 1] int32; slot of the piece's first key; the last is unused
    lengths: Tensor  # [num_seqs * max_blocks] int32; 0 = nothing
    query_start_loc: Tensor  # [num_seqs * max_blocks + 1] int32


class AtenVarlenAttention(VarlenAttention):
    """`aten::_flash_attention_forward` without block tables. No soft cap."""

    name: ClassVar = "aten_varlen"
    preferred_block_size: ClassVar = 256  # a piece is a kernel's unit of work: small ones waste it
    block_size_multiple: ClassVar = 16
    supports_softcap: ClassVar = False
    batch_invariant: ClassVar = False

    @classmethod
    def missing(cls) -> str | None:
        return None

    @classmethod
    def kv_bytes_per_token(cls, needs: AttentionNeeds, dtype: torch.dtype) -> int:
        """Count one layer more: steps with prompts gather K and V of a layer outside the pool."""
        of_pool = super().kv_bytes_per_token(needs, dtype)
        return of_pool + of_pool // needs.num_layers

    def __init__(self, spec: KVPoolSpec) -> None:
        super().__init__(spec)
        needs = spec.needs
        self._group = needs.num_heads // needs.num_kv_heads
        self._windows = sorted(set(needs.windows), key=lambda window: window or 0)

    def _plan(self, arrays: StepArrays, into: Tensor | None) -> None:
        super()._plan(arrays, into)
        used = arrays.num_bytes if into is not None else 0
        if arrays.max_query_len == 1:
            flat = [array for window in self._windows for array in self._pieces(arrays, window)]
            tensors = self._staging.upload(flat, None if into is None else into[used:])
            self._pieces_of = {w: Pieces(*tensors[3 * i : 3 * i + 3]) for i, w in enumerate(self._windows)}
        else:
            [self._key_slots] = self._staging.upload([_key_slots(arrays, self._block_size)])

    def _fixed_bytes(self, arrays: StepArrays) -> int:
        return super()._fixed_bytes(arrays) + num_bytes(
            [array for window in self._windows for array in self._pieces(arrays, window)]
        )

    def _attend(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,  # noqa: ARG002 - models with one are refused at start
    ) -> Tensor:
        keys, values = (pool[layer].flatten(0, 1) for pool in (self._keys, self._values))
        if self._arrays.max_query_len == 1:
            return self._decode(query, keys, values, scaling, self._pieces_of[window])
        left, right = flash_window(window, causal=True)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            query,
            keys[self._key_slots],
            values[self._key_slots],
            self._tensors.query_start_loc,
            self._tensors.key_start_loc,
            self._arrays.max_query_len,
            self._arrays.max_seq_len,
            0.0,
            window is None,
            False,
            scale=scaling,
            window_size_left=left,
            window_size_right=right,
        )[0]
        return out

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, pieces: Pieces) -> Tensor:
        num_seqs, num_heads, head_dim = query.shape
        num_pieces = len(pieces.lengths) // num_seqs
        # The heads that share a KV head become rows of one query: their keys are read once. With as many
        # heads as KV heads the kernel does not reorder them itself, and log-sum-exp has its plain layout.
        grouped = query.view(num_seqs, 1, -1, self._group, head_dim).transpose(2, 3)
        partial, lse = torch.ops.aten._flash_attention_forward(
            grouped.expand(-1, num_pieces, -1, -1, -1).reshape(-1, grouped.shape[3], head_dim),
            keys,
            values,
            pieces.query_start_loc,
            pieces.start_loc,
            self._group,
            self._block_size,
            0.0,
            False,
            False,
            scale=scaling,
            window_size_left=-1,
            window_size_right=-1,
            seqused_k=pieces.lengths,
        )[:2]
        partial = partial.view(num_seqs, num_pieces, self._group, -1, head_dim)
        lse = lse.view(-1, num_seqs, num_pieces, self._group).permute(1, 2, 3, 0)
        merged = _merge(partial, lse, pieces.lengths.view(num_seqs, num_pieces) > 0)
        return merged.transpose(1, 2).reshape(num_seqs, num_heads, head_dim)

    def _pieces(self, arrays: StepArrays, window: int | None) -> list[IntArray]:
        """Cut what each decode sees into blocks; in the order of `Pieces`."""
        size = self._block_size
        num_seqs, max_blocks = arrays.block_tables.shape
        ends = arrays.seq_lens[:, None]
        seen_from = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        block_from = np.arange(max_blocks, dtype=np.int32) * size
        first = np.maximum(seen_from, block_from)
        lengths = np.maximum(np.minimum(ends, block_from + size) - first, 0)
        # Of empty pieces too the start must lie in the pool.
        starts = arrays.block_tables * size + np.minimum(first - block_from, size - 1)
        count = num_seqs * max_blocks
        return [
            np.append(starts.reshape(-1), 0).astype(np.int32),
            lengths.reshape(-1).astype(np.int32),
            np.arange(count + 1, dtype=np.int32) * self._group,
        ]


def _merge(
    partial: Tensor,  # [num_seqs, pieces, group, kv_heads, head_dim]
    lse: Tensor,  # [num_seqs, pieces, group, kv_heads] float32
    is_used: Tensor,  # [num_seqs, pieces] bool
) -> Tensor:  # [num_seqs, group, kv_heads, head_dim]; zeros where no piece is used
    unused = ~is_used[:, :, None, None]
    lse = lse.masked_fill(unused, -torch.inf)  # the kernel writes +inf there
    peak = lse.amax(dim=1, keepdim=True).clamp_min(torch.finfo(lse.dtype).min)
    weights = torch.exp(lse - peak)
    weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(lse.dtype).tiny)
    parts = partial.float().masked_fill(unused[..., None], 0.0)
    return (weights[..., None] * parts).sum(dim=1).to(partial.dtype)


def _key_slots(arrays: StepArrays, block_size: int) -> LongArray:
    """Return the slots of all keys of all sequences, one after the other."""
    parts = []
    within = np.arange(block_size)
    for table, length in zip(arrays.block_tables, arrays.seq_lens.tolist(), strict=True):
        blocks = table[: -(-length // block_size)].astype(np.int64)
        parts.append((blocks[:, None] * block_size + within).reshape(-1)[:length])
    return np.concatenate(parts)
