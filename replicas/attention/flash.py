"""Attention by the package flash-attn, version 2: its kernels read the paged pool in place."""

import importlib
from typing import ClassVar

from torch import Tensor

from replicas.attention.base import KVPoolSpec
from replicas.attention.varlen import FLASH_PAGE, VarlenAttention, flash_window


class FlashAttention(VarlenAttention):
    """`flash_attn_varlen_func` for steps with prompts, `flash_attn_with_kvcache` for decodes alone.

    The latter splits long contexts over the GPU whatever the heads; the former only when it packs the
    heads that share a KV head, which it does for one query per sequence.
    """

    name: ClassVar = "flash"
    preferred_block_size: ClassVar = FLASH_PAGE
    block_size_multiple: ClassVar = FLASH_PAGE
    supports_softcap: ClassVar = True
    batch_invariant: ClassVar = False

    @classmethod
    def missing(cls) -> str | None:
        try:
            importlib.import_module("flash_attn")
        except ImportError as error:  # not installed, or built for another torch
            return f"the package flash-attn cannot be imported: {error}"
        return None

    def __init__(self, spec: KVPoolSpec) -> None:
        super().__init__(spec)
        kernels = importlib.import_module("flash_attn")
        self._varlen = kernels.flash_attn_varlen_func
        self._decode = kernels.flash_attn_with_kvcache

    def _attend(
        self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        arrays, tensors = self._arrays, self._tensors
        if arrays.max_query_len == 1:
            decoded: Tensor = self._decode(
                query[:, None],
                self._keys[layer],
                self._values[layer],
                cache_seqlens=tensors.seq_lens,
                block_table=tensors.block_tables,
                softmax_scale=scaling,
                causal=True,
                window_size=flash_window(window, causal=False),
                softcap=softcap or 0.0,
            )
            return decoded[:, 0]
        out: Tensor = self._varlen(
            query,
            self._keys[layer],
            self._values[layer],
            tensors.query_start_loc,
            tensors.key_start_loc,
            arrays.max_query_len,
            arrays.max_seq_len,
            softmax_scale=scaling,
            causal=True,
            window_size=flash_window(window, causal=False),
            softcap=softcap or 0.0,
            block_table=tensors.block_tables,
        )
        return out
