"""Attention by torch.nn.attention.varlen: flash-attention's kernels as torch 2.12 and later bring them."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import varlen

from replicas.attention.base import KVPoolSpec
from replicas.attention.varlen import FLASH_PAGE, VarlenAttention, flash_window


class TorchVarlenAttention(VarlenAttention):
    """`varlen_attn_out` over the paged pool. No soft cap."""

    name: ClassVar = "torch_varlen"
    preferred_block_size: ClassVar = FLASH_PAGE
    block_size_multiple: ClassVar = FLASH_PAGE
    supports_softcap: ClassVar = False
    batch_invariant: ClassVar = False

    @classmethod
    def missing(cls) -> str | None:
        if torch_version() < (2, 12):
            return f"torch {torch.__version__} has no paged varlen_attn; 2.12 or later is needed"
        return None

    def __init__(self, spec: KVPoolSpec) -> None:
        super().__init__(spec)
        self._is_grouped = spec.needs.num_heads > spec.needs.num_kv_heads
        self._may_choose_splits = torch_version() >= (2, 13)

    def _attend(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,  # noqa: ARG002 - models with one are refused at start
    ) -> Tensor:
        arrays, tensors = self._arrays, self._tensors
        out = torch.empty_like(query)
        varlen.varlen_attn_out(
            out,
            query,
            self._keys[layer],
            self._values[layer],
            tensors.query_start_loc,
            tensors.key_start_loc,
            arrays.max_query_len,
            arrays.max_seq_len,
            scale=scaling,
            # For single queries no mask is needed, and with one the heads of a group are not packed.
            window_size=flash_window(window, causal=arrays.max_query_len > 1),
            enable_gqa=self._is_grouped,
            seqused_k=tensors.seq_lens,
            block_table=tensors.block_tables,
            num_splits=self._num_splits(window),
        )
        return out

    def _num_splits(self, window: int | None) -> int | None:
        """One split, except where more are safe.

        With torch 2.13 splits of a paged cache leave rows unwritten unless the heads of a group are packed
        (pytorch#194167); torch 2.12 refuses the argument and does not split in that case.
        """
        is_packed = self._is_grouped and window is None and self._arrays.max_query_len == 1
        return 1 if self._may_choose_splits and not is_packed else None


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
