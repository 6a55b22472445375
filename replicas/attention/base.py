"""The contract between the model runner and an attention backend.

A backend owns the paged KV pool of all layers. Per step the runner calls `begin_step` once, then each
attention layer calls `store` and `attend` in turn:

    begin_step(batch)                 where the rows of this step live; plans whatever all layers share
    store(layer, key, value)          K and V of the new rows into their slots
    attend(layer, query, ...)         each row against its sequence's positions 0 .. its own, causal

Batch invariance: a backend with `batch_invariant` gives each row bits that depend on the row's own query and
on the K and V of its sequence alone: not on the other rows, the chunk the row came in, block ids, or threads.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from replicas.packing import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What a model asks of its attention, as observed by calling it once."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Per layer the sliding window in tokens, the row itself included; None = all."""
    softcap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSpec:
    """Size and place of the pool a backend allocates."""

    needs: AttentionNeeds
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    num_threads: int
    """CPU threads a backend may use."""


class AttentionBackend(ABC):
    """Paged causal attention over a KV pool. One instance per runner; not thread-safe."""

    name: ClassVar[str]
    preferred_block_size: ClassVar[int]
    block_size_multiple: ClassVar[int]
    """Block sizes must be a multiple of this."""
    supports_softcap: ClassVar[bool]
    batch_invariant: ClassVar[bool]

    @classmethod
    @abstractmethod
    def unavailable(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run here, or None when it can."""

    @classmethod
    def unsupported(cls, needs: AttentionNeeds) -> str | None:
        """Return why this backend cannot serve such a model, or None when it can."""
        if needs.softcap and not cls.supports_softcap:
            return "it lacks the soft cap that this model uses"
        return None

    @classmethod
    def kv_bytes_per_token(cls, needs: AttentionNeeds, dtype: torch.dtype) -> int:
        """Return the bytes of the pool per token, all layers."""
        return 2 * needs.num_layers * needs.num_kv_heads * needs.head_dim * dtype.itemsize

    @abstractmethod
    def __init__(self, spec: KVPoolSpec) -> None:
        """Allocate the pool, zeroed: slots never written may be multiplied by zero weights."""

    @property
    @abstractmethod
    def pools(self) -> list[Tensor]:
        """The pool's tensors, all layers; the first dimension of each is the block id."""

    @abstractmethod
    def begin_step(self, batch: AttentionBatch) -> None:
        """Plan the step. `batch` must stay unchanged until the next call."""

    @abstractmethod
    def store(
        self,
        layer: int,
        key: Tensor,  # [rows, num_kv_heads, head_dim]; rows >= batch.num_rows are padding
        value: Tensor,  # as key
    ) -> None:
        """Write the new rows' K and V to their slots. Idempotent."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: Tensor,  # [rows, num_heads, head_dim]; head h reads KV head h // (num_heads / num_kv_heads)
        scaling: float,  # multiplies query . key
        window: int | None,  # a row sees this many positions, itself included; None = all
        softcap: float | None,  # s -> cap * tanh(s / cap) on scaled scores
    ) -> Tensor:  # [rows, num_heads, head_dim]; padding rows are zero
        """Attend causally, `store` of the same layer being done."""


class GraphableAttention(AttentionBackend):
    """A backend whose launches can be recorded once and replayed (CUDA graphs), for steps of decodes only.

    After `begin_fixed` the tensors that `store` and `attend` read lie where they lay for every earlier call
    with the same `rows` and `max_blocks`, and nothing else about their launches depends on the batch.
    """

    @abstractmethod
    def reserve_fixed(
        self,
        max_rows: int,
        max_blocks: int,  # per sequence
    ) -> None:
        """Reserve what `begin_fixed` needs at most. Once, before anything is recorded."""

    @abstractmethod
    def begin_fixed(
        self,
        batch: AttentionBatch,  # one row per sequence
        rows: int,  # that `store` and `attend` will get; those behind the batch's are padding
        max_blocks: int,
    ) -> None:
        """Plan a step, as `begin_step`."""
